"""The times at which a batch is trained: one in each stratum of the global batch, the same on any number of ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from dit_train.config import ObjectiveConfig
from dit_train.rng import stream

T_MIN = 1e-5
"""Times stay within [T_MIN, 1 − T_MIN]."""


def quantile(config: ObjectiveConfig, u: Tensor) -> Tensor:
    """The time below which a share u of the law lies; u [G] fp64 in [0, 1] -> t [G] fp32.

    logit_normal: t = sigmoid(mean + std·Φ⁻¹(u)) (Esser et al., arXiv 2403.03206); uniform: t = u.
    """
    if config.timesteps == "logit_normal":
        u = torch.sigmoid(config.logit_mean + config.logit_std * torch.special.ndtri(u))
    return u.clamp(T_MIN, 1 - T_MIN).float()


def strata(seed: int, step: int, global_batch: int) -> Tensor:
    """[G] fp64 in [0, 1): a uniform draw out of each of G equal strata, in random order.

    A function of its arguments: every rank draws the whole batch and takes the entries of its own samples. The spread
    of t over a batch no longer adds to the variance of its loss (k-diffusion's stratified draw).
    """
    generator = stream(seed, "timesteps", step)
    order = generator.permutation(global_batch)
    return torch.from_numpy((order + generator.random(global_batch)) / global_batch)


def draw_timesteps(config: ObjectiveConfig, seed: int, step: int, global_batch: int) -> Tensor:
    """Times of the whole global batch at a step, t [G] fp32 on the CPU, strictly between 0 and 1."""
    return quantile(config, strata(seed, step, global_batch))


def evenly_spaced(config: ObjectiveConfig, count: int) -> Tensor:
    """The middles of `count` strata in rising order, t [count] fp32 on the CPU, for held-out losses without noise."""
    return quantile(config, (torch.arange(count, dtype=torch.float64) + 0.5) / count)
