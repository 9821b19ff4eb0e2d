"""Steps that bring columns, or whole matrices, to norm 1: ranks add up squares, in one small all-reduce for all.

    columns   D_j = U_j / ‖U_j‖₂
    matrix    X = U / (‖U‖_F + 1e-7),  D = X / (rms(cosh(γ·X)) + 1e-8)  or, of U itself,  U / (rms(cosh(γ·X)) + 1e-8)

The second is AuON's (arXiv 2509.24320). U is formed anew each time it is needed, so that it need not be held for all
matrices while sums travel. Rows are a case of their own: where ranks hold whole rows, nothing is added up (rows.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..sharding.matrices import Matrix, Rect
from .scaling import rate_on
from .sums import AllReduce, Sums
from .task import Member, Task
from .update import decay_and_add

FormInput = Callable[[list[Tensor], list[Tensor]], list[Tensor]]
"""(buffers, gradients) -> U, one tensor for each."""


class _View(NamedTuple):
    """This rank's part of one matrix: weight and U [rows, columns], and the whole's sum, [n] or [1]."""

    weight: Tensor
    u: Tensor
    matrix: Matrix
    rect: Rect
    total: Tensor


def column_steps(
    members: Sequence[Member],
    advance: Callable[[Task], FormInput],
    look_ahead: Callable[[Task], FormInput],
    all_reduce: AllReduce,
) -> int:
    """Update momentum and weights in place; the bytes that this rank sends for it."""
    sums = Sums(all_reduce)
    totals = [_totals(member.task, columns=True) for member in members]
    for member, total in zip(members, totals, strict=True):
        for view in _views(member, total, advance):
            _own(view).add_(torch.linalg.vector_norm(view.u, dim=0, dtype=torch.float64).square_())
        _add(member, total, sums)
    sent = sums.reduce()
    for member, total in zip(members, totals, strict=True):
        for view in _views(member, total, look_ahead):
            norms = _own(view).sqrt().clamp_min(torch.finfo(view.u.dtype).tiny)
            _take(member, view, view.u / norms.to(view.u.dtype))
    return sent


def matrix_steps(
    members: Sequence[Member],
    advance: Callable[[Task], FormInput],
    look_ahead: Callable[[Task], FormInput],
    all_reduce: AllReduce,
) -> int:
    """Update momentum and weights in place; the bytes that this rank sends for it."""
    squares, cosh = Sums(all_reduce), Sums(all_reduce)
    norms = [_totals(member.task, columns=False) for member in members]
    for member, total in zip(members, norms, strict=True):
        for view in _views(member, total, advance):
            view.total.add_(torch.linalg.vector_norm(view.u, dtype=torch.float64).square())
        _add(member, total, squares)
    sent = squares.reduce()
    for total in (one for several in norms for one in several):
        total.sqrt_().add_(1e-7)
    powers = [_totals(member.task, columns=False) for member in members]
    for member, norm, power in zip(members, norms, powers, strict=True):
        gamma = member.task.group["gamma"]
        for view, whole in zip(_views(member, power, look_ahead), _wholes(member, norm), strict=True):
            x = view.u / whole.to(view.u.dtype)
            size = torch.linalg.vector_norm(x.mul_(gamma).cosh_(), dtype=torch.float64)
            view.total.add_(size.square() / (view.matrix.rows * view.matrix.columns))
        _add(member, power, cosh)
    sent += cosh.reduce()
    for member, norm, power in zip(members, norms, powers, strict=True):
        normalised = member.task.group["normalised"]
        for view, whole in zip(_views(member, power, look_ahead), _wholes(member, norm), strict=True):
            divisor = (view.total.sqrt() + 1e-8) * (whole if normalised else 1.0)
            _take(member, view, view.u / divisor.to(view.u.dtype))
    return sent


def _totals(task: Task, columns: bool) -> list[Tensor]:
    """Zeros for every matrix of every parameter, [matrices, n] or [matrices, 1], also of those that others hold."""
    device = task.job.device
    return [
        torch.zeros(len(layout.matrices), layout.shape[1] if columns else 1, dtype=torch.float64, device=device)
        for layout in task.job.layouts
    ]


def _views(member: Member, totals: Sequence[Tensor], form: Callable[[Task], FormInput]) -> Iterator[_View]:
    task = member.task
    us = form(task)(member.buffers, member.gradients)
    for weight, u, layout, total in zip(task.weights, us, task.job.layouts, totals, strict=True):
        parts = zip(layout.views(weight), layout.views(u), layout.here, strict=True)
        for w, x, (matrix, rect, _) in parts:
            wide = x.float() if x.dtype.itemsize < 4 else x
            yield _View(w, wide, matrix, rect, total[layout.places[matrix]])


def _wholes(member: Member, totals: Sequence[Tensor]) -> Iterator[Tensor]:
    """The total of each view."""
    for layout, total in zip(member.task.job.layouts, totals, strict=True):
        for matrix, _, _ in layout.here:
            yield total[layout.places[matrix]]


def _own(view: _View) -> Tensor:
    """The sums of the columns that this rank has."""
    return view.total[view.rect.column : view.rect.column + view.rect.columns]


def _add(member: Member, totals: Sequence[Tensor], sums: Sums) -> None:
    for layout, total in zip(member.task.job.layouts, totals, strict=True):
        sums.add(total, layout.groups)


def _take(member: Member, view: _View, direction: Tensor) -> None:
    group = member.task.group
    factor = member.task.algorithm.unit_scale(group, *view.matrix.shape)
    step = direction * (-factor * rate_on(group["lr"], direction.device))
    decay_and_add([view.weight], [step.to(direction.dtype)], group)
