"""The path from image to noise, and the loss (Liu et al., arXiv 2209.03003; Lipman et al., arXiv 2210.02747)."""

from __future__ import annotations

from torch import Tensor


def interpolate(x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """x_t = (1 − t)·x0 + t·noise; x0 and noise [N, ...], t [N] in [0, 1]; t = 1 is pure noise."""
    t = t.reshape(-1, *[1] * (x0.ndim - 1))
    return (1 - t) * x0 + t * noise


def velocity(x0: Tensor, noise: Tensor) -> Tensor:
    """dx_t/dt = noise − x0, the target of the regression; [N, ...] each."""
    return noise - x0


def velocity_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean square error of each sample, [N] fp32.

    `target` is [N, C, ...]; of `prediction` [N, C or more, ...] the first C channels count (the rest is a learned
    sigma, which this loss does not train).
    """
    error = prediction[:, : target.shape[1]].float() - target.float()
    return error.square().flatten(1).mean(1)
