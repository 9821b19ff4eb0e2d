import pytest
import torch
from torchmetrics.image.kid import poly_mmd

from eval.kernel import kid, mmd2


def cloud(n, d, seed, shift=0.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=g, dtype=torch.float64) + shift


def test_unbiased_mmd_is_the_double_loop():
    x, y = cloud(7, 3, 0), cloud(5, 3, 1, 0.2)

    def k(a, b):
        return (float(a @ b) / 3 + 1) ** 3

    xx = sum(k(x[i], x[j]) for i in range(7) for j in range(7) if i != j) / (7 * 6)
    yy = sum(k(y[i], y[j]) for i in range(5) for j in range(5) if i != j) / (5 * 4)
    xy = sum(k(a, b) for a in x for b in y) / (7 * 5)
    assert mmd2(x, y).item() == pytest.approx(xx + yy - 2 * xy, rel=1e-12)


def test_unbiased_mmd_agrees_with_torchmetrics():
    x, y = cloud(40, 16, 2), cloud(40, 16, 3, 0.3)
    assert mmd2(x, y).item() == pytest.approx(poly_mmd(x, y).item(), rel=1e-9)


def test_equal_calls_give_equal_values_and_leave_the_global_stream_alone():
    x, y = cloud(60, 8, 4).float(), cloud(60, 8, 5).float()
    state = torch.get_rng_state()
    first = kid(x, y, subset_size=20, subsets=10, seed=1)
    assert kid(x, y, subset_size=20, subsets=10, seed=1) == first
    assert kid(x, y, subset_size=20, subsets=10, seed=2) != first
    assert torch.equal(torch.get_rng_state(), state)


def test_is_zero_within_its_error_for_one_distribution_and_far_from_it_for_two():
    mean, error = kid(cloud(300, 8, 6), cloud(300, 8, 7))
    assert abs(mean) < 3 * error
    mean, error = kid(cloud(300, 8, 6), cloud(300, 8, 7, 0.5))
    assert mean > 5 * error


def test_standard_error_is_the_spread_over_fresh_images():
    """Neither 0, as for identical subsets, nor the spread of overlapping subsets over the root of their number."""
    runs = [kid(cloud(200, 4, 100 + s), cloud(200, 4, 500 + s, 0.5), subsets=40) for s in range(40)]
    means, errors = torch.tensor(runs).T
    assert 0.7 < errors.mean() / means.std() < 1.4


def test_fp32_features_are_computed_in_fp64_although_only_subsets_are_converted():
    x, y = cloud(60, 8, 10).float(), cloud(60, 8, 11, 0.3).float()
    assert kid(x, y, subset_size=20) == kid(x.double(), y.double(), subset_size=20)


def test_bad_features_raise():
    x = cloud(10, 4, 8)
    with pytest.raises(ValueError, match="one d"):
        kid(x, cloud(10, 5, 9))
    with pytest.raises(ValueError, match="needs 4 images"):
        kid(x, x[:3])
    with pytest.raises(ValueError, match="NaN"):
        kid(x, x * float("nan"))
