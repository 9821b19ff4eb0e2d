"""Row steps of matrices whose rows are divided over ranks: one small collective for all matrices of a group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .rows import FormInput, Kinds, kinds, to_steps, walk
from .task import Member, Task
from .update import decay_and_add


def row_steps_across(
    members: Sequence[Member],
    advance: Callable[[Task], FormInput],
    look_ahead: Callable[[Task], FormInput],
    all_reduce: Callable[[Tensor, dist.ProcessGroup], None],
) -> int:
    """Take the row steps of tasks whose layouts have ``column_groups``; the bytes that this rank sends for it.

    U is formed twice, by ``advance`` for the sums of squares and by ``look_ahead`` for the step, so that it need not be
    held for all matrices while the sums of all of them travel.
    """
    together: dict[Any, list[Member]] = defaultdict(list)
    for member in members:
        job = member.task.job
        together[job.group, job.layouts[0].column_groups, job.device].append(member)
    sent = 0
    for (_, column_groups, device), some in together.items():
        tasks = [member.task for member in some]
        packed = torch.zeros(sum(map(_rows, tasks)), dtype=torch.float64, device=device)
        parts_of_sums = packed.split([_rows(task) for task in tasks])
        walks = [_with_sums(member, sums) for member, sums in zip(some, parts_of_sums, strict=True)]
        for task, own in zip(tasks, walks, strict=True):
            for _, _, parts, (*_, sums) in walk(own, advance(task)):
                for part, total in zip(parts, sums, strict=True):
                    norms = torch.linalg.vector_norm(part, dim=-1, keepdim=True, dtype=torch.float64)
                    torch.square(norms, out=total[:, :1])
        for group in column_groups:
            ranks = dist.get_world_size(group)
            sent += 2 * packed.nbytes * (ranks - 1) // ranks
            all_reduce(packed, group)
        eps = tasks[0].group.get("row_eps", 0.0)
        for task, own in zip(tasks, walks, strict=True):
            for factor, u, parts, (w, *_, sums) in walk(own, look_ahead(task)):
                to_steps(u, task.group["lr"], factor, torch.cat([total[:, :1] for total in sums]), eps)
                decay_and_add(w, parts, task.group)
    return sent


def _rows(task: Task) -> int:
    return sum(w.shape[:-1].numel() for w in task.weights)


def _with_sums(member: Member, sums: Tensor) -> Kinds:
    """What ``walk`` takes, with the rows' sums of squares as a fourth column, repeated to the shape of the weights.

    They lie in ``sums`` in the order of the parameters, the same on all ranks, however many columns each holds: a
    rank without any leaves its zeros there.
    """

    task = member.task

    def repeated() -> Iterator[Tensor]:
        parts = sums.split([w.shape[:-1].numel() for w in task.weights])
        for w, part in zip(task.weights, parts, strict=True):
            yield part.view(*w.shape[:-1], 1).expand(w.shape)

    columns = (task.weights, member.buffers, member.gradients, list(repeated()))
    return kinds(task.job.layouts, task.group, *columns)
