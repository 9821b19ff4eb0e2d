"""The last step of every matrix algorithm: from directions to weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .directions import Step
from .scaling import rate_on


def apply(step: Step, group: Mapping[str, Any]) -> None:
    """W_i ← (1 − η·λ)·W_i − η·factor_i·direction_i, in place.

    16-bit weights are updated in a wider temporary and rounded once: in bf16 1 − η·λ itself is 1 for η·λ < 0.002.
    """
    if step.weights and step.weights[0].dtype.itemsize < 4:
        wide = [w.float() for w in step.weights]
        _apply(replace(step, weights=wide), group)
        torch._foreach_copy_(step.weights, wide)
    elif step.weights:
        _apply(step, group)


def decay_and_add(weights: list[Tensor], steps: list[Tensor], group: Mapping[str, Any]) -> None:
    """W_i ← (1 − η·λ)·W_i + step_i in place, 16-bit weights in a wider temporary as in ``apply``."""
    if weights[0].dtype.itemsize < 4:
        wide = [w.float() for w in weights]
        decay_and_add(wide, steps, group)
        torch._foreach_copy_(weights, wide)
        return
    lr, decay = group["lr"], group["weight_decay"]
    if isinstance(lr, Tensor) or weights[0].device.type != "cpu" or weights[0].dtype != steps[0].dtype:
        _decay(weights, group)
        torch._foreach_add_(weights, steps)
        return
    for weight, step in zip(weights, steps, strict=True):  # once over memory instead of twice
        torch.add(step, weight, alpha=1 - lr * decay, out=weight)


def _decay(weights: list[Tensor], group: Mapping[str, Any], times: float = 1.0) -> None:
    decay = times * group["weight_decay"]
    if decay != 0:
        torch._foreach_mul_(weights, 1 - rate_on(group["lr"], weights[0].device) * decay)


def _apply(step: Step, group: Mapping[str, Any]) -> None:
    for weight, times in zip(step.weights, step.decays, strict=False):
        _decay([weight], group, times)
    if not step.decays:
        _decay(step.weights, group)
    lr = rate_on(group["lr"], step.weights[0].device)
    by_factor: dict[float, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for weight, direction, factor in zip(step.weights, step.directions, step.factors, strict=True):
        by_factor[factor][0].append(weight)
        by_factor[factor][1].append(direction)
    for factor, (weights, directions) in by_factor.items():
        if isinstance(lr, Tensor):  # a product of lists with a 0-d tensor stays in the dtype of the lists
            directions = [d.to(w.dtype) for d, w in zip(directions, weights, strict=True)]
            torch._foreach_sub_(weights, torch._foreach_mul(directions, lr * factor))
        else:  # widens 16-bit directions on the fly
            torch._foreach_add_(weights, directions, alpha=-lr * factor)
