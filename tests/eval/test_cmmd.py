import math

import pytest
import torch
from torch.nn import functional as F

from eval.kernel import cmmd


def cloud(n, d, seed, shift=0.0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed)) + shift


def by_formula(x, y, sigma=10):
    """The V-statistic as its authors compute it, from vectors of length 1."""
    x, y = (F.normalize(z.double()) for z in (x, y))

    def mean_kernel(a, b):
        return torch.exp(-(a[:, None] - b[None]).square().sum(2) / (2 * sigma**2)).mean()

    return 1000 * (mean_kernel(x, x) + mean_kernel(y, y) - 2 * mean_kernel(x, y)).item()


def test_agrees_with_the_formula_diagonal_included():
    x, y = cloud(30, 8, 0), cloud(40, 8, 1, 0.5)
    assert cmmd(x, y) == pytest.approx(by_formula(x, y), rel=1e-8)
    assert cmmd(x, y, sigma=0.5) == pytest.approx(by_formula(x, y, 0.5), rel=1e-10)


def test_closed_form_of_two_single_embeddings():
    x, y = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 0.2]])  # length 1 and orthogonal: |x - y|² = 2
    assert cmmd(x, y) == pytest.approx(2000 * (1 - math.exp(-2 / 200)), rel=1e-12)


def test_lengths_of_embeddings_and_blocks_do_not_count():
    x, y = cloud(30, 8, 2), cloud(41, 8, 3, 0.5)
    whole = cmmd(x, y)
    assert cmmd(x * 7, y * torch.arange(1, 42)[:, None]) == pytest.approx(whole, rel=1e-5)
    for block in (1, 7, 40):
        assert cmmd(x, y, block=block) == pytest.approx(whole, rel=1e-11)


def test_a_set_has_no_distance_to_itself_and_a_small_one_is_told_exactly():
    x = cloud(50, 16, 4).double()
    assert abs(cmmd(x, x)) < 1e-12
    y = x + 1e-5 * cloud(1, 16, 5)
    close, expected = cmmd(x, y), (F.normalize(x).mean(0) - F.normalize(y).mean(0)).square().sum().item() * 1000 / 100
    assert close == pytest.approx(expected, rel=0.05)  # first order of the kernel: |difference of means|² / σ²


def test_bad_embeddings_raise():
    x = cloud(5, 4, 6)
    with pytest.raises(ValueError, match="length 0"):
        cmmd(x, x * 0)
    with pytest.raises(ValueError, match="NaN"):
        cmmd(x, x / 0)
    with pytest.raises(ValueError, match="one d"):
        cmmd(x, x[:, :3])
