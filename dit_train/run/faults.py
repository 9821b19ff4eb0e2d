"""Asked to stop, and numbers that are not finite: decided alike on all ranks."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dit_train.exits import STOP_SIGNALS


class StopRequest:
    """Set by a signal to this rank; `agree` tells whether any rank has got one."""

    def __init__(self) -> None:
        self.asked = False
        self._previous: dict[signal.Signals, Callable[..., Any] | int | None] = {}

    def __enter__(self) -> StopRequest:
        for name in STOP_SIGNALS:
            number = signal.Signals[name]
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, *_: object) -> None:
        self.asked = True


def agree(loss_sum: torch.Tensor, asked: bool) -> tuple[float, bool]:
    """The loss summed over ranks, and whether any rank was asked to stop: one small all-reduce."""
    packed = torch.stack([loss_sum.detach().double(), torch.full_like(loss_sum, float(asked)).double()])
    dist.all_reduce(packed)
    total, stops = packed.tolist()
    return total, stops > 0


def gradient_norm(model: nn.Module) -> torch.Tensor:
    """Global L2 norm of all gradients, the same fp32 scalar on all ranks."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def clip(model: nn.Module, largest: float, norm: torch.Tensor) -> None:
    """Scale gradients, in place, so that their global norm is at most `largest`."""
    nn.utils.clip_grads_with_norm_(list(model.parameters()), largest, norm)
