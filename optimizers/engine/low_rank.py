"""Low-rank steps (Dion, arXiv 2504.05295): one power iteration of the momentum, from last step's right factor.

    M ← M + G
    P ← orth(M·Q)                  [m, r]
    R ← Mᵀ·P                       [n, r]
    M ← M − (1−μ)·P·Rᵀ             what was used goes, what was not stays: error feedback
    Q_j ← R_j/‖R_j‖₂               for every column j; a column of zeros leaves Q_j as it was
    W ← (1 − η·λ)·W − η·a(m, n)·P·Qᵀ

M is never gathered. Ranks that divide rows have rows of P and all of R, those that divide columns all of P and rows of
R; what they add up travels packed, for all matrices of a step (up to ``WAVE_BYTES``):

    over ranks that divide columns     M·Q, m·r numbers; ‖R_j‖₂², r of fp64
    over ranks that divide rows        twice the Gram matrix of P, r·(r+1)/2 of fp64; R, n·r numbers

``orth`` is Cholesky–QR in fp64, done twice: orthonormal to rounding, whatever the condition of M·Q. A column that is a
combination of those before it, but for the rounding of M·Q, would be noise brought to norm 1; it becomes zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..sharding.layout import Layout
from ..sharding.matrices import Matrix, Rect
from .column_state import rank_of
from .forms import wide
from .scaling import rate_on, refresh_scale
from .sums import AllReduce, Groups, Sums
from .task import Member
from .update import decay_and_add

WAVE_BYTES = 2**28
"""How much M·Q and R of whole matrices, in fp64, may take up at a time."""

_TOLERANCE = 0.01
"""Relative error of a column of P, above which it is noise."""

BASIS = "right_basis"
"""The state key of Q."""


@dataclass
class _Part:
    """This rank's part of one matrix: weight and M [rows, columns], Q [columns, r]; P [rows, r] as it becomes."""

    group: Mapping[str, Any]
    shape: tuple[int, int]
    weight: Tensor
    momentum: Tensor
    basis: Tensor
    row_groups: Groups
    column_groups: Groups
    p: Tensor

    @property
    def wide(self) -> Tensor:
        """M in the dtype of the products."""
        return self.momentum.to(self.p.dtype)


def low_rank_steps(members: Sequence[Member], all_reduce: AllReduce) -> int:
    """Update momentum, Q and weights in place; the bytes that this rank sends for it."""
    with _full_precision():
        return sum(_step(wave, all_reduce) for wave in _waves(members))


@contextmanager
def _full_precision() -> Iterator[None]:
    """No TF32 or bf16 inside products of fp32: what is noise in M·Q would not be known as such."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    saved = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, value in zip(backends, saved, strict=True):
            backend.fp32_precision = value


def low_rank_flops(group: Mapping[str, Any], shape: tuple[int, int], part: Rect) -> int:
    """Of the products with this part of an m×n matrix: four with r columns, and two Gram matrices."""
    r = rank_of(group, *shape)
    return 8 * part.rows * part.columns * r + 4 * part.rows * r**2


def low_rank_sums(
    group: Mapping[str, Any], layout: Layout, weight: torch.dtype
) -> Iterator[tuple[Groups, Sequence[int]]]:
    """Process groups, and the bytes that a rank of every region of a layout adds up in them."""
    asked = group["momentum_dtype"]
    dtype = torch.promote_types(wide(weight), asked) if isinstance(asked, torch.dtype) else wide(weight)
    over_rows, over_columns = [], []
    for region in layout.regions:
        mine = [matrix for matrix in layout.matrices if _is_inside(matrix, region.index)]
        ranks = [rank_of(group, *matrix.shape) for matrix in mine]
        rows = [matrix.within(region)[0].rows for matrix in mine]
        n = region.columns[1]
        over_rows.append(sum(8 * r * (r + 1) + dtype.itemsize * n * r for r in ranks))
        over_columns.append(sum(dtype.itemsize * m * r + 8 * r for m, r in zip(rows, ranks, strict=True)))
    yield layout.row_groups, over_rows
    yield layout.column_groups, over_columns


def _waves(members: Sequence[Member]) -> Iterator[list[_Part]]:
    """Whole parameters, as many as there is room for: the same on all ranks, whatever jobs they make of them."""
    wave: list[_Part] = []
    filled = 0
    for member in members:
        group = member.task.group
        momenta, bases = member.state["momentum_buffer"], member.state[BASIS]
        torch._foreach_add_(momenta, [g.to(m.dtype) for g, m in zip(member.gradients, momenta, strict=True)])
        for layout, *tensors in zip(member.task.job.layouts, member.task.weights, momenta, bases, strict=True):
            size = sum(8 * sum(matrix.shape) * rank_of(group, *matrix.shape) for matrix in layout.matrices)
            if wave and filled + size > WAVE_BYTES:
                yield wave
                wave, filled = [], 0
            wave += _parts(layout, group, *tensors)
            filled += size
    if wave:
        yield wave


def _parts(
    layout: Layout, group: Mapping[str, Any], weight: Tensor, momentum: Tensor, bases: Tensor
) -> Iterator[_Part]:
    """Of every matrix that ranks on this rank's process groups have a row of; of a stack without any, an empty one.

    That keeps its place among the sums, whose order is that of all ranks.
    """
    region = layout.regions[layout.rank]
    mine = [matrix for matrix in layout.matrices if _is_inside(matrix, region.index)]
    dtype = torch.promote_types(torch.promote_types(momentum.dtype, bases.dtype), torch.float32)
    views = zip(layout.views(weight), layout.views(momentum), strict=True)
    held = {matrix: pair for (matrix, _, _), pair in zip(layout.here, views, strict=True)}
    width = region.columns[1]
    factors = bases.view(len(mine), width, bases.numel() // max(1, len(mine) * width)) if mine and width else ()
    for i, matrix in enumerate(mine or layout.matrices[:1]):
        r = rank_of(group, *matrix.shape) if mine else 0
        w, m = held.get(matrix, (weight.new_empty(0, width), momentum.new_empty(0, width)))
        q = factors[i][:, :r] if len(factors) else bases.new_empty(width, r)
        p = torch.empty(len(w), r, dtype=dtype, device=w.device)
        yield _Part(group, matrix.shape, w, m, q, layout.row_groups, layout.column_groups, p)


def _is_inside(matrix: Matrix, index: tuple[int, int]) -> bool:
    return index[0] <= matrix.index < index[0] + index[1]


def _step(parts: Sequence[_Part], all_reduce: AllReduce) -> int:
    plain, exact = Sums(all_reduce, None), Sums(all_reduce)
    for x in parts:
        x.p = plain.add(x.wide @ x.basis.to(x.p.dtype), x.column_groups)
    sent = plain.reduce()
    dtypes = [x.p.dtype for x in parts]
    for again in (False, True):
        grams = []
        for x in parts:
            x.p = x.p.double()
            grams.append(exact.add(_lower(x.p.mT @ x.p), x.row_groups))
        sent += exact.reduce()
        for x, lower, dtype in zip(parts, grams, dtypes, strict=True):
            gram = _symmetric(lower, x.p.shape[1])
            scale = (gram.diagonal() != 0).double() if again else independent(gram, dtype)
            x.p = orthonormal(x.p, gram, scale)
    factors = []
    for x, dtype in zip(parts, dtypes, strict=True):
        x.p = x.p.to(dtype)
        factors.append(plain.add(x.wide.mT @ x.p, x.row_groups))
    sent += plain.reduce()
    squares = [exact.add(r.double().square().sum(0), x.column_groups) for x, r in zip(parts, factors, strict=True)]
    sent += exact.reduce()
    for x, r, square in zip(parts, factors, squares, strict=True):
        _take(x, r, square.sqrt())
    return sent


def independent(gram: Tensor, dtype: torch.dtype) -> Tensor:
    """1/norm of every column of P, [r] in fp64, from its Gram matrix; 0 for one of which nothing is left but noise.

    What is left is what those before it do not explain. Brought to norm 1, column j of orth(P) has an error of
    ε·‖(L⁻¹)_j‖₂, as P was formed in ``dtype``. Nothing waits for the device; a NaN stays one.
    """
    r, eps = len(gram), torch.finfo(dtype).eps
    norms = gram.diagonal().sqrt()
    if r == 0:
        return norms
    scale = torch.where(norms <= eps / _TOLERANCE * norms.max(), 0.0, 1 / norms)
    shift = 4 * r * torch.finfo(torch.float64).eps  # above the rounding of a Gram matrix that is singular
    left = _cholesky(gram, scale, shift).diagonal()
    scale = torch.where(left <= max(2 * shift**0.5, 4 * eps), 0.0, scale)
    eye = torch.eye(r, dtype=gram.dtype, device=gram.device)
    errors = eps * torch.linalg.solve_triangular(_cholesky(gram, scale), eye, upper=False).norm(dim=1)
    return torch.where(errors >= _TOLERANCE, 0.0, scale)


def orthonormal(p: Tensor, gram: Tensor, scale: Tensor) -> Tensor:
    """Rows of P·L⁻ᵀ in fp64, where L·Lᵀ is the Gram matrix of the whole P, both times ``scale``: as of Gram–Schmidt."""
    return torch.linalg.solve_triangular(_cholesky(gram, scale).mT, p * scale, upper=True, left=False)


def _cholesky(gram: Tensor, scale: Tensor, shift: float = 0.0) -> Tensor:
    """L of columns that are scaled; those of scale 0 count as orthogonal to all."""
    unit = gram * scale * scale[:, None]
    return torch.linalg.cholesky_ex(unit + torch.diag((scale == 0).to(unit.dtype) + shift))[0]


def _lower(gram: Tensor) -> Tensor:
    """The lower triangle as a vector: half as much to send."""
    return gram[tuple(torch.tril_indices(*gram.shape, device=gram.device))]


def _symmetric(lower: Tensor, r: int) -> Tensor:
    gram = lower.new_zeros(r, r)
    gram[tuple(torch.tril_indices(r, r, device=lower.device))] = lower
    return gram + gram.tril(-1).mT


def _take(x: _Part, r: Tensor, norms: Tensor) -> None:
    """Update M, Q and W; ``norms`` are those of R's columns."""
    group = x.group
    m = x.wide  # M itself, or a copy
    torch.addmm(m, x.p, r.mT, alpha=group["momentum"] - 1, out=m)
    x.momentum.copy_(m)
    x.basis.copy_(torch.where(norms == 0, x.basis.to(r.dtype), (r / norms).to(r.dtype)))
    scale = -refresh_scale(group, *x.shape) * rate_on(group["lr"], r.device)
    step = (x.p * scale).to(r.dtype) @ x.basis.to(r.dtype).mT
    decay_and_add([x.weight], [step], group)
