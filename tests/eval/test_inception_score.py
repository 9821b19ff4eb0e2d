import pytest
import torch

from eval import inception_score as module
from eval.inception_score import inception_score


def logits(n, classes, seed, scale=3.0):
    return torch.randn(n, classes, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("classes", [2, 10, 1008])
def test_certain_and_evenly_spread_classes_score_their_number(classes):
    certain = torch.eye(classes).repeat(3, 1) * 1e4
    assert inception_score(certain, splits=3) == pytest.approx((classes, 0), rel=1e-12, abs=1e-12)


def test_images_all_alike_score_1():
    assert inception_score(logits(1, 1008, 0).expand(50, -1)) == pytest.approx((1, 0), abs=1e-12)
    assert inception_score(torch.full((50, 10), -7.0)) == pytest.approx((1, 0), abs=1e-12)


def test_agrees_with_the_definition_split_by_split(monkeypatch):
    monkeypatch.setattr(module, "ROWS", 7)  # several blocks in a split
    x = logits(103, 12, 1)
    p = x.double().softmax(1)

    def by_definition(part):
        return (part * (part.log() - part.mean(0).log())).sum(1).mean().exp()

    tenths = torch.stack([by_definition(p[i * 103 // 10 : (i + 1) * 103 // 10]) for i in range(10)])
    expected = (tenths.mean().item(), tenths.std(correction=0).item())
    assert inception_score(x) == pytest.approx(expected, rel=1e-10)
    of_fifty = torch.stack([by_definition(part) for part in p.split(50)])  # ADM: the last split is short
    assert inception_score(x, split_size=50).mean == pytest.approx(of_fifty.mean().item(), rel=1e-10)
    assert inception_score(x, splits=1) == pytest.approx((by_definition(p).item(), 0), rel=1e-10)


def test_agrees_with_torchmetrics_on_the_same_logits():
    from torch import nn
    from torchmetrics.image.inception import InceptionScore

    class Given(nn.Module):
        def forward(self, x):
            return x.flatten(1)

    x = logits(60, 9, 2).double()
    theirs = InceptionScore(feature=Given(), splits=1)
    theirs.update(x[:, :, None, None])
    assert inception_score(x, splits=1).mean == pytest.approx(theirs.compute()[0].item(), rel=1e-6)


def test_large_logits_lose_nothing():
    x = logits(40, 6, 3)
    assert inception_score(x + 1e4) == pytest.approx(inception_score(x), rel=1e-3)  # fp32 rounds the sum
    assert inception_score(x.double() + 1e6) == pytest.approx(inception_score(x.double()), rel=1e-9)


def test_order_counts_unless_it_is_drawn():
    x = torch.eye(5).repeat_interleave(20, 0) * 50  # sorted by class: each split is all alike
    state = torch.get_rng_state()
    assert inception_score(x, splits=5).mean == pytest.approx(1)
    drawn = inception_score(x, splits=5, seed=1)
    assert drawn.mean > 3 and inception_score(x, splits=5, seed=1) == drawn != inception_score(x, splits=5, seed=2)
    assert torch.equal(torch.get_rng_state(), state)


def test_bad_input_raises():
    x = logits(8, 5, 4)
    with pytest.raises(ValueError, match="these are probabilities"):
        inception_score(x.softmax(1))
    with pytest.raises(ValueError, match="8 images cannot be divided"):
        inception_score(x, splits=9)
    with pytest.raises(ValueError, match="cannot be divided"):
        inception_score(x, split_size=0)
    with pytest.raises(ValueError, match="NaN"):
        inception_score(x / 0)
    with pytest.raises(ValueError, match=r"\[n, classes\]"):
        inception_score(x[0])
