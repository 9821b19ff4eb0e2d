"""Who orthogonalises which matrix, and what travels in which bucket: frozen data, equal on all ranks, built once.

A matrix cut over N ranks travels to one owner, is orthogonalised there once, and its rows travel back. Rank r sends
its rows of every matrix to the owner and gets the same number of elements back, so a balanced refresh of E elements
sends 2·b·E·(N−1)/N² bytes a rank (b bytes an element).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch


@dataclass(frozen=True)
class Cargo:
    """One m×n matrix of which rank r holds ``rows[r]`` rows. ``index`` is its place in the caller's list."""

    index: int
    shape: tuple[int, int]
    rows: tuple[int, ...]

    @property
    def flops(self) -> int:
        """Newton–Schulz work up to a constant: 2s²l + s³ for sides s ≤ l."""
        s, long = sorted(self.shape)
        return 2 * s * s * long + s**3

    def elements(self, rank: int) -> int:
        """Elements of the matrix that a rank holds."""
        return self.rows[rank] * self.shape[1]


@dataclass(frozen=True)
class Bucket:
    """Matrices that travel together. ``owners[i]`` orthogonalises ``cargo[i]``; cargo is ordered by owner."""

    cargo: tuple[Cargo, ...]
    owners: tuple[int, ...]
    dtype: torch.dtype
    ranks: int

    @cached_property
    def traffic(self) -> tuple[tuple[int, ...], ...]:
        """``traffic[src][owner]``: elements of src's shards that the owner gets, and sends back."""
        table = [[0] * self.ranks for _ in range(self.ranks)]
        for cargo, owner in zip(self.cargo, self.owners, strict=True):
            for src in range(self.ranks):
                table[src][owner] += cargo.elements(src)
        return tuple(map(tuple, table))

    def owned(self, rank: int) -> list[Cargo]:
        """The matrices that a rank orthogonalises, in the order of the bucket."""
        return [c for c, owner in zip(self.cargo, self.owners, strict=True) if owner == rank]

    @cached_property
    def bytes_sent(self) -> tuple[int, ...]:
        """Bytes that each rank puts on the wire in one refresh: out to the owners and home from it."""
        held = map(sum, self.traffic)
        owned = map(sum, zip(*self.traffic, strict=True))
        return tuple(
            (out + home - 2 * self.traffic[rank][rank]) * self.dtype.itemsize
            for rank, (out, home) in enumerate(zip(held, owned, strict=True))
        )


@dataclass
class Planner:
    """Deals matrices of one process group to owners, largest first to the least loaded, over all calls of ``plan``."""

    ranks: int
    bucket_bytes: int
    _loads: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self._loads = [(0, rank) for rank in range(self.ranks)]

    def plan(self, cargo: Sequence[Cargo], dtype: torch.dtype) -> list[Bucket]:
        """Buckets of at most ``bucket_bytes`` of one rank's shards, but at least one matrix.

        Matrices are ordered by their work, so equal shapes meet in a bucket and each bucket by itself is balanced.
        """
        buckets: list[Bucket] = []
        open_cargo: list[tuple[int, Cargo]] = []
        filled = 0
        for item in sorted(cargo, key=lambda c: (-c.flops, c.index)):
            size = max(map(item.elements, range(self.ranks))) * dtype.itemsize
            if open_cargo and filled + size > self.bucket_bytes:
                buckets.append(self._close(open_cargo, dtype))
                open_cargo, filled = [], 0
            load, owner = heapq.heappop(self._loads)
            heapq.heappush(self._loads, (load + item.flops, owner))
            open_cargo.append((owner, item))
            filled += size
        if open_cargo:
            buckets.append(self._close(open_cargo, dtype))
        return buckets

    def _close(self, dealt: list[tuple[int, Cargo]], dtype: torch.dtype) -> Bucket:
        dealt = sorted(dealt, key=lambda pair: (pair[0], pair[1].index))
        return Bucket(tuple(c for _, c in dealt), tuple(owner for owner, _ in dealt), dtype, self.ranks)
