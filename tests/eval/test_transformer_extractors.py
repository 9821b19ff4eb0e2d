"""DINOv2 and CLIP from folders. Weights are random; only the smallest real architecture is built whole."""

import hashlib
import json
import logging
import shutil
import socket
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from eval.extractors import load, transformer
from eval.extractors.resize import unclamped_bicubic


def random_network(kind, config):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = kind(config).eval().requires_grad_(False)
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.02)
    return network


@pytest.fixture(scope="module")
def vits14():
    """The reference implementation, and the folder it was saved to."""
    config = transformers.Dinov2Config(
        hidden_size=384, num_hidden_layers=12, num_attention_heads=6, patch_size=14, image_size=518
    )
    return random_network(transformers.Dinov2Model, config)


@pytest.fixture(scope="module")
def folder(vits14, tmp_path_factory):
    path = tmp_path_factory.mktemp("dinov2-small")
    vits14.save_pretrained(path)
    return path


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def tiny_clip_config():
    tower = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    return transformers.CLIPConfig(
        text_config=tower,
        vision_config={**tower, "image_size": 336, "patch_size": 14, "projection_dim": 24},
        projection_dim=24,
    )


def noise(n, height=40, width=64):
    return torch.randint(256, (n, 3, height, width), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def class_token(reference, images, positions):
    """The reference's feature of the images as EDM2 scales them, with these position embeddings."""
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    learned = reference.embeddings.position_embeddings
    reference.embeddings.position_embeddings = torch.nn.Parameter(positions, requires_grad=False)
    x = (unclamped_bicubic(images.float(), 224) / 255 - mean) / std
    out = reference(pixel_values=x).last_hidden_state[:, 0]
    reference.embeddings.position_embeddings = learned
    return out


def original_positions(learned):
    """Sampled one by one where the original code samples: at (i + 1/2) · 37 / 16.1 - 1/2, by torch's cubic."""
    grid = learned[0, 1:].view(37, 37, -1)

    def taps(i):
        x = (i + 0.5) * 37 / 16.1 - 0.5
        left = int(torch.tensor(x).floor())
        distances = [abs(x - (left + k)) for k in (-1, 0, 1, 2)]
        a = -0.75
        weights = [
            (a + 2) * d**3 - (a + 3) * d**2 + 1 if d <= 1 else a * (d**3 - 5 * d**2 + 8 * d - 4) for d in distances
        ]
        return [(min(max(left + k, 0), 36), w) for k, w in zip((-1, 0, 1, 2), weights, strict=True)]

    rows = torch.stack([sum(w * grid[k] for k, w in taps(i)) for i in range(16)])
    both = torch.stack([sum(w * rows[:, k] for k, w in taps(i)) for i in range(16)], 1)
    return torch.cat((learned[:, :1], both.reshape(1, 256, -1)), 1)


def test_dinov2_is_its_class_token_with_the_original_position_embeddings(vits14, folder):
    extractor, images = load("dinov2-vits14", weights=folder), noise(3)
    features = extractor(images)
    assert features.shape == (3, 384) and features.dtype == torch.float32
    assert (extractor.name, extractor.resize) == ("dinov2-vits14", "bicubic-antialias-224-unclamped")
    learned = vits14.embeddings.position_embeddings.data
    expected = class_token(vits14, images, original_positions(learned))
    assert (features - expected).abs().max() < 1e-4 and expected.std() > 0.1
    theirs = class_token(vits14, images, learned)  # transformers' own way of bringing 37 x 37 to 16 x 16
    assert (features - theirs).abs().max() > 1e-3
    assert (extractor(images[:1]) - features[:1]).abs().max() < 1e-4


def test_position_embeddings_of_the_right_size_stay():
    learned = torch.randn(1, 257, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(transformer.resample(learned, 16), learned)


def test_loading_is_silent_offline_and_draws_nothing(folder, monkeypatch, caplog, capsys):
    def refuse(*_):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    level, bars = transformers.logging.get_verbosity(), transformers.utils.logging.is_progress_bar_enabled()
    state = torch.get_rng_state()
    with caplog.at_level(logging.WARNING):
        extractor = load("dinov2-vits14", weights=folder)
    extractor(noise(1))
    assert torch.equal(torch.get_rng_state(), state)
    assert capsys.readouterr() == ("", "") and not caplog.records
    assert transformers.logging.get_verbosity() == level
    assert transformers.utils.logging.is_progress_bar_enabled() == bars
    assert not any(module.training for module in extractor.network.modules())


def test_the_hash_is_that_of_the_weight_file(folder):
    content = (folder / "model.safetensors").read_bytes()
    assert load("dinov2-vits14", weights=folder).weights_sha256 == hashlib.sha256(content).hexdigest()


def test_half_precision_files_and_torch_files_are_read(vits14, copy):
    state = {key: value.half() for key, value in load_file(copy / "model.safetensors").items()}
    (copy / "model.safetensors").unlink()
    torch.save(state, copy / "pytorch_model.bin")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"dtype": "float16", "torch_dtype": "float16"}))
    extractor = load("dinov2-vits14", weights=copy)
    assert all(p.dtype == torch.float32 for p in extractor.network.parameters())
    expected = class_token(vits14, noise(1), original_positions(vits14.embeddings.position_embeddings.data))
    assert 0 < (extractor(noise(1)) - expected).abs().max() < 0.05


@pytest.mark.parametrize(
    "name, message",
    [
        ("dinov2-vitb14", "hidden_size 384, but dinov2-vitb14 has 768"),
        ("dinov2-vitl14", "hidden_size 384, but dinov2-vitl14 has 1024"),
        ("dinov2-vitg14", "hidden_size 384, but dinov2-vitg14 has 1536"),
        ("clip-vitl14-336", "model_type 'dinov2', but clip-vitl14-336 is 'clip'"),
    ],
)
def test_a_folder_of_another_architecture_is_refused(folder, name, message):
    with pytest.raises(ValueError, match=message) as error:
        load(name, weights=folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_hidden_layers": 11}, "num_hidden_layers 11, but dinov2-vits14 has 12"),
        ({"patch_size": 16}, "patch_size 16"),
        ({"image_size": 224}, "image_size 224"),
        ({"use_swiglu_ffn": True}, "use_swiglu_ffn True"),
        ({"hidden_act": "relu"}, "hidden_act relu"),
        ({"model_type": "dinov2_with_registers"}, "model_type 'dinov2_with_registers', but dinov2-vits14 is 'dinov2'"),
    ],
)
def test_each_field_that_changes_the_features_is_checked(copy, change, message):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=message):
        load("dinov2-vits14", weights=copy)


def test_incomplete_folders_get_one_clear_line(copy, tmp_path):
    with pytest.raises(FileNotFoundError, match="comes without weights: fetch its folder"):
        load("dinov2-vits14")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load("dinov2-vits14", weights=tmp_path / "absent")
    state = load_file(copy / "model.safetensors")
    save_file({k: v for k, v in state.items() if k != "layernorm.weight"}, copy / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"not the weights of Dinov2Model: 1 tensors are missing, first layernorm.weight"
    ):
        load("dinov2-vits14", weights=copy)
    save_file(state | {"layernorm.weight": torch.ones(7)}, copy / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 tensors are of another shape, first layernorm.weight"):
        load("dinov2-vits14", weights=copy)
    (copy / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model.safetensors nor pytorch_model.bin"):
        load("dinov2-vits14", weights=copy)
    (copy / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not the configuration of a network"):
        load("dinov2-vits14", weights=copy)


def test_without_transformers_the_message_names_the_remedy(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(FileNotFoundError, match="pip install transformers"):
        load("dinov2-vits14", weights=folder)


def test_clip_is_its_projected_embedding_of_the_image_tower(tmp_path, monkeypatch):
    both = random_network(transformers.CLIPModel, tiny_clip_config())
    both.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="hidden_size 32, but clip-vitl14-336 has 1024"):
        load("clip-vitl14-336", weights=tmp_path)
    monkeypatch.setattr(transformer, "_config", lambda name: both.config.vision_config)  # ViT-L has 300 M weights
    extractor, images = load("clip-vitl14-336", weights=tmp_path), noise(2)
    mean, std = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    x = unclamped_bicubic(images.float(), 336) / 255
    x = (x - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    expected = both.visual_projection(both.vision_model(pixel_values=x).pooler_output)
    assert extractor(images).shape == (2, 24) and extractor.resize == "bicubic-antialias-336-unclamped"
    assert (extractor(images) - expected).abs().max() < 1e-4 and expected.std() > 0.1


@pytest.mark.parametrize("name", transformer.NAMES)
def test_each_name_stands_for_the_published_number_of_weights(name):
    published = {  # of the image tower, in millions
        "dinov2-vits14": 22.06,
        "dinov2-vitb14": 86.58,
        "dinov2-vitl14": 304.37,
        "dinov2-vitg14": 1136.48,
        "clip-vitl14-336": 304.29,
    }
    kind = transformers.CLIPVisionModelWithProjection if name.startswith("clip") else transformers.Dinov2Model
    with torch.device("meta"):
        network = kind(transformer._config(name))
    assert sum(p.numel() for p in network.parameters()) / 1e6 == pytest.approx(published[name], abs=0.01)
