import numpy as np
import pytest
import scipy.linalg
import torch
from torch import nn
from torchmetrics.image.fid import FrechetInceptionDistance

from eval.frechet import frechet
from eval.statistics import GaussianStats


def stats(features):
    s = GaussianStats(features.shape[1])
    s.update(features)
    return s


def exactly(mean, covariance):
    """Statistics with just this mean and covariance."""
    s = GaussianStats(len(mean))
    mean, covariance = torch.as_tensor(mean, dtype=torch.float64), torch.as_tensor(covariance, dtype=torch.float64)
    s.n, s.sum, s.outer = 3, 3 * mean, 2 * covariance + 3 * torch.outer(mean, mean)
    return s


def cloud(n, d, seed, shift=0.0):
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(d, d, generator=g, dtype=torch.float64) / d**0.5
    return torch.randn(n, d, generator=g, dtype=torch.float64) @ mix + shift


def scipy_frechet(x, y):
    a, b = (np.cov(z.numpy(), rowvar=False) for z in (x, y))
    cross = scipy.linalg.sqrtm(a @ b)
    return float(((x.mean(0) - y.mean(0)) ** 2).sum() + np.trace(a) + np.trace(b) - 2 * np.trace(cross.real))


def test_agrees_with_the_matrix_square_root_of_scipy():
    x, y = cloud(500, 24, 1), cloud(300, 24, 2, shift=0.3)
    assert frechet(stats(x), stats(y)) == pytest.approx(scipy_frechet(x, y), rel=1e-6)


def test_agrees_with_torchmetrics_on_the_same_features():
    class Given(nn.Module):
        num_features = 16

        def forward(self, x):
            return x.flatten(1)

    x, y = cloud(200, 16, 3), cloud(180, 16, 4, shift=0.5)
    theirs = FrechetInceptionDistance(feature=Given()).set_dtype(torch.float64)
    theirs.update(x[:, :, None, None], real=True)
    theirs.update(y[:, :, None, None], real=False)
    assert frechet(stats(x), stats(y)) == pytest.approx(theirs.compute().item(), rel=1e-6)


def test_closed_form_of_diagonal_covariances():
    a, b = torch.tensor([1.0, 4.0, 9.0]), torch.tensor([4.0, 4.0, 0.25])
    expected = (a.sqrt() - b.sqrt()).square().sum().item() + 3 * 0.5**2
    assert frechet(exactly([0, 0, 0], a.diag()), exactly([0.5] * 3, b.diag())) == pytest.approx(expected, rel=1e-12)


def test_closed_form_of_covariances_that_do_not_commute():
    a, b = torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    product = a @ b
    root_trace = (product.trace() + 2 * torch.linalg.det(product).sqrt()).sqrt()  # of a 2x2 with positive eigenvalues
    expected = (a.trace() + b.trace() - 2 * root_trace).item()
    assert frechet(exactly([0, 0], a), exactly([0, 0], b)) == pytest.approx(expected, rel=1e-6)


def test_fewer_images_than_features_is_accurate_real_and_symmetric():
    x, y = cloud(50, 128, 5), cloud(40, 128, 6)
    x_rows, y_rows = ((z - z.mean(0)) / (len(z) - 1) ** 0.5 for z in (x, y))
    overlap = torch.linalg.svdvals(x_rows @ y_rows.T).sum()  # no square root of a covariance needed
    expected = (x.mean(0) - y.mean(0)).square().sum() + x_rows.square().sum() + y_rows.square().sum() - 2 * overlap
    assert frechet(stats(x), stats(y)) == pytest.approx(expected.item(), rel=1e-10)
    assert frechet(stats(y), stats(x)) == pytest.approx(expected.item(), rel=1e-10)
    assert 0 <= frechet(stats(x), stats(x)) < 1e-9


def test_a_constant_feature_map_has_a_distance():
    assert frechet(stats(torch.ones(5, 4)), stats(torch.zeros(5, 4))) == pytest.approx(4.0)


def test_a_large_mean_does_not_cancel_the_covariance():
    x, y = cloud(400, 16, 7).float(), cloud(400, 16, 8).float()
    assert frechet(stats(x + 50), stats(y + 50)) == pytest.approx(frechet(stats(x), stats(y)), rel=1e-4)
    exact = scipy_frechet((x + 50).double(), (y + 50).double())
    assert frechet(stats(x + 50), stats(y + 50)) == pytest.approx(exact, rel=1e-8)


def test_the_root_of_a_reference_is_taken_once(monkeypatch):
    calls, eigh = [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda x: calls.append(1) or eigh(x))
    reference, x = stats(cloud(50, 8, 9)), cloud(50, 8, 10)
    first = frechet(stats(x), reference)
    assert frechet(stats(x), reference) == first
    assert len(calls) == 3  # two sides, then only the new one


def test_a_root_does_not_outlive_the_sums_it_was_taken_of():
    x, y, z = cloud(50, 8, 11), cloud(50, 8, 12), cloud(50, 8, 13)
    grown, merged = stats(x), stats(x)
    for early in (grown, merged):
        assert torch.allclose(early.root @ early.root.T, early.covariance)
    grown.update(y)
    merged.merge(stats(y))
    for late in (grown, merged):
        assert torch.allclose(late.root @ late.root.T, late.covariance)
        assert frechet(late, stats(z)) == pytest.approx(frechet(stats(torch.cat((x, y))), stats(z)), rel=1e-9)


def test_nan_and_unlike_lengths_raise():
    bad = exactly([0.0, float("nan")], torch.eye(2))
    with pytest.raises(ValueError, match="NaN"):
        frechet(bad, exactly([0, 0], torch.eye(2)))
    with pytest.raises(ValueError, match="cannot compare 3"):
        frechet(exactly([0] * 3, torch.eye(3)), exactly([0] * 2, torch.eye(2)))
