"""Proofs on Gaussian images, whose velocity is known: one convention of time in training, sampling and guidance.

x0 ~ N(m, s²), noise ~ N(0, 1), x_t = (1−t)·x0 + t·noise. Both are Gaussian, so with V = (1−t)²s² + t²
    E[noise − x0 | x_t] = −m + (t − (1−t)s²)/V · (x_t − (1−t)m),
and along its ODE (x − (1−t)m)/√V stays constant: noise ε ends at m + s·ε.
"""

import numpy as np
import pytest
import torch

from dit_train.diffusion.guidance import guided
from dit_train.diffusion.objectives import interpolate, velocity, velocity_loss
from dit_train.diffusion.samplers import SAMPLERS

MEAN, STD = 0.7, 0.4


def exact_slope(t: torch.Tensor) -> torch.Tensor:
    return (t - (1 - t) * STD**2) / ((1 - t) ** 2 * STD**2 + t**2)


def exact_velocity(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    assert t.shape == (len(x),)
    assert t.dtype == torch.float32
    t = t.double().reshape(-1, 1, 1, 1)
    return -MEAN + exact_slope(t) * (x - (1 - t) * MEAN)


def noise(count: int = 64) -> torch.Tensor:
    return torch.randn(count, 1, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def worst_error(sampler: str, steps: int) -> float:
    return (SAMPLERS[sampler](exact_velocity, noise(), steps) - (MEAN + STD * noise())).abs().max().item()


@pytest.mark.parametrize(("sampler", "order"), [("euler", 1), ("heun", 2)])
def test_samplers_converge_at_their_order(sampler, order):
    errors = [worst_error(sampler, steps) for steps in (64, 128, 256)]
    rates = np.log2(np.array(errors[:-1]) / np.array(errors[1:]))
    assert rates == pytest.approx(order, abs=0.15)


@pytest.mark.parametrize(("sampler", "steps"), [("euler", 400), ("heun", 40)])
def test_samples_have_the_mean_and_variance_of_the_images(sampler, steps):
    images = SAMPLERS[sampler](exact_velocity, noise(4096), steps)
    assert images.mean().item() == pytest.approx(MEAN, abs=0.02)
    assert images.var().item() == pytest.approx(STD**2, rel=0.05)


def test_a_flipped_time_would_be_seen():
    flipped = SAMPLERS["heun"](lambda x, t: exact_velocity(x, 1 - t), noise(), 40)
    assert worst_error("heun", 40) < 0.01
    assert (flipped - (MEAN + STD * noise())).abs().min() > 0.1


def pairs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images, noise and weights of a Gauss–Hermite rule: moments up to the 15th are exact."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(8)
    nodes, weights = torch.from_numpy(nodes), torch.from_numpy(weights / weights.sum())
    images, noises = torch.meshgrid(MEAN + STD * nodes, nodes, indexing="ij")
    return images.reshape(-1, 1, 1, 1), noises.reshape(-1, 1, 1, 1), torch.outer(weights, weights).flatten()


@pytest.mark.parametrize("time", [0.05, 0.3, 0.5, 0.8, 0.95])
def test_the_regression_ends_at_the_velocity_that_is_sampled(time):
    images, noises, weights = pairs()
    t = torch.full((len(images),), time, dtype=torch.float32)
    x_t, target = interpolate(images, noises, t.double()), velocity(images, noises)

    design = torch.stack([x_t.flatten(), torch.ones(len(images), dtype=torch.float64)], dim=1)
    root = weights.sqrt()[:, None]
    slope, intercept = torch.linalg.lstsq(root * design, root * target.reshape(-1, 1)).solution.flatten()
    torch.testing.assert_close(slope * x_t + intercept, exact_velocity(x_t, t), atol=1e-6, rtol=1e-6)

    def loss(prediction: torch.Tensor) -> float:
        return (weights * velocity_loss(prediction, target)).sum().item()

    best = loss(exact_velocity(x_t, t))
    assert loss(exact_velocity(x_t, t) + 0.05) > best
    assert loss(1.05 * exact_velocity(x_t, t)) > best


def test_the_ends_of_time():
    images, noises, _ = pairs()
    zero, one = torch.zeros(len(images)), torch.ones(len(images))
    assert torch.equal(interpolate(images, noises, zero), images)
    assert torch.equal(interpolate(images, noises, one), noises)


def test_the_loss_is_a_mean_per_sample_that_leaves_sigma_out():
    generator = torch.Generator().manual_seed(0)
    prediction, target = torch.randn(5, 6, 4, 4, generator=generator), torch.randn(5, 3, 4, 4, generator=generator)
    loss = velocity_loss(prediction, target)
    assert loss.shape == (5,)
    torch.testing.assert_close(loss[2], torch.nn.functional.mse_loss(prediction[2, :3], target[2]))
    assert velocity_loss(prediction.bfloat16(), target).dtype == torch.float32


def test_a_sampler_asks_for_no_time_it_should_not():
    asked = []

    def record(x, t):
        asked.append(t[0].item())
        return x

    SAMPLERS["heun"](record, noise(2), 4)
    assert asked == [1.0, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25]
    with pytest.raises(ValueError, match="1 step"):
        SAMPLERS["euler"](record, noise(2), 0)


class Recorder:
    """A model with learned sigma whose channels all depend on the label."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(self, x, t, labels):
        self.batches.append(len(x))
        value = x + labels.reshape(-1, 1, 1, 1) + t.reshape(-1, 1, 1, 1)
        return torch.cat([value, 100 * value], dim=1)


def test_guidance_moves_every_channel_and_drops_sigma():
    model, labels = Recorder(), torch.tensor([1, 3])
    x, t = torch.randn(2, 4, 2, 2, generator=torch.Generator().manual_seed(0)), torch.full((2,), 0.5)
    conditional = guided(model, labels, 10, 1.0)(x, t)
    strong = guided(model, labels, 10, 4.0)(x, t)
    assert model.batches == [2, 4]
    assert conditional.shape == strong.shape == x.shape
    torch.testing.assert_close(conditional, x + labels.reshape(-1, 1, 1, 1) + 0.5)
    shift = 3.0 * (labels - 10).reshape(-1, 1, 1, 1).expand_as(x)  # (scale − 1)·(v(label) − v(null)), all 4 channels
    torch.testing.assert_close(strong - conditional, shift.float())


def test_guidance_of_scale_one_is_the_limit_of_the_doubled_forward():
    model, labels = Recorder(), torch.tensor([1, 3])
    x, t = torch.randn(2, 4, 2, 2, generator=torch.Generator().manual_seed(0)), torch.full((2,), 0.5)
    near = guided(model, labels, 10, 1.0 + 1e-7)(x, t)
    torch.testing.assert_close(near, guided(model, labels, 10, 1.0)(x, t), atol=1e-4, rtol=0)
