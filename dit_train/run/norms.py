"""Norms of gradients, weights and updates, by group of the optimizer and by part of the model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dit_train.parallel.shard import distinct, local

WHAT = ("gradient", "weight", "update")


class Norms:
    """L2 norms over all ranks, each element counted once whoever holds copies of it, of one small all-reduce.

    Gradient and weight are those that the optimizer finds, the update is what it adds. For that this rank's weights are
    copied before its step, when what the backward needed is free again.
    """

    def __init__(self, optimizer: Any) -> None:
        self._parameters: list[Tensor] = []
        places: list[tuple[str, str]] = []
        for number, group in enumerate(optimizer.param_groups):
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                self._parameters.append(parameter)
                places.append((f"{number}_{group['algorithm']}", part_of(name)))
        self.names = list(dict.fromkeys(name for pair in zip(*places, strict=True) for name in pair))
        shares = [distinct(parameter) / dist.get_world_size() for parameter in self._parameters]
        counted = list(zip(shares, places, strict=True))
        members = [[share * (name in place) for share, place in counted] for name in self.names]
        self._members = torch.tensor(members, dtype=torch.float64, device=local(self._parameters[0]).device)
        self._before: list[Tensor] = []

    @property
    def begun(self) -> bool:
        """Whether the weights before an update are kept."""
        return bool(self._before)

    @torch.no_grad()
    def before_update(self) -> None:
        """Copy this rank's weights."""
        self._before = [local(parameter).clone() for parameter in self._parameters]

    @torch.no_grad()
    def after_update(self) -> Tensor:
        """Squared norms [name, what] fp64 on the device; collective. Gradients have to be there still."""
        weights = [local(p) for p in self._parameters]
        gradients = [p.grad if p.grad is None else local(p.grad) for p in self._parameters]
        squares = [self._squares(gradients), self._squares(self._before)]
        torch._foreach_sub_(self._before, weights)
        squares.append(self._squares(self._before))
        self._before = []
        found = self._members @ torch.stack(squares, dim=1)
        dist.all_reduce(found)
        return found

    def read(self, squares: Tensor, gradients_by: float) -> dict[str, float]:
        """What `after_update` gave as ``gradient_norm/mlp`` and so on, with the gradients multiplied by a factor."""
        rows = squares.sqrt().tolist()
        by = {"gradient": gradients_by, "weight": 1.0, "update": 1.0}
        return {
            f"{what}_norm/{name}": by[what] * norm
            for name, row in zip(self.names, rows, strict=True)
            for what, norm in zip(WHAT, row, strict=True)
        }

    def _squares(self, tensors: list[Tensor | None]) -> Tensor:
        """‖x‖² of each, fp64 [len(tensors)]; 0 for None and for a rank's share without elements."""
        there = [tensor is not None and tensor.numel() > 0 for tensor in tensors]
        found = [tensor for tensor, is_there in zip(tensors, there, strict=True) if is_there]
        norms = iter(torch._foreach_norm(found) if found else ())
        nothing = self._members.new_zeros(())
        return torch.stack([next(norms) if is_there else nothing for is_there in there]).double().square()


def part_of(name: str) -> str:
    """``attention``, ``mlp`` or ``modulation`` of all blocks, else the first word of a name, as ``final_layer``."""
    words = name.split(".")
    return words[2] if words[0] == "blocks" else words[0]
