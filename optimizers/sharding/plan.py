"""Who orthogonalises which matrix, and what travels in which bucket: frozen data, equal on all ranks, built once.

A matrix cut over N ranks travels to one owner, is orthogonalised there once, and its rows travel back. Rank r sends
its rows of every matrix to the owner and gets the same number of elements back, so a balanced refresh of E elements
sends 2·b·E·(N−1)/N² bytes a rank (b bytes an element). With R replicas of N shards, all R·N ranks are owners; a matrix
comes from the replica of its owner and goes home to all of them. One that ranks hold whole is owned by one of those, so
that it travels home only, to the other replicas: b·E·(R−1)/R bytes from a rank that holds E elements.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import add, itemgetter
from typing import Literal, get_args

import torch

from .matrices import Rect

BucketBytes = int | Literal["auto"]
Exchange = Literal["owner", "gather"]
EXCHANGES: tuple[str, ...] = get_args(Exchange)
BUCKET_BYTES = 64 * 2**20
SMALLEST_BUCKET = 2**20
"""Below that, latency costs more than overlap gains."""


@dataclass(frozen=True)
class Cargo:
    """One m×n matrix of which rank r holds ``shares[r]``. ``index`` is its place in the caller's list.

    Numbers among the shares are so many whole rows, following those of the rank before.
    """

    index: int
    shape: tuple[int, int]
    shares: Sequence[Rect | int]

    def __post_init__(self) -> None:
        row, shares = 0, []
        for share in self.shares:
            shares.append(Rect(row, share, 0, self.shape[1]) if isinstance(share, int) else share)
            row += shares[-1].rows
        object.__setattr__(self, "shares", tuple(shares))

    @property
    def flops(self) -> int:
        """Newton–Schulz work up to a constant: 2s²l + s³ for sides s ≤ l."""
        s, long = sorted(self.shape)
        return 2 * s * s * long + s**3

    def elements(self, rank: int) -> int:
        """Elements of the matrix that a rank holds."""
        return self.sizes[rank]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """``elements`` of every rank."""
        return tuple(share.rows * share.columns for share in self.shares)

    @cached_property
    def owners(self) -> Sequence[int]:
        """Ranks that may own it: those that hold it whole, else all."""
        whole = math.prod(self.shape)
        return [rank for rank, size in enumerate(self.sizes) if size == whole] or range(len(self.sizes))


@dataclass(frozen=True)
class Bucket:
    """Matrices that travel together. ``owners[i]`` orthogonalises ``cargo[i]``; cargo is ordered by owner."""

    cargo: tuple[Cargo, ...]
    owners: tuple[int, ...]
    dtype: torch.dtype
    ranks: int
    replicas: tuple[int, ...]

    @cached_property
    def traffic(self) -> tuple[tuple[int, ...], ...]:
        """``traffic[src][owner]``: elements of src's shards that the owner gets."""
        ranks = range(self.ranks)
        return tuple(tuple(self.home[src][o] if self.sends(src, o) else 0 for o in ranks) for src in ranks)

    @cached_property
    def home(self) -> tuple[tuple[int, ...], ...]:
        """``home[rank][owner]``: elements that the owner sends to a rank, which are all that the rank holds."""
        table = [[0] * self.ranks for _ in range(self.ranks)]
        for cargo, owner in zip(self.cargo, self.owners, strict=True):
            for rank in range(self.ranks):
                table[rank][owner] += cargo.elements(rank)
        return tuple(map(tuple, table))

    @cached_property
    def departs(self) -> bool:
        """Whether anything travels to owners: not if each holds its matrices whole."""
        return any(size for src, row in enumerate(self.traffic) for owner, size in enumerate(row) if src != owner)

    def sends(self, src: int, owner: int) -> bool:
        """Whether an owner gets its matrices from src: from the ranks of its own replica."""
        return self.replicas[src] == self.replicas[owner]

    def owned(self, rank: int) -> list[Cargo]:
        """The matrices that a rank orthogonalises, in the order of the bucket."""
        return [c for c, owner in zip(self.cargo, self.owners, strict=True) if owner == rank]

    def outgoing(self, rank: int) -> list[int]:
        """Places in the bucket of the matrices that a rank sends its part of."""
        return [i for i, owner in enumerate(self.owners) if self.sends(rank, owner)]

    @cached_property
    def bytes_sent(self) -> tuple[int, ...]:
        """Bytes that each rank puts on the wire in one refresh: out to the owners and home from it."""
        owned = list(map(sum, zip(*self.home, strict=True)))
        return tuple(
            (sum(self.traffic[rank]) - self.traffic[rank][rank] + owned[rank] - self.home[rank][rank])
            * self.dtype.itemsize
            for rank in range(self.ranks)
        )

    @cached_property
    def work(self) -> tuple[int, ...]:
        """``Cargo.flops`` of the matrices that each rank orthogonalises."""
        done = Counter()
        for cargo, owner in zip(self.cargo, self.owners, strict=True):
            done[owner] += cargo.flops
        return tuple(done[rank] for rank in range(self.ranks))


@dataclass(frozen=True)
class GatherBucket:
    """Matrices whose shares every rank gathers."""

    cargo: tuple[Cargo, ...]
    dtype: torch.dtype
    ranks: int

    @cached_property
    def padded(self) -> int:
        """Elements that each rank sends: as many as the rank with most of them holds, and at least one."""
        return max(1, *(sum(c.elements(rank) for c in self.cargo) for rank in range(self.ranks)))

    @cached_property
    def bytes_sent(self) -> tuple[int, ...]:
        """Bytes that each rank puts on the wire in one refresh, by the ring model."""
        return ((self.ranks - 1) * self.padded * self.dtype.itemsize,) * self.ranks

    @cached_property
    def work(self) -> tuple[int, ...]:
        """``Cargo.flops`` of the matrices that each rank orthogonalises: all of them."""
        return (sum(c.flops for c in self.cargo),) * self.ranks


AnyBucket = Bucket | GatherBucket


@dataclass
class Planner:
    """Deals matrices of one team to owners, largest first to the least loaded, and packs them into buckets.

    Those that few ranks may own go before the others, which then level the loads.
    """

    ranks: int
    bucket_bytes: BucketBytes
    replicas: tuple[int, ...] = ()
    exchange: Exchange = "owner"

    def __post_init__(self) -> None:
        self.replicas = self.replicas or (0,) * self.ranks

    def plan(self, cargo: Sequence[Cargo], dtype: torch.dtype) -> list[AnyBucket]:
        """Buckets of at most ``bucket_bytes`` of one rank's shards, but at least one matrix.

        Matrices are ordered by their work, so equal shapes meet in a bucket, and by when their owners come to them, so
        each bucket by itself is balanced.
        """
        return self.plan_all([(cargo, dtype)])[0]

    def plan_all(self, loads: Sequence[tuple[Sequence[Cargo], torch.dtype]]) -> list[list[AnyBucket]]:
        """Buckets for each list, which share none; owners are dealt over all of them at once."""
        limit = self._limit(loads)
        everything = [(item, number) for number, (cargo, _) in enumerate(loads) for item in cargo]
        everything.sort(key=lambda pair: (len(pair[0].owners), -pair[0].flops, pair[1], pair[0].index))
        busy = [0] * self.ranks
        dealt: list[list[tuple[int, int, Cargo]]] = [[] for _ in loads]
        for item, number in everything:
            owner = min(item.owners, key=busy.__getitem__)
            dealt[number].append((busy[owner], owner, item))
            busy[owner] += item.flops
        for part in dealt:
            part.sort(key=itemgetter(0))
        in_turn = [[(owner, item) for _, owner, item in part] for part in dealt]
        return [self._pack(part, dtype, limit) for part, (_, dtype) in zip(in_turn, loads, strict=True)]

    def _limit(self, loads: Sequence[tuple[Sequence[Cargo], torch.dtype]]) -> int:
        """Auto: 64 MiB at most, and at least four buckets, so that they overlap, unless these would be tiny."""
        if self.bucket_bytes != "auto":
            return self.bucket_bytes
        held = (map(sum, zip(*(item.sizes for item in cargo), strict=True)) for cargo, _ in loads)
        total = sum(max(sizes, default=0) * dtype.itemsize for sizes, (_, dtype) in zip(held, loads, strict=True))
        return min(BUCKET_BYTES, max(SMALLEST_BUCKET, math.ceil(total / 4)))

    def _pack(self, dealt: list[tuple[int, Cargo]], dtype: torch.dtype, limit: int) -> list[AnyBucket]:
        buckets: list[AnyBucket] = []
        waiting: list[tuple[int, Cargo]] = []
        filled: Sequence[int] = (0,) * self.ranks
        for owner, item in dealt:
            with_it = list(map(add, filled, item.sizes))
            if waiting and max(with_it) * dtype.itemsize > limit:
                buckets.append(self._close(waiting, dtype))
                waiting, with_it = [], item.sizes
            waiting.append((owner, item))
            filled = with_it
        return [*buckets, self._close(waiting, dtype)] if waiting else buckets

    def _close(self, dealt: list[tuple[int, Cargo]], dtype: torch.dtype) -> AnyBucket:
        if self.exchange == "gather":
            return GatherBucket(tuple(c for _, c in dealt), dtype, self.ranks)
        dealt = sorted(dealt, key=lambda pair: (pair[0], pair[1].index))
        owners = tuple(owner for owner, _ in dealt)
        return Bucket(tuple(c for _, c in dealt), owners, dtype, self.ranks, self.replicas)
