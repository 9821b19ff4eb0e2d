import pytest
import torch

from eval.generate import QUANTIZERS, generate, quantize


def image_of(indices):
    return (indices[:, None, None, None] * 7 % 256).to(torch.uint8).expand(-1, 1, 2, 2)


def test_white_stays_white_and_black_stays_black():
    x = torch.tensor([-1.0, 1.0, 1.004, 1.01, -1.2, 0.0])
    assert quantize(x).tolist() == [0, 255, 255, 255, 0, 128]


def test_rounds_to_the_nearest_level_and_returns_every_level():
    levels = torch.arange(256)
    assert torch.equal(quantize(levels / 127.5 - 1), levels.to(torch.uint8))
    assert quantize(torch.tensor([10.4, 10.6]) / 127.5 - 1).tolist() == [10, 11]  # a cast alone gives 10 and 10
    assert quantize(torch.tensor([1.0, -1.0], dtype=torch.bfloat16)).tolist() == [255, 0]


EDGES = [-1.2, -1.0, -0.1, 0.0, 0.9961, 1.0, 1.004, 1.01]


@pytest.mark.parametrize(
    ("rule", "levels"),
    [
        ("round", [0, 0, 115, 128, 255, 255, 255, 255]),  # -0.1 is 114.75, 0 is 127.5, 0.9961 is 254.503
        ("adm", [0, 0, 115, 128, 255, 255, 255, 255]),
        ("edm", [0, 0, 115, 128, 255, 255, 255, 255]),
        ("truncate", [0, 0, 114, 127, 254, 255, 255, 255]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_named_rule_at_its_edges(rule, levels, dtype):
    assert quantize(torch.tensor(EDGES, dtype=dtype), rule).tolist() == levels
    assert quantize(torch.tensor([1.0, -1.0], dtype=torch.bfloat16), rule).tolist() == [255, 0]


def test_the_rules_that_round_differ_in_nothing_but_ties_and_truncation_by_half_a_level():
    x = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * 2 - 1
    made = {rule: quantize(x, rule).float() for rule in QUANTIZERS}
    assert (made["round"] != made["adm"]).sum() < 10 and torch.equal(made["adm"], made["edm"])
    assert (made["round"] - made["truncate"]).mean() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("rule", QUANTIZERS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_is_not_a_grey_level(bad, rule):
    with pytest.raises(ValueError, match="NaN"):
        quantize(torch.tensor([0.0, bad]), rule)


def test_integers_and_unknown_rules_are_refused():
    with pytest.raises(TypeError, match="uint8"):
        quantize(torch.zeros(2, dtype=torch.uint8))
    with pytest.raises(ValueError, match="no quantisation is named 'floor'; known are round, adm, edm, truncate"):
        quantize(torch.zeros(2), "floor")


def test_every_index_comes_once_and_every_call_has_the_same_size():
    sizes, reports = [], []

    def images(indices):
        sizes.append(len(indices))
        return image_of(indices)

    wanted = torch.arange(100, 111)
    out = list(generate(images, wanted, 4, progress=lambda done, total: reports.append((done, total))))
    assert torch.equal(torch.cat([i for i, _ in out]), wanted)
    assert torch.equal(torch.cat([x for _, x in out]), image_of(wanted))
    assert sizes == [4, 4, 4]
    assert reports == [(4, 11), (8, 11), (11, 11)]


def test_batches_that_are_done_are_left_out_and_the_others_stay_composed_as_they_were():
    calls, reports = [], []

    def images(indices):
        calls.append(indices.tolist())
        return image_of(indices)

    wanted, done = torch.arange(11), torch.tensor([4, 5, 6, 7, 9, 500])
    out = list(generate(images, wanted, 4, progress=lambda *counts: reports.append(counts), done=done))
    assert calls == [[0, 1, 2, 3], [8, 9, 10, 0]]
    assert [i.tolist() for i, _ in out] == [[0, 1, 2, 3], [8, 9, 10]]
    assert reports == [(4, 7), (7, 7)]
    assert not list(generate(images, wanted, 4, done=wanted)) and len(calls) == 2


def test_float_and_misshapen_images_are_refused():
    wanted = torch.arange(4)
    with pytest.raises(TypeError, match=r"must return uint8, not torch.float32"):
        list(generate(lambda i: image_of(i).float(), wanted, 2))
    with pytest.raises(ValueError, match=r"\[2, C, H, W\]"):
        list(generate(lambda i: image_of(i)[:1], wanted, 2))


def test_repeated_or_missing_indices_are_refused():
    with pytest.raises(ValueError, match="twice"):
        list(generate(image_of, torch.tensor([1, 2, 1]), 2))
    with pytest.raises(ValueError, match="nothing to generate"):
        list(generate(image_of, torch.arange(0), 2))
    with pytest.raises(TypeError, match="int64"):
        list(generate(image_of, torch.arange(3).int(), 2))
