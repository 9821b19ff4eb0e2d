"""Steps that must not update the weights, and requests to stop: decided alike on all ranks."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from dit_train.checkpoint.manifest import RunState
from dit_train.config import FaultsConfig
from dit_train.parallel.shard import distinct, local

Verdict = Literal["sound", "not finite", "spike"]
_LEAST_DEVIATION = 0.01
"""Of the mean; a loss that hardly varies would else make a spike of every ripple."""


def agree(
    loss_sum: torch.Tensor, squares: torch.Tensor, replaced: float, asked: bool
) -> tuple[float, float, int, bool]:
    """What all ranks go by, to the last bit, of one small all-reduce.

    The loss summed over ranks, the gradient norm of which each brings its `gradient_squares`, the images replaced by
    others, and whether any rank was asked to stop. Ranks of a tensor group, which see the same images, each bring their
    part of the group's loss and images.
    """
    mine = torch.tensor([replaced, float(asked)], dtype=torch.float64).to(loss_sum.device, non_blocking=True)
    packed = torch.cat([torch.stack([loss_sum.detach().double(), squares]), mine])
    dist.all_reduce(packed)
    total, square, images, stops = packed.tolist()
    return total, math.sqrt(square), round(images), stops > 0


def any_asked(asked: bool) -> bool:
    """Whether any rank was asked to stop; every rank calls it."""
    flag = torch.tensor(int(asked))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def stop_reason(reason: str | None) -> str:
    """Why the ranks stop, as the first that was asked knows it; every rank calls it."""
    told = [reason] * dist.get_world_size()
    dist.all_gather_object(told, reason)
    return next((word for word in told if word is not None), "a stop")


@torch.no_grad()
def gradient_squares(model: nn.Module) -> torch.Tensor:
    """This rank's part of the square of the global L2 norm of all gradients, fp64; over all ranks the parts add up.

    Of what several ranks hold alike, replicas or matrices that tensor parallelism leaves whole, each brings its share.
    """
    copies = defaultdict(list)
    for parameter in model.parameters():
        if parameter.grad is not None:
            copies[dist.get_world_size() // distinct(parameter.grad)].append(local(parameter.grad))
    parts = [torch.stack(torch._foreach_norm(g)).double().square().sum() / count for count, g in copies.items()]
    return torch.stack(parts).sum()


def clipping(largest: float | None, norm: float) -> float:
    """What gradients of a global `norm` are multiplied by, so that it is at most `largest`; None: never clip."""
    return 1.0 if largest is None or not norm > largest else largest / norm


@torch.no_grad()
def clip(model: nn.Module, largest: float | None, norm: float, beside: Sequence[torch.Tensor] = ()) -> None:
    """Scale gradients of a global `norm`, and tensors `beside` them, in place by `clipping`."""
    by = clipping(largest, norm)
    if by != 1.0:
        gradients = [local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
        torch._foreach_mul_([*gradients, *beside], by)


def judge(state: RunState, settings: FaultsConfig, loss: float, norm: float) -> Verdict:
    """Whether a step may update the weights, by its loss and gradient norm; counted in `state`.

    A spike lies more than `spike_sigmas` standard deviations above the mean of the last `window` steps, once half of
    them are there. What is remembered of a spike is that limit, so that a level which stays up widens the statistics
    step by step, until it is sound again.
    """
    verdict: Verdict = "sound"
    if not (math.isfinite(loss) and math.isfinite(norm)):
        verdict = "not finite"
        state.skipped += 1
    elif settings.spike_sigmas is not None:
        limits = _limits(state.recent, settings.spike_sigmas, settings.window)
        if loss > limits[0] or norm > limits[1]:
            verdict = "spike"
            state.spikes += 1
        seen = [min(loss, limits[0]), min(norm, limits[1])]
        state.recent = [*state.recent, seen][-settings.window :]
    state.bad_in_a_row = 0 if verdict == "sound" else state.bad_in_a_row + 1
    return verdict


def _limits(recent: list[list[float]], sigmas: float, window: int) -> tuple[float, float]:
    """Largest loss and gradient norm that are no spikes; the same bits whatever came before the window."""
    recent = recent[-window:]
    if len(recent) < window // 2:
        return math.inf, math.inf
    limits = []
    for values in zip(*recent, strict=True):
        mean = statistics.fmean(values)
        deviation = math.sqrt(statistics.fmean((value - mean) ** 2 for value in values))
        limits.append(mean + sigmas * max(deviation, _LEAST_DEVIATION * abs(mean)))
    return limits[0], limits[1]


def weights_are_finite(model: nn.Module) -> bool:
    """Whether no weight of any rank is infinite or not a number; every rank calls it."""
    with torch.no_grad():
        mine = all(bool(local(parameter).isfinite().all()) for parameter in model.parameters())
    return not any_asked(not mine)
