"""Matrices that lie in pieces, and how they come to unit norm in a stack without a whole copy in a wider dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Part = tuple[int, int, Tensor]
"""A rectangle of a matrix: its first row, its first column, its entries [rows, columns]."""

CACHE_BYTES = 2**19
"""A slice that is normalised at a time on a CPU: small beside a bucket, and it stays in a cache."""

KERNEL_BYTES = 32 * 2**20
"""The largest on an accelerator, where a kernel has to be long enough to hide its launch."""


class Pieces(NamedTuple):
    """An m×n matrix. ``read`` covers it, ``write`` are the parts of its result that are wanted.

    Both may be the same memory: nothing is written before the whole matrix has been read.
    """

    shape: tuple[int, int]
    read: Sequence[Part]
    write: Sequence[Part] = ()

    @classmethod
    def whole(cls, matrix: Tensor, out: Tensor | None = None) -> Pieces:
        """A matrix in one piece, and where its result goes."""
        return cls(tuple(matrix.shape), [(0, 0, matrix)], [] if out is None else [(0, 0, out)])

    @property
    def example(self) -> Tensor:
        """Any of the parts: all have one dtype and device."""
        return self.read[0][2]

    def source(self, room: Tensor) -> Tensor:
        """The matrix [m, n]: the part that is the whole of it, else put together in ``room``."""
        if len(self.read) == 1:
            return self.example
        copy_parts(places(room, self.read))
        return room


def places(matrix: Tensor, parts: Sequence[Part]) -> list[tuple[Tensor, Tensor]]:
    """For every part that is not empty, the view of ``matrix`` that it is, and the part."""
    return [
        (matrix[row : row + part.shape[0], column : column + part.shape[1]], part)
        for row, column, part in parts
        if part.numel()
    ]


def copy_parts(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """target ← source for all pairs (target, source)."""
    if pairs:
        targets, sources = zip(*pairs, strict=True)
        torch._foreach_copy_(list(targets), list(sources))


def load(matrices: Sequence[Pieces], x: Tensor, spare: Tensor, eps: float) -> None:
    """X ← U / ‖U‖_F for matrices [m, n] of one shape.

    The norm is taken in fp32 (fp64 for fp64 parts), of small matrices several at a time, of large ones in slices of
    rows: beside the stack only a slice exists in that dtype.

    Args:
        x: [k, s, l], s ≤ l, contiguous; written in its own dtype, transposed if m > n.
        spare: like x; overwritten.
        eps: added to the norm, relative to the largest entry.
    """
    m, n = matrices[0].shape
    example = matrices[0].example
    dtype = norm_dtype(example.dtype)
    stack = x if m <= n else x.mT
    limit = CACHE_BYTES if x.device.type == "cpu" else max(CACHE_BYTES, min(KERNEL_BYTES, x.nbytes // 4))
    at_once = min(len(matrices), limit // (m * n * dtype.itemsize))
    if at_once:
        scratch = torch.empty(at_once, m, n, dtype=dtype, device=x.device)
        for start in range(0, len(matrices), at_once):
            some = matrices[start : start + at_once]
            u = scratch[: len(some)]
            copy_parts([pair for matrix, one in zip(some, u, strict=True) for pair in places(one, matrix.read)])
            _unit_norm_(u, eps)
            stack[start : start + len(some)].copy_(u)
        return
    scratch = torch.empty(min(m, max(1, limit // (n * dtype.itemsize))), n, dtype=dtype, device=x.device)
    fits = torch.promote_types(example.dtype, x.dtype) == x.dtype
    rooms = x if m <= n else spare.view(len(matrices), m, n)
    for matrix, out, room in zip(matrices, stack, rooms, strict=True):
        in_parts = len(matrix.read) > 1
        room = room if fits or not in_parts else torch.empty(m, n, dtype=example.dtype, device=x.device)
        _unit_norm_by_slices(matrix.source(room), out, scratch, eps)


def _unit_norm_(u: Tensor, eps: float) -> None:
    """Divide ``u`` [k, m, n] by its Frobenius norms in place, safe for entries of 1e-38 as of 1e38."""
    # Dividing by the largest entry first keeps the squares inside the range of fp32.
    u.div_(largest_entry(u, (-2, -1)).clamp_min(torch.finfo(u.dtype).tiny))
    u.div_(_norms(torch.linalg.vector_norm(u, dim=-1), u.shape[-1], eps)[:, None, None])


def _unit_norm_by_slices(source: Tensor, out: Tensor, scratch: Tensor, eps: float) -> None:
    """``out`` ← ``source`` [m, n] over its Frobenius norm, as ``_unit_norm_`` but through ``scratch`` [rows, n].

    ``out`` may be ``source``.
    """
    low, high = torch.aminmax(source)
    largest = torch.maximum(high, -low).to(scratch.dtype).clamp_min(torch.finfo(scratch.dtype).tiny)
    of_rows = scratch.new_empty(source.shape[0])
    slices = list(zip(*(t.split(scratch.shape[0]) for t in (source, out, of_rows)), strict=True))
    for rows, _, norms in slices:
        u = scratch[: rows.shape[0]].copy_(rows).div_(largest)
        torch.linalg.vector_norm(u, dim=-1, out=norms)
    norm = _norms(of_rows[None], source.shape[1], eps)
    for rows, target, _ in slices:  # once more rather than kept: it would be a copy in fp32
        target.copy_(scratch[: rows.shape[0]].copy_(rows).div_(largest).div_(norm))


def _norms(of_rows: Tensor, n: int, eps: float) -> Tensor:
    """What to divide matrices of n columns by, [k], from the norms of their rows [k, m].

    A single long reduction would be split over threads, differently for each stack size.
    """
    norm = torch.linalg.vector_norm(of_rows, dim=-1)
    exact = min(of_rows.shape[1], n) == 1
    return (norm if exact else norm + eps).clamp_min(torch.finfo(norm.dtype).tiny)


def largest_entry(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """max |x| over ``dim``, which is kept with size 1; an order of magnitude faster on CPU than the infinity norm."""
    return torch.maximum(x.amax(dim, keepdim=True), -x.amin(dim, keepdim=True))


def norm_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which norms of tensors of a dtype are taken."""
    return torch.float64 if dtype == torch.float64 else torch.float32
