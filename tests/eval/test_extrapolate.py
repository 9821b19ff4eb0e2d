import numpy as np
import pytest
import torch

from eval import extrapolate
from eval.extrapolate import fid_infinity
from eval.frechet import frechet
from eval.statistics import GaussianStats

D = 12


def cloud(n, seed, shift=0.0):
    return torch.randn(n, D, generator=torch.Generator().manual_seed(seed)) + shift


def exact():
    return GaussianStats.given(torch.zeros(D).double(), torch.eye(D).double())


def test_a_line_through_the_distances_gives_intercept_error_and_slope(monkeypatch):
    """The regression alone, against numpy."""
    made = iter(
        3.0 + 500.0 / n + wobble for n, wobble in zip((100, 200, 300, 400, 500), (1, -2, 1, 2, -1), strict=True)
    )
    monkeypatch.setattr(extrapolate, "frechet", lambda *_: next(made))
    found = fid_infinity(cloud(500, 0), exact(), points=5, smallest=100)
    assert found.sizes == [100, 200, 300, 400, 500]
    (slope, value), spread = np.polyfit(1 / np.array(found.sizes), found.distances, 1, cov=True)
    assert found.value == pytest.approx(value, rel=1e-9) and found.slope == pytest.approx(slope, rel=1e-9)
    assert found.standard_error == pytest.approx(spread[1, 1] ** 0.5, rel=1e-9)


def test_distances_are_those_of_growing_parts_of_one_seeded_order():
    x = cloud(400, 1, 0.2)
    found = fid_infinity(x, exact(), points=5, smallest=40, seed=3)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(3))
    for size, distance in zip(found.sizes, found.distances, strict=True):
        assert distance == pytest.approx(frechet(GaussianStats.of(x[order[:size]]), exact()), rel=1e-9)
    assert fid_infinity(x, exact(), points=5, smallest=40, seed=3) == found
    assert fid_infinity(x, exact(), points=5, smallest=40, seed=4) != found
    assert len(fid_infinity(x, exact()).sizes) == 15 and fid_infinity(x, exact()).sizes[0] == 40


@pytest.mark.parametrize("shift", [0.0, 0.1])
def test_takes_out_most_of_the_bias_of_the_distance(shift):
    errors, biases = [], []
    for seed in range(30):
        found = fid_infinity(cloud(600, 10 + seed, shift), exact(), points=10, smallest=100)
        errors.append(found.value - D * shift**2)
        biases.append(found.distances[-1] - D * shift**2)
    noise = np.std(errors) / len(errors) ** 0.5
    assert np.mean(biases) > 5 * np.std(biases) / len(biases) ** 0.5
    assert abs(np.mean(errors)) < 3 * noise < np.mean(biases) / 2


def test_leaves_the_global_stream_alone():
    state = torch.get_rng_state()
    fid_infinity(cloud(200, 2), exact(), points=5)
    assert torch.equal(torch.get_rng_state(), state)


def test_too_few_sizes_or_images_raise():
    with pytest.raises(ValueError, match="at least 5 sizes"):
        fid_infinity(cloud(200, 3), exact(), points=4)
    with pytest.raises(ValueError, match="need more than 12 features"):
        fid_infinity(cloud(20, 3), exact(), points=9)
    with pytest.raises(ValueError, match="need more than 12 features"):
        fid_infinity(cloud(200, 3), exact(), smallest=12)
    with pytest.raises(ValueError, match=r"\[n, d\]"):
        fid_infinity(cloud(200, 3)[0], exact())
