import shutil
import types

import numpy as np
import pytest
import torch
import torchvision.models.inception as theirs
from PIL import Image
from sklearn.datasets import load_sample_image

from dit_train.config import DataConfig
from dit_train.data import sources
from eval.extractors import NAMES, load, score_name
from eval.extractors.efficientnet_lite import SameConv2d
from eval.extractors.inception import FIDInception
from eval.extractors.resize import bicubic, tensorflow1_bilinear, unclamped_bicubic
from eval.extractors.weights import shipped


@pytest.fixture(scope="module")
def held_out():
    source = sources.load(DataConfig(source="digits")).heldout
    return source.images(range(len(source))), source.labels(range(len(source)))


@pytest.fixture(scope="module")
def lite():
    return load("efficientnet-lite0")


@pytest.fixture(scope="module")
def inception_state():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        state = {k: v.clone() for k, v in FIDInception().state_dict().items()}
    for name, value in state.items():
        if name.endswith("conv.weight"):
            value.mul_(6**0.5)  # He's gain: the default initialisation dies out over so many layers
        if name.endswith("running_mean"):
            value.add_(0.01)
    return state | {"fc.bias": torch.ones(1008)}


def photo(name):
    """The middle square, uint8 [1, 3, 427, 427]."""
    return torch.from_numpy(np.array(load_sample_image(name))).permute(2, 0, 1)[None, :, :, 106:533]


def noise_images(n, channels, size, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(256, (n, channels, size, size), generator=g, dtype=torch.uint8)


def test_digits_classifier_knows_digits_it_was_not_trained_on(held_out):
    images, labels = held_out
    network = load("digits-cnn").network
    assert (network.logits(images.float()).argmax(1) == labels).float().mean() > 0.95


@pytest.mark.parametrize("name", ["digits-cnn", "fashion-mnist-cnn"])
def test_shipped_weights_are_those_their_name_promises(name, tmp_path):
    extractor = load(name)
    assert shipped(name).stem.endswith(extractor.weights_sha256[:8])
    assert shipped(name).stat().st_size < 700_000
    features = extractor(noise_images(3, 1, extractor.network.image_shape[1]))
    assert features.shape == (3, 64) and features.dtype == torch.float32
    damaged = tmp_path / shipped(name).name
    content = bytearray(shipped(name).read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(ValueError, match="SHA-256 begins with"):
        load(name, weights=damaged)


def test_weights_of_another_network_are_named_as_such():
    with pytest.raises(ValueError, match=r"not the weights of SmallClassifier: 4 tensors are unknown"):
        load("digits-cnn", weights=shipped("fashion-mnist-cnn"))


def test_missing_and_unreadable_files_get_one_clear_line(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such weight file"):
        load("digits-cnn", weights=tmp_path / "absent.pth")
    (tmp_path / "text.pth").write_text("hello")
    with pytest.raises(ValueError, match=r"not a .safetensors file or a state dict") as error:
        load("digits-cnn", weights=tmp_path / "text.pth")
    assert "\n" not in str(error.value)
    with pytest.raises(FileNotFoundError, match="comes without weights"):
        load("inception-2015-12-05")
    with pytest.raises(ValueError, match="known are digits-cnn"):
        load("inception")
    with pytest.raises(ValueError, match="only efficientnet-lite0 takes a resolution"):
        load("digits-cnn@224")


def test_pickled_code_is_not_run(tmp_path):
    class Payload:
        def __reduce__(self):
            return (shutil.rmtree, (str(tmp_path / "precious"),))

    (tmp_path / "precious").mkdir()
    torch.save({"x": Payload()}, tmp_path / "evil.pth")
    with pytest.raises(ValueError, match=r"not a .safetensors file"):
        load("digits-cnn", weights=tmp_path / "evil.pth")
    assert (tmp_path / "precious").exists()


def test_images_must_be_uint8_nchw_of_the_right_size():
    extractor = load("digits-cnn")
    good = noise_images(2, 1, 8)
    with pytest.raises(TypeError, match=r"uint8 tensor in 0..255, not torch.float32"):
        extractor(good.float())
    with pytest.raises(TypeError, match="not ndarray"):
        extractor(good.numpy())
    for wrong in (good[0], good.permute(0, 2, 3, 1), noise_images(2, 1, 9), noise_images(2, 3, 8)):
        with pytest.raises(ValueError, match=r"digits-cnn takes images of shape \[N, 1, 8, 8\]"):
            extractor(wrong)
    assert extractor(good[:0]).shape == (0, 64)


def test_a_nearly_black_batch_of_a_collapsed_model_has_features():
    assert load("digits-cnn")(torch.ones(4, 1, 8, 8, dtype=torch.uint8)).isfinite().all()


def test_lite0_names_a_flower_and_a_palace():
    extractor = load("efficientnet-lite0@224")
    assert extractor.name == "efficientnet-lite0@224" and extractor.resize == "bicubic-antialias-224"
    assert extractor.weights_sha256.startswith("57934424")
    logits = extractor.network.logits(torch.cat((photo("flower.jpg"), photo("china.jpg"))).float())
    assert logits.argmax(1).tolist() == [985, 698]  # daisy, palace


def test_the_odd_row_of_same_padding_goes_below_and_to_the_right():
    conv = SameConv2d(1, 1, 3, stride=2)
    conv.weight.data.zero_()[..., 0, 0] = 1
    x = torch.arange(16.0).view(1, 1, 4, 4)
    assert torch.equal(conv(x), x[..., ::2, ::2])
    assert conv(torch.zeros(1, 1, 5, 7)).shape[2:] == (3, 4)


def test_lite0_features_do_not_depend_on_the_batch(lite):
    images = photo("china.jpg").unfold(2, 100, 40).unfold(3, 100, 40)[0, :, :8, :8].flatten(1, 2).transpose(0, 1)
    together, alone = lite(images), torch.cat([lite(image[None]) for image in images])
    assert together.shape == (64, 1280) and lite.name == "efficientnet-lite0@128"
    assert (together - alone).abs().max() < 1e-4


def test_grey_images_are_repeated_to_colour(lite):
    grey = noise_images(2, 1, 20)
    assert torch.equal(lite(grey), lite(grey.repeat(1, 3, 1, 1)))


def test_autocast_and_fast_matmul_settings_do_not_reach_the_features(lite):
    images = noise_images(2, 3, 32)
    plain = lite.network(images.float())
    benchmark = torch.backends.cudnn.benchmark
    try:
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.benchmark = True
        with torch.autocast("cpu", dtype=torch.bfloat16):
            under_autocast = lite(images)
            assert torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
        assert torch.get_float32_matmul_precision() == "medium" and torch.backends.cudnn.benchmark
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.benchmark = benchmark
    assert torch.equal(plain, under_autocast)
    assert not torch.backends.cuda.matmul.allow_tf32  # the older switch can still be read


def test_loading_and_scoring_draw_no_random_numbers_and_never_train(lite):
    state = torch.get_rng_state()
    extractor = load("digits-cnn")
    extractor(noise_images(4, 1, 8))
    load("efficientnet-lite0")
    before = lite.network._bn0.running_mean.clone()
    lite(noise_images(2, 3, 32))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(before, lite.network._bn0.running_mean)
    assert not any(module.training for module in lite.network.modules())


class FidPools(types.SimpleNamespace):
    """torch.nn.functional as torchvision's Inception sees it, with the FID network's pools."""

    def __init__(self):
        super().__init__(last=False)

    def __getattr__(self, name):
        return getattr(torch.nn.functional, name)

    def avg_pool2d(self, x, **kwargs):
        if self.last:
            return torch.nn.functional.max_pool2d(x, **kwargs)
        return torch.nn.functional.avg_pool2d(x, **kwargs, count_include_pad=False)


def test_inception_is_torchvisions_with_other_pools_and_resize(inception_state, tmp_path, monkeypatch):
    torch.save(inception_state, tmp_path / "inception.pth")
    ours = load("inception-2015-12-05", weights=tmp_path / "inception.pth")
    images = noise_images(2, 3, 40)
    features = ours(images)
    assert features.shape == (2, 2048) and ours.resize == "tf1-bilinear-299"

    pools = FidPools()
    monkeypatch.setattr(theirs, "F", pools)
    with torch.random.fork_rng():
        network = theirs.Inception3(num_classes=1008, aux_logits=False, init_weights=False).eval()
    network.load_state_dict(inception_state)
    network.fc = torch.nn.Identity()
    network.Mixed_7c.register_forward_pre_hook(lambda *_: setattr(pools, "last", True))
    kept = []
    network.Mixed_6d.branch1x1.register_forward_hook(lambda module, x, y: kept.append(y))  # after its ReLU
    with torch.no_grad():
        expected = network((tensorflow1_bilinear(images.float(), 299) - 128) / 128)
    assert_close(features, expected)

    seen = ours.observe(images)
    assert torch.equal(seen.features, features)
    assert seen.spatial.shape == (2, ours.num_spatial) == (2, 2023) and seen.spatial.min() == 0
    height_width_channel = seen.spatial.view(2, 17, 17, 7)
    for channel in range(7):
        assert_close(height_width_channel[..., channel], kept[0][:, channel])
    assert seen.logits.shape == (2, ours.num_classes) == (2, 1008)
    assert_close(seen.logits, expected @ inception_state["fc.weight"].T)


def assert_close(ours, theirs):
    assert theirs.std() > 1e-3
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


@pytest.fixture(scope="module")
def inception_file(inception_state, tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "inception.pth"
    torch.save(inception_state, path)
    return path


def test_clean_fids_resize_is_a_choice_that_the_name_shows(inception_file):
    images = noise_images(2, 3, 64)[:, :, :40]
    graph = load("inception-2015-12-05", weights=inception_file)
    clean = load("inception-2015-12-05", weights=inception_file, resize="bicubic-antialias-299")
    assert clean.resize == "bicubic-antialias-299" and clean.name == "inception-2015-12-05@bicubic-antialias-299"
    assert graph.resize == "tf1-bilinear-299" and graph.name == "inception-2015-12-05"
    again = load(clean.name, weights=inception_file)
    assert (again.name, again.resize) == (clean.name, clean.resize)
    same = load("inception-2015-12-05", weights=inception_file, resize="tf1-bilinear-299")
    assert (same.name, same.resize) == (graph.name, graph.resize)

    resized = torch.stack([torch.stack([pillow(channel, 299) for channel in image]) for image in images.float()])
    features = clean(images)
    with torch.no_grad():
        expected = graph.network(resized.clamp(0, 255))  # at 299 the graph's own resize changes nothing
    assert_close(features, expected)
    assert (graph(images) - features).abs().max() > 1e-2 * features.abs().max()


@pytest.mark.parametrize(
    "arguments",
    [
        {"name": "inception-2015-12-05", "resize": "lanczos"},
        {"name": "inception-2015-12-05", "resize": ""},
        {"name": "inception-2015-12-05@tf1-bilinear-299", "resize": "bicubic-antialias-299"},
        {"name": "inception-2015-12-05@lanczos"},
        {"name": "inception-2015-12-05@"},
        {"name": "digits-cnn", "resize": "tf1-bilinear-299"},
        {"name": "efficientnet-lite0@16"},
    ],
)
def test_other_resizes_are_refused(arguments, inception_file):
    weights = inception_file if arguments["name"].startswith("inception") else None
    with pytest.raises(ValueError, match=r"bicubic-antialias-299"):
        load(weights=weights, **arguments)


def test_trained_classifiers_give_their_logits_in_the_same_pass(lite):
    digits = load("digits-cnn")
    for extractor, images in ((digits, noise_images(3, 1, 8)), (lite, noise_images(2, 3, 32))):
        seen = extractor.observe(images)
        assert torch.equal(seen.features, extractor(images)) and seen.spatial is None and extractor.num_spatial == 0
        assert torch.equal(seen.logits, extractor.network.logits(images.float()))
        assert seen.logits.shape[1] == extractor.num_classes


def test_torchvisions_imagenet_weights_are_not_the_fid_network(inception_state, tmp_path):
    thousand = inception_state | {"fc.weight": torch.zeros(1000, 2048), "fc.bias": torch.zeros(1000)}
    torch.save(thousand, tmp_path / "inception_v3.pth")
    with pytest.raises(ValueError, match="1000 outputs, while the FID network has one of 1008: torchvision's ImageNet"):
        load("inception-2015-12-05", weights=tmp_path / "inception_v3.pth")
    with torch.random.fork_rng():
        published = theirs.Inception3(num_classes=1000, aux_logits=True, init_weights=False).state_dict()
    torch.save(published, tmp_path / "inception_v3_google.pth")
    with pytest.raises(ValueError, match="1000 outputs and an auxiliary one"):
        load("inception-2015-12-05", weights=tmp_path / "inception_v3_google.pth")
    retrained = {k: v for k, v in published.items() if not k.startswith("fc.")} | {
        "fc.weight": torch.zeros(1008, 2048),
        "fc.bias": torch.zeros(1008),
    }
    torch.save(retrained, tmp_path / "retrained.pth")
    with pytest.raises(ValueError, match="1008 outputs and an auxiliary one, while the FID network has one"):
        load("inception-2015-12-05", weights=tmp_path / "retrained.pth")
    torch.save({k: v for k, v in published.items() if not k.startswith("fc.")}, tmp_path / "headless.pth")
    with pytest.raises(ValueError, match="a classifier of 0 outputs"):
        load("inception-2015-12-05", weights=tmp_path / "headless.pth")


def test_a_file_that_only_bears_the_published_name_is_refused(inception_state, tmp_path):
    path = tmp_path / "pt_inception-2015-12-05-6726825d.pth"
    torch.save(inception_state, path)
    with pytest.raises(ValueError, match="the name says 6726825d"):
        load("inception-2015-12-05", weights=path)


def test_a_longer_promise_in_the_name_is_checked_whole(tmp_path):
    digest = load("digits-cnn").weights_sha256
    for promise in (digest, digest[:12]):
        shutil.copy(shipped("digits-cnn"), tmp_path / f"digits-{promise}.safetensors")
        assert load("digits-cnn", weights=tmp_path / f"digits-{promise}.safetensors").weights_sha256 == digest
    broken = digest[:10] + ("0" if digest[10] != "0" else "1")
    shutil.copy(shipped("digits-cnn"), tmp_path / f"digits-{broken}.safetensors")
    with pytest.raises(ValueError, match=f"begins with {digest[:11]}, the name says {broken}"):
        load("digits-cnn", weights=tmp_path / f"digits-{broken}.safetensors")


def test_missing_layers_are_named(inception_state, tmp_path):
    partial = {k: v for k, v in inception_state.items() if not k.startswith("Mixed_7c.branch_pool")}
    torch.save(partial, tmp_path / "partial.pth")
    with pytest.raises(ValueError, match=r"missing, first Mixed_7c.branch_pool.conv.weight"):
        load("inception-2015-12-05", weights=tmp_path / "partial.pth")
    without_counters = {k: v for k, v in inception_state.items() if not k.endswith("num_batches_tracked")}
    torch.save(without_counters, tmp_path / "older.pth")
    assert load("inception-2015-12-05", weights=tmp_path / "older.pth").num_features == 2048


def test_tensorflow1_resize_is_its_formula_on_images_that_are_not_square():
    image = noise_images(1, 1, 7)[:, :, :5].float()  # 5 x 7
    out = tensorflow1_bilinear(image, 9)[0, 0]
    for i in range(9):
        for j in range(9):
            y, x = i * 5 / 9, j * 7 / 9
            top, left = int(y), int(x)
            bottom, right = min(top + 1, 4), min(left + 1, 6)
            p = image[0, 0]
            upper = p[top, left] + (p[top, right] - p[top, left]) * (x - left)
            lower = p[bottom, left] + (p[bottom, right] - p[bottom, left]) * (x - left)
            assert out[i, j].item() == pytest.approx((upper + (lower - upper) * (y - top)).item(), abs=1e-3)


def pillow(channel, size):
    """Pillow's float bicubic of fp32 [H, W] to [size, size]; it may overshoot."""
    resized = Image.fromarray(channel.numpy()).resize((size, size), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(resized))


@pytest.mark.parametrize(
    "height, width", [(32, 32), (40, 64), (64, 40), (128, 128), (256, 256), (300, 200), (512, 512)]
)
@pytest.mark.parametrize("size", [224, 299, 336])
def test_bicubic_is_pillows(height, width, size):
    image = noise_images(1, 1, 512)[:, :, :height, :width].float()
    expected = pillow(image[0, 0], size)
    assert (unclamped_bicubic(image, size)[0, 0] - expected).abs().max() < 2e-4
    assert (bicubic(image, size)[0, 0] - expected.clamp(0, 255)).abs().max() < 2e-4


def test_bicubic_never_leaves_the_range():
    checkers = bicubic((noise_images(1, 1, 9) > 127) * 255.0, 33)
    assert checkers.min() == 0 and checkers.max() == 255


def test_only_the_fid_network_at_fifty_thousand_is_called_fid():
    assert score_name("inception-2015-12-05", 50_000) == "FID"
    assert score_name("inception-2015-12-05", 10_000) == "FID-10000"
    assert score_name("inception-2015-12-05@bicubic-antialias-299", 50_000) == "clean-FID"
    assert score_name("inception-2015-12-05@bicubic-antialias-299", 5_000) == "clean-FID-5000"
    for name in NAMES[:3]:
        assert score_name(name, 50_000) == f"FD-{name}"
