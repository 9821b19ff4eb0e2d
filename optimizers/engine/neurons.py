"""Neuron-wise normalisation of orthogonal directions (NorMuon, arXiv 2510.05491).

    v_i ← β₂·v_i + (1−β₂)·mean_j(O_ij²)       for every row i, that is every output neuron
    Ô_i ← O_i / (√v_i + ε)
    W ← (1 − η·λ)·W − η·a(m, n)·c·Ô

    c = √min(m, n) / ‖Ô‖_F        ``orthogonal``: the norm of an exactly orthogonal matrix; with ``match_rms_adamw`` the
                                  paper's 0.2·√(mn)/‖Ô‖_F
    c = ‖O‖_F / ‖Ô‖_F             ``direction``: the authors' code

All Frobenius norms of a step travel in one all-reduce, so directions are held until the last of them is home: two bytes
an element of this rank's shards. A block counts as a matrix of its own; nothing travels then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .directions import Step
from .scaling import rate_on
from .sums import AllReduce, Groups, Sums
from .task import Task
from .update import decay_and_add


class Neurons(NamedTuple):
    """This rank's rows of one matrix or block of ``shape``.

    ``weight`` and ``direction`` are [rows, columns], ``second_moment`` [rows, 1]; ``groups`` share the matrix,
    ``column_groups`` among them its rows.
    """

    group: Mapping[str, Any]
    weight: Tensor
    direction: Tensor
    second_moment: Tensor
    shape: tuple[int, int]
    factor: float
    groups: Groups = ()
    column_groups: Groups = ()


def neurons_of(task: Task, step: Step, second_moments: Sequence[Tensor]) -> list[Neurons]:
    """The members of a step of whole matrices, or of blocks of whole rows, of one task."""
    if task.travels:
        layouts = task.job.layouts
        where = [(layout.shape, layout.groups, layout.column_groups) for layout in layouts]
    else:
        where = [(tuple(w.shape), (), ()) for w in step.weights]
    rows = iter(task.views(second_moments))
    moments: list[Tensor] = []
    left = second_moments[0].new_empty(0, 1)
    for w in step.weights:
        while len(w) and not len(left):  # blocks lie one below the other in the rows that this rank has, if any
            left = next(rows)
        moments.append(left[: len(w)])
        left = left[len(w) :]
    parts = zip(step.weights, step.directions, moments, where, step.factors, strict=True)
    return [Neurons(task.group, w, o, v, shape, factor, *groups) for w, o, v, (shape, *groups), factor in parts]


def neuron_steps(members: Sequence[Neurons], all_reduce: AllReduce) -> int:
    """Update second moments and weights in place; the bytes that this rank sends for it."""
    sums = Sums(all_reduce)
    own = [torch.linalg.vector_norm(x.direction, dim=1, keepdim=True, dtype=torch.float64).square_() for x in members]
    whole = [sums.add(squares.clone(), x.column_groups) for x, squares in zip(members, own, strict=True)]
    sent = sums.reduce()
    scales, norms = [], []
    for x, squares, total in zip(members, own, whole, strict=True):
        v = x.second_moment
        v.lerp_((total / x.shape[1]).to(v.dtype), 1 - x.group["neuron_beta2"])
        scales.append(1 / (v.double().sqrt() + x.group["neuron_eps"]).clamp_min(torch.finfo(torch.float32).tiny))
        both = torch.stack([(squares * scales[-1].square()).sum(), squares.sum()])
        norms.append(sums.add(both, x.groups))
    sent += sums.reduce()
    for x, scale, norm in zip(members, scales, norms, strict=True):
        _take(x, scale, norm)
    return sent


def _take(x: Neurons, scale: Tensor, norm: Tensor) -> None:
    """``scale`` [rows, 1]: 1/(√v + ε). ``norm``: the squares of ‖Ô‖_F and ‖O‖_F."""
    target = norm[1].sqrt() if x.group["neuron_norm"] == "direction" else math.sqrt(min(x.shape))
    c = torch.where(norm[0] > 0, x.factor * target / norm[0].sqrt(), 0.0)  # a zero matrix stays zero
    rows = scale * (-c * rate_on(x.group["lr"], c.device))
    wide = torch.promote_types(x.direction.dtype, torch.float32)
    decay_and_add([x.weight], [x.direction.to(wide) * rows.to(wide)], x.group)
