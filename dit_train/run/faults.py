"""Asked to stop, and numbers that are not finite: decided alike on all ranks."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dit_train.parallel.shard import local


def agree(loss_sum: torch.Tensor, asked: bool) -> tuple[float, bool]:
    """The loss summed over ranks, and whether any rank was asked to stop: one small all-reduce.

    Ranks of a tensor group, which see the same images, each bring their part of the group's sum.
    """
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
    of_mesh = defaultdict(list)  # under tensor parallelism there are two, whose norms torch does not add
    for parameter in model.parameters():
        if parameter.grad is not None:
            of_mesh[getattr(parameter.grad, "device_mesh", None)].append(parameter.grad)
    norms = [nn.utils.get_total_norm(gradients) for gradients in of_mesh.values()]
    return torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()


def clip(model: nn.Module, largest: float, norm: torch.Tensor) -> None:
    """Scale gradients, in place, so that their global norm is at most `largest`."""
    by = torch.clamp(largest / (norm + 1e-6), max=1.0)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    torch._foreach_mul_([local(gradient) for gradient in gradients], by)
