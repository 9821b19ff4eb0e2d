"""Asked to stop, and numbers that are not finite: decided alike on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


def agree(loss_sum: torch.Tensor, asked: bool) -> tuple[float, bool]:
    """The loss summed over ranks, and whether any rank was asked to stop: one small all-reduce."""
    packed = torch.stack([loss_sum.detach().double(), torch.full_like(loss_sum, float(asked)).double()])
    dist.all_reduce(packed)
    total, stops = packed.tolist()
    return total, stops > 0


def any_asked(asked: bool) -> bool:
    """Whether any rank was asked to stop; every rank calls it."""
    flag = torch.tensor(int(asked))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def gradient_norm(model: nn.Module) -> torch.Tensor:
    """Global L2 norm of all gradients, the same fp32 scalar on all ranks."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def clip(model: nn.Module, largest: float, norm: torch.Tensor) -> None:
    """Scale gradients, in place, so that their global norm is at most `largest`."""
    nn.utils.clip_grads_with_norm_(list(model.parameters()), largest, norm)
