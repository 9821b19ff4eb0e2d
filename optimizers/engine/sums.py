"""Numbers that ranks add up: packed into one all-reduce for all matrices, instead of one for each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

AllReduce = Callable[[Tensor, dist.ProcessGroup], None]
Groups = tuple[dist.ProcessGroup, ...]


class Sums:
    """Partial sums, whole after ``reduce``. All ranks add the same ones in the same order.

    ``all_reduce`` (packed, group) adds up in place. ``dtype``: in which, None for that of each partial sum.
    """

    def __init__(self, all_reduce: AllReduce, dtype: torch.dtype | None = torch.float64) -> None:
        self._all_reduce, self._dtype = all_reduce, dtype
        self._parts: dict[tuple[Groups, torch.device, torch.dtype], list[Tensor]] = defaultdict(list)

    def add(self, partial: Tensor, groups: Groups) -> Tensor:
        """A tensor that holds the sum over the ranks of ``groups``, one after the other, after ``reduce``."""
        partial = partial if self._dtype is None else partial.to(self._dtype)
        if groups:
            self._parts[groups, partial.device, partial.dtype].append(partial)
        return partial

    def reduce(self) -> int:
        """Add up, in place; the bytes that this rank sends for it."""
        sent = 0
        for (groups, *_), parts in self._parts.items():
            packed = torch.cat([part.reshape(-1) for part in parts])
            if not len(packed):
                continue
            for group in groups:
                ranks = dist.get_world_size(group)
                sent += 2 * packed.nbytes * (ranks - 1) // ranks
                self._all_reduce(packed, group)
            for part, total in zip(parts, packed.split([part.numel() for part in parts]), strict=True):
                part.copy_(total.view(part.shape))
        self._parts.clear()
        return sent
