"""Row steps of matrices whose rows are divided over ranks: one small collective for all matrices of a group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .directions import row, row_sums
from .task import Task
from .update import apply


def row_steps_across(
    tasks: Sequence[Task],
    advance: Callable[[Task], list[Tensor]],
    look_ahead: Callable[[Task], list[Tensor]],
) -> int:
    """Take the row steps of tasks whose layouts have ``column_groups``; the bytes that this rank sends for it.

    U is made twice, by ``advance`` for the sums of squares and by ``look_ahead`` for the step, so that it need not be
    held for all matrices while the sums of all of them travel.
    """
    together: dict[Any, list[Task]] = defaultdict(list)
    for task in tasks:
        together[task.job.group, task.job.layouts[0].column_groups, task.job.device].append(task)
    sent = 0
    for (_, column_groups, _), members in together.items():
        sums = [[row_sums(u) for u in advance(task)] for task in members]
        packed = torch.cat([s.flatten() for one in sums for s in one])
        for group in column_groups:
            ranks = dist.get_world_size(group)
            sent += 2 * packed.nbytes * (ranks - 1) // ranks
            dist.all_reduce(packed, group=group)
        parts = iter(packed.split([s.numel() for one in sums for s in one]))
        for task, one in zip(members, sums, strict=True):
            whole = [next(parts).view(s.shape) for s in one]
            apply(row(task.weights, look_ahead(task), task.job.layouts, task.group, whole), task.group)
    return sent
