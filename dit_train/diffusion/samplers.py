"""Integrators of the probability-flow ODE dx/dt = v(x, t), from noise at t = 1 to an image at t = 0."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

VelocityFn = Callable[[Tensor, Tensor], Tensor]
"""(x [N, ...], t [N] fp32) -> velocity [N, ...]."""


def _times(steps: int) -> list[float]:
    if steps < 1:
        raise ValueError(f"a sampler needs at least 1 step, not {steps}")
    return [1 - i / steps for i in range(steps + 1)]


def _at(velocity_fn: VelocityFn, x: Tensor, t: float) -> Tensor:
    return velocity_fn(x, torch.full((len(x),), t, dtype=torch.float32, device=x.device))


@torch.no_grad()
def euler(velocity_fn: VelocityFn, noise: Tensor, steps: int) -> Tensor:
    """First order, one evaluation a step; noise [N, ...] -> sample [N, ...]."""
    x = noise
    for t, t_next in pairwise(_times(steps)):
        x = x + (t_next - t) * _at(velocity_fn, x, t)
    return x


@torch.no_grad()
def heun(velocity_fn: VelocityFn, noise: Tensor, steps: int) -> Tensor:
    """Second order, two evaluations a step and one in the last (Karras et al., arXiv 2206.00364); noise -> sample.

    The last step is Euler's: no time below the smallest trained one is asked for, and one step of local error h² keeps
    the order.
    """
    x = noise
    for t, t_next in pairwise(_times(steps)):
        slope = _at(velocity_fn, x, t)
        if t_next > 0:
            slope = (slope + _at(velocity_fn, x + (t_next - t) * slope, t_next)) / 2
        x = x + (t_next - t) * slope
    return x


SAMPLERS: dict[str, Callable[[VelocityFn, Tensor, int], Tensor]] = {"euler": euler, "heun": heun}
"""By the names of `SampleConfig.sampler`."""
