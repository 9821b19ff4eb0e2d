"""The model's shapes, counts, first output, gradients and the parts that it is made of."""

import math

import pytest
import torch

from dit_train.config import ConfigError, ModelConfig
from dit_train.model.conditioning import time_frequencies
from dit_train.model.dit import DiT, parameter_count
from dit_train.model.init import initialize
from dit_train.model.layers import Attention, PatchEmbedding, patchify, unpatchify
from dit_train.model.position import RotaryPosition, SinCosPosition, sincos_table
from dit_train.model.sizes import SIZES, check_model, mlp_width, sized

TINY = {"width": 32, "depth": 2, "heads": 2}
VARIANTS = [{}, {"swiglu": True}, {"qk_norm": True}, {"position": "rope"}, {"learn_sigma": True, "patch": 4}]
VARIANTS += [{"adaln": "noshift"}, {"adaln": "lora", "adaln_rank": 8}, {"adaln": "single"}]


def tiny(**fields) -> DiT:
    model = DiT(ModelConfig(**{**TINY, **fields}), channels=3, image_size=8, num_classes=10)
    initialize(model, 0)
    return model


def awake(model: DiT) -> DiT:
    """Weights without adaLN's zeros, so that every path carries a signal."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def batch(count: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, 8, 8, generator=generator)
    return x, torch.rand(count, generator=generator), torch.arange(count) % 10


def on_meta(config: ModelConfig) -> DiT:
    with torch.device("meta"):
        return DiT(config, channels=4, image_size=32, num_classes=1000)


def test_xl_2_has_the_parameters_of_the_original():
    model = on_meta(sized("XL", learn_sigma=True))
    assert parameter_count(model, fixed=True) == 675_129_632
    assert parameter_count(model) == 675_129_632 - 256 * 1152


@pytest.mark.parametrize(("name", "millions"), [("S", 33.0), ("B", 130.5), ("L", 458.1)])
def test_smaller_sizes_have_the_published_parameters(name, millions):
    model = on_meta(sized(name, learn_sigma=True))
    assert parameter_count(model, fixed=True) / 1e6 == pytest.approx(millions, abs=0.06)


@pytest.mark.parametrize("name", ["1.3B", "2.3B", "4B", "9B", "15B"])
def test_large_sizes_are_what_their_name_says_and_shard_evenly(name):
    model = on_meta(sized(name))
    digits = len(name.partition(".")[2]) - 1 if "." in name else 0
    assert f"{parameter_count(model) / 1e9:.{digits}f}B" == name
    assert all(p.shape[0] % 128 == 0 for p in model.blocks[0].parameters() if p.ndim == 2)


@pytest.mark.parametrize(
    ("adaln", "billions"),
    [
        ("noshift", [1.163, 2.029, 3.589, 8.073, 13.322]),
        ("lora", [0.969, 1.661, 2.893, 6.390, 10.459]),
        ("single", [0.892, 1.551, 2.737, 6.156, 10.137]),
    ],
)
def test_lighter_modulations_have_the_parameters_of_their_formulas(adaln, billions):
    for name, count in zip(["1.3B", "2.3B", "4B", "9B", "15B"], billions, strict=True):
        assert parameter_count(on_meta(sized(name, adaln=adaln))) / 1e9 == pytest.approx(count, abs=0.003)


@pytest.mark.parametrize("fields", VARIANTS)
def test_every_parameter_gets_a_gradient_once_all_are_awake(fields):
    model = awake(tiny(**fields))
    model(*batch()).square().mean().backward()
    silent = {name for name, p in model.named_parameters() if p.grad is None or not torch.count_nonzero(p.grad)}
    assert silent <= {f"blocks.{i}.attention.key.bias" for i in range(2)}


@pytest.mark.parametrize("adaln", ["zero", "noshift", "lora", "single"])
def test_every_modulation_wakes_up_within_three_steps(adaln):
    model = tiny(adaln=adaln, adaln_rank=8)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    target = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    for _ in range(3):
        optimizer.zero_grad()
        (model(*batch()) - target).square().mean().backward()
        optimizer.step()
    asleep = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert asleep <= {f"blocks.{i}.attention.key.bias" for i in range(2)}


def test_unknown_size_is_refused():
    with pytest.raises(ConfigError, match="XL"):
        sized("XXL")


def test_swiglu_has_the_parameters_of_gelu():
    gelu, swiglu = (parameter_count(on_meta(sized("XL", swiglu=s))) for s in (False, True))
    assert swiglu / gelu == pytest.approx(1, abs=1e-3)
    assert mlp_width(sized("XL", swiglu=True)) == 3072


@pytest.mark.parametrize("fields", VARIANTS)
def test_output_shape_and_type(fields):
    model = tiny(**fields)
    output = model(*batch())
    assert output.shape == (4, 6 if fields.get("learn_sigma") else 3, 8, 8)
    assert output.dtype == torch.float32


@pytest.mark.parametrize("fields", VARIANTS)
def test_bf16_weights_take_fp32_inputs_and_return_fp32(fields):
    model = awake(tiny(**fields))
    reference = model(*batch())
    output = model.to(torch.bfloat16)(*batch())
    assert output.dtype == torch.float32
    assert (output - reference).norm() < 0.05 * reference.norm()


@pytest.mark.parametrize("fields", VARIANTS)
def test_first_output_is_exactly_zero(fields):
    assert torch.count_nonzero(tiny(**fields)(*batch())) == 0


def test_gradients_wake_up_from_the_last_layer_inwards():
    model = tiny()
    target = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def awake_after_a_step() -> set[str]:
        optimizer.zero_grad()
        (model(*batch()) - target).square().mean().backward()
        optimizer.step()
        return {name for name, p in model.named_parameters() if torch.count_nonzero(p.grad)}

    last = {"final_layer.linear.weight", "final_layer.linear.bias"}
    names = {name for name, _ in model.named_parameters()}
    modulations = {name for name in names if "modulation." in name}
    patches = {name for name in names if name.startswith("patch_embedding.")}
    assert awake_after_a_step() == last
    assert awake_after_a_step() == last | modulations | patches
    third = awake_after_a_step()
    # a key's bias moves all scores of a query alike, so its gradient is rounding noise at most
    assert third | {f"blocks.{i}.attention.key.bias" for i in range(2)} == names


def test_parameter_names_are_those_of_checkpoints_and_routing():
    names = {name for name, _ in tiny(qk_norm=True, swiglu=True).named_parameters() if ".1." not in name}
    layers = [f"blocks.0.attention.{part}" for part in ("query", "key", "value", "output")]
    layers += [f"blocks.0.mlp.{part}" for part in ("gate", "up", "down")]
    layers += ["blocks.0.modulation.linear", "final_layer.modulation.linear", "final_layer.linear"]
    layers += ["patch_embedding.projection", "time_embedding.in_proj", "time_embedding.out_proj"]
    expected = {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}
    gains = {f"blocks.0.attention.{part}_norm.weight" for part in ("query", "key")}
    assert names == expected | gains | {"label_embedding.table.weight"}
    assert {name for name, _ in tiny().named_parameters() if ".mlp." in name and ".0." in name} == {
        f"blocks.0.mlp.{part}.{kind}" for part in ("up", "down") for kind in ("weight", "bias")
    }


def test_modulations_declare_their_stacked_matrices():
    model = tiny()
    for module, pieces in ((model.blocks[1].modulation, 6), (model.final_layer.modulation, 2)):
        assert module.linear.matrix_splits == {"weight": (pieces,)}
        assert module.linear.weight.shape == (pieces * 32, 32)


def test_tables_stay_out_of_the_state_dict():
    for position in ("sincos", "rope"):
        model = tiny(position=position)
        assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_null_label_is_the_last_row_and_labels_matter():
    model = awake(tiny())
    assert model.null_label == 10
    assert model.label_embedding.table.weight.shape[0] == model.null_label + 1
    x, t, labels = batch()
    null = model(x, t, torch.full_like(labels, model.null_label))
    assert torch.isfinite(null).all()
    assert not torch.allclose(null, model(x, t, labels))
    with pytest.raises(IndexError):
        model(x, t, torch.full_like(labels, model.null_label + 1))


def test_patches_go_back_where_they_came_from():
    images = torch.arange(2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
    tokens = patchify(images, 2)
    assert tokens.shape == (2, 16, 12)
    assert torch.equal(unpatchify(tokens, 2, 4), images)
    assert torch.equal(tokens[0, 5].reshape(3, 2, 2), images[0, :, 2:4, 2:4])  # token 5: second row, second column


def test_patch_embedding_is_the_strided_convolution():
    embedding = PatchEmbedding(3, 2, 32)
    images = batch()[0]
    weight = embedding.projection.weight.reshape(32, 3, 2, 2)
    convolved = torch.nn.functional.conv2d(images, weight, embedding.projection.bias, stride=2)
    torch.testing.assert_close(embedding(images), convolved.flatten(2).transpose(1, 2))


def test_tokens_do_not_mix_samples():
    model = awake(tiny(position="rope", qk_norm=True))
    x, t, labels = batch()
    torch.testing.assert_close(model(x, t, labels)[:1], model(x[:1], t[:1], labels[:1]))


def test_time_frequencies_are_the_originals():
    t = torch.tensor([0.25, 0.99839])
    table = time_frequencies(t)
    for i in (0, 1, 64, 127):
        angle = 1000 * t.double() * 10_000 ** (-i / 128)
        torch.testing.assert_close(table[:, i].double(), angle.cos(), atol=1e-4, rtol=0)
        torch.testing.assert_close(table[:, 128 + i].double(), angle.sin(), atol=1e-4, rtol=0)


def test_sincos_table_is_the_originals():
    table = sincos_table(4, 32)
    row, column, k = 2, 3, 5
    token = table[row * 4 + column]
    omega = 10_000 ** (-k / 8)
    expected = [math.sin(column * omega), math.cos(column * omega), math.sin(row * omega), math.cos(row * omega)]
    assert [token[part * 8 + k].item() for part in range(4)] == pytest.approx(expected)
    model = SinCosPosition(4, 32)
    torch.testing.assert_close(model(torch.zeros(1, 16, 32))[0], table.float())


def test_rotary_scores_depend_on_offsets_alone():
    rotate = RotaryPosition(8, 16)
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 1, 1, 16, generator=generator).expand(1, 1, 64, 16) for _ in range(2))
    scores = (rotate(query) @ rotate(key).transpose(-1, -2))[0, 0].reshape(8, 8, 8, 8)  # row, column; row, column
    torch.testing.assert_close(scores[0, 0, 2, 3], scores[5, 1, 7, 4])
    torch.testing.assert_close(scores[4, 6, 1, 2], scores[6, 7, 3, 3])
    assert (scores[0, 0, 2, 3] - scores[0, 0, 3, 2]).abs() > 1e-2  # and rows are not columns
    torch.testing.assert_close(scores[3, 3, 3, 3], (query @ key.transpose(-1, -2))[0, 0, 0, 0])


def test_qk_norm_bounds_the_logits():
    def largest_logit(qk_norm: bool) -> float:
        attention = Attention(ModelConfig(**TINY, qk_norm=qk_norm), side=4)
        with torch.no_grad():
            attention.query.weight.mul_(100)
        x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))
        queries, keys = attention.queries_keys(x)
        return (queries @ keys.transpose(-1, -2) / math.sqrt(16)).abs().max().item()

    assert largest_logit(qk_norm=True) <= math.sqrt(16) * 1.001
    assert largest_logit(qk_norm=False) > math.sqrt(16)


@pytest.mark.parametrize(
    ("fields", "image_size", "named"),
    [
        ({"heads": 5}, 8, "model.heads: "),
        ({"width": 36, "heads": 6, "position": "rope"}, 8, "model.position: "),
        ({"width": 30, "heads": 2}, 8, "model.position: "),
        ({"patch": 3}, 8, "model.patch: "),
        ({"depth": 0}, 8, "model.depth: "),
        ({"mlp_ratio": 0.0}, 8, "model.mlp_ratio"),
        ({"label_dropout": 1.5}, 8, "model.label_dropout"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_one_line(fields, image_size, named):
    with pytest.raises(ConfigError, match=named) as caught:
        check_model(ModelConfig(**{**TINY, **fields}), image_size)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError):
        DiT(ModelConfig(**{**TINY, **fields}), channels=3, image_size=image_size, num_classes=10)


def test_named_sizes_are_possible():
    for name in SIZES:
        for position in ("sincos", "rope"):
            check_model(sized(name, position=position), 32)
