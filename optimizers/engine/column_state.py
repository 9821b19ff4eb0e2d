"""State that lies with the columns of a parameter: r numbers for each column of each of its matrices.

    [n, r]            of a matrix                      [e, n, r]        of a stack
    [in, deep, r]     of a convolution [out, in, …]    [k, …]           of matrices that are split into k

    [e, k, n, r]      of a stack whose matrices are

Ranks that divide rows hold the same; those that divide columns hold the numbers of their own. Dimensions are apart so
that shards are those of the parameter, however uneven.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ..sharding.layout import Layout, layout_of, local
from ..sharding.matrices import MatrixSplit

_LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class Columns:
    """How such state of one parameter lies; ``parts``: logical matrices of each, 0 if it is not split.

    ``rank``: r, the largest of its matrices. ``seed``: of the first values.
    """

    layout: Layout
    parts: int
    rank: int
    seed: int

    def shape(self, p: Tensor) -> tuple[int, ...]:
        """Global shape."""
        return self._shape(p, *((p.shape[0], p.shape[2]) if p.ndim == 3 else (1, p.shape[1])))

    def placements(self, p: Tensor) -> tuple[Placement, ...]:
        """Of a DTensor, () for a plain tensor."""
        return tuple(self._placement(p, placed) for placed in p.placements) if isinstance(p, DTensor) else ()

    def first(self, p: Tensor, dtype: torch.dtype) -> Tensor:
        """Orthonormal columns of every matrix: cosines of the first r frequencies, in rows of a random sign (DCT-IV).

        Both follow from an element's place alone, so that they are the same on any number of ranks, each of which makes
        its own.
        """
        region = self.layout.regions[self.layout.rank]
        start, count = region.columns
        n, each = p.shape[2] if p.ndim == 3 else math.prod(p.shape[1:]), max(1, self.parts)
        shard = local(p.detach())  # whatever kind of tensor it is, fake or meta, this state is too
        matrix = _counted(shard, each * region.index[1]) + each * region.index[0]
        column = _counted(shard, count) + start
        signs = 1 - 2 * (_hashed(_hashed(matrix + self.seed)[:, None] + column) & 1)
        frequency = _counted(shard, self.rank) + 0.5
        cosines = ((column + 0.5).double()[:, None] * frequency * (math.pi / max(1, n))).cos() * (2 / max(1, n)) ** 0.5
        shape = self._shape(p, region.index[1], count // (max(1, math.prod(p.shape[2:])) if p.ndim > 3 else 1))
        held = (signs[..., None] * cosines).to(dtype).view(shape)
        if not isinstance(p, DTensor):
            return held
        whole = torch.empty(self.shape(p), device="meta")
        placements, size = self.placements(p), whole.shape
        return DTensor.from_local(held, p.device_mesh, placements, run_check=False, shape=size, stride=whole.stride())

    def _shape(self, p: Tensor, matrices: int, columns: int) -> tuple[int, ...]:
        parts = (self.parts,) if self.parts else ()
        if p.ndim == 3:
            return (matrices, *parts, columns, self.rank)
        return (*parts, columns, *((math.prod(p.shape[2:]),) if p.ndim > 3 else ()), self.rank)

    def _placement(self, p: Tensor, placed: Placement) -> Placement:
        if isinstance(placed, Replicate):
            return placed
        if p.ndim == 3 and placed.dim == 0:
            return placed
        if placed.dim != (2 if p.ndim == 3 else 1):
            return Replicate()
        dim = (p.ndim == 3) + bool(self.parts)
        if isinstance(placed, _StridedShard):
            return _StridedShard(dim, split_factor=placed.split_factor)
        return Shard(dim)


def columns_of(group: Mapping[str, Any], p: Tensor, split: MatrixSplit | None, name: str, place: Any) -> Columns:
    """How such state of a parameter lies; ``place``: what tells its first values from those of others.

    Raises:
        ValueError: for what ``layout_of`` refuses.
    """
    layout = layout_of(p, name, split)
    parts = 0 if split is None else sum(matrix.index == 0 for matrix in layout.matrices)
    rank = max((rank_of(group, *matrix.shape) for matrix in layout.matrices), default=0)
    return Columns(layout, parts, rank, zlib.crc32(repr((place, tuple(p.shape))).encode()))


def rank_of(group: Mapping[str, Any], m: int, n: int) -> int:
    """r = ⌈rank_fraction·min(m, n)⌉, up to a multiple of ``rank_multiple``, at most min(m, n)."""
    multiple = group["rank_multiple"]
    wanted = math.ceil(group["rank_fraction"] * min(m, n) - 1e-9)
    return min(m, n, math.ceil(max(1, wanted) / multiple) * multiple)


def _counted(like: Tensor, count: int) -> Tensor:
    """0, 1, …, count − 1."""
    return like.new_ones(count, dtype=torch.int64).cumsum(0) - 1


def _hashed(x: Tensor) -> Tensor:
    """32 mixed bits of every int64 number (lowbias32 of C. Wellons)."""
    x = x & _LOW
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW
    return x ^ (x >> 16)
