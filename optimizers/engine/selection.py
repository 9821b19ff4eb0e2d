"""Orthogonalisation of some rows of a matrix, those of the largest L1 norm: see ``algorithms/dion2.py``.

Every rank learns all norms of the rows, or of the part of a row that it holds, in one all-reduce for all matrices. What
was selected then travels as matrices of fewer rows, in the buckets and to the owners that the plan has for the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..orthogonal.pieces import Pieces
from ..sharding.layout import Layout
from ..sharding.matrices import Matrix
from ..sharding.plan import AnyBucket
from .directions import orthogonalise, wire_dtype
from .narrow import count_of, narrowed
from .scaling import rate_on, refresh_scale
from .sums import Sums
from .task import Task


@dataclass
class Selected:
    """What one task orthogonalises in this step.

    ``rows``: indices of the selected rows of every view of the momentum that this rank has (``Task.views``).
    ``bucket``: in which they travel, None for a task that stays.
    """

    rows: list[Tensor]
    bucket: AnyBucket | None = None


def row_norms(task: Task, buffers: Sequence[Tensor], sums: Sums) -> list[Tensor]:
    """L1 norms of the rows of every matrix of every entry, [matrices, m] in fp64; whole once ``sums`` are reduced.

    m is that of the highest matrix.
    """
    found = []
    for layout, entry in zip(task.job.layouts, buffers, strict=True):
        m = max(matrix.rows for matrix in layout.matrices)
        norms = torch.zeros(len(layout.matrices), m, dtype=torch.float64, device=entry.device)
        for view, (matrix, rect, _) in zip(layout.views(entry), layout.here, strict=True):
            own = norms[layout.places[matrix]][rect.row : rect.row + rect.rows]
            own.copy_(torch.linalg.vector_norm(view, 1, dim=1, dtype=torch.float64))
        everywhere = task.group["selection"] == "global"
        found.append(sums.add(norms, layout.groups if everywhere else layout.column_groups))
    return found


def select(tasks: Sequence[Task], norms: Sequence[Sequence[Tensor]]) -> list[Selected]:
    """Choose rows by their norms. Waits for the device once; fake tensors, which have no norms, are cut as planned."""
    if any(isinstance(entry, FakeTensor) for of_task in norms for entry in of_task):
        return [_planned(task) for task in tasks]
    picked = [
        _pick(task.group, layout, matrix, of_entry[layout.places[matrix]])
        for task, of_task in zip(tasks, norms, strict=True)
        for layout, of_entry in zip(task.job.layouts, of_task, strict=True)
        for matrix, _, _ in layout.here
    ]
    sizes = [len(rows) for rows in picked]
    on_host = iter(torch.cat(picked).cpu().split(sizes)) if picked else iter(())
    on_device = iter(picked)
    return [_selected(task, on_host, on_device) for task in tasks]


def _pick(group: Mapping[str, Any], layout: Layout, matrix: Matrix, norms: Tensor) -> Tensor:
    """Selected rows of one matrix in ascending order: among all, or among those of this rank."""
    if group["selection"] == "local":
        rect, _ = matrix.within(layout.regions[layout.rank])
        own = norms[rect.row : rect.row + rect.rows]
        return _largest(own, count_of(group, rect.rows)) + rect.row
    return _largest(norms[: matrix.rows], count_of(group, matrix.rows))


def _largest(norms: Tensor, count: int) -> Tensor:
    return norms.sort(descending=True, stable=True).indices[:count].sort().values


def _planned(task: Task) -> Selected:
    """As many rows of each rank's share."""
    here = [rect for layout in task.job.layouts for _, rect, _ in layout.here]
    rows = [torch.arange(count_of(task.group, rect.rows), device=task.job.device) for rect in here]
    return Selected(rows, task.job.bucket if task.travels else None)


def _selected(task: Task, on_host: Iterator[Tensor], on_device: Iterator[Tensor]) -> Selected:
    rows, cargo = [], []
    bucket = task.job.bucket if task.travels else None  # as planned if each rank's share has its fixed number
    moves = bucket is not None and task.group["selection"] == "global"
    travelling = iter(bucket.cargo if moves else ())
    for layout in task.job.layouts:
        for _, rect, _ in layout.here:
            host, device = next(on_host), next(on_device)
            first, last = torch.searchsorted(host, torch.tensor([rect.row, rect.row + rect.rows])).tolist()
            rows.append(device[first:last] - rect.row)
            if moves:
                cargo.append(narrowed(next(travelling), task.group, layout, host))
    return Selected(rows, replace(bucket, cargo=tuple(cargo)) if moves else bucket)


def take_rows(task: Task, buffers: Sequence[Tensor], outs: Sequence[Tensor | None]) -> None:
    """Copy the selected rows of the momentum into ``outs`` where they are wanted, and let what stays of them decay."""
    views = task.views(buffers)
    for m, rows, out in zip(views, task.selected.rows, outs, strict=True):
        some = m.index_select(0, rows)
        if out is not None:
            out.copy_(some)
        m.index_copy_(0, rows, some.mul_(task.group["momentum"]))


def take_rows_here(task: Task, buffers: Sequence[Tensor]) -> list[Tensor]:
    """Directions of the selected rows of whole matrices that lie on this rank."""
    wire = wire_dtype(task.group, task.weights[0].dtype)
    outs = [
        torch.empty(len(rows), m.shape[1], dtype=wire, device=m.device)
        for m, rows in zip(task.views(buffers), task.selected.rows, strict=True)
    ]
    take_rows(task, buffers, outs)
    orthogonalise([Pieces.whole(x, x) for x in outs], task.group, task.weights[0])
    return outs


def apply_to_rows(task: Task, directions: Sequence[Tensor]) -> None:
    """W ← (1 − η·λ)·W, and W_i ← W_i − η·a(m, n)·O_i for the selected rows i. 16-bit weights are rounded once."""
    group, lr = task.group, task.group["lr"]
    scales = [refresh_scale(group, *matrix.shape) for layout in task.job.layouts for matrix, _, _ in layout.here]
    for weight, rows, direction, scale in zip(
        task.views(task.weights), task.selected.rows, directions, scales, strict=True
    ):
        w = weight.float() if weight.dtype.itemsize < 4 else weight
        eta = rate_on(lr, w.device)
        w.mul_(1 - eta * group["weight_decay"])
        w.index_add_(0, rows, direction.to(w.dtype) * (-eta * scale))
        if w is not weight:
            weight.copy_(w)
