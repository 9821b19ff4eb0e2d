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
        if len(set(self.replicas)) == 1:
            return self.home
        ranks = range(self.ranks)
        return tuple(tuple(self.home[src][o] if self.sends(src, o) else 0 for o in ranks) for src in ranks)

    @cached_property
    def home(self) -> tuple[tuple[int, ...], ...]:
        """``home[rank][owner]``: elements that the owner sends to a rank, which are all that the rank holds."""
        table = [[0] * self.ranks for _ in range(self.ranks)]
        for cargo, owner in zip(self.cargo, self.owners, strict=True):
            for row, size in zip(table, cargo.sizes, strict=True):
                row[owner] += size
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
    def share_bytes(self) -> int:
        """Bytes that the busiest rank gets home as its shards, or sends home as an owner."""
        owned = map(sum, zip(*self.home, strict=True))
        return max(*map(sum, self.home), *owned) * self.dtype.itemsize

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

    def owned(self, rank: int) -> list[Cargo]:
        """The matrices that a rank orthogonalises: all."""
        return list(self.cargo)

    @property
    def share_bytes(self) -> int:
        """Bytes that each rank sends."""
        return self.padded * self.dtype.itemsize

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
        """Buckets of at most ``bucket_bytes`` of all ranks' shards together, but at least one matrix.

        With N shards of a matrix, no rank holds more than a share of bucket_bytes / N of a bucket, nor owns more,
        unless by a single matrix. Matrices are ordered by their work, so equal shapes meet in a bucket, and by when
        their owners come to them, so each bucket by itself is balanced if it has room for a matrix a rank.
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
        """Bytes of a whole bucket.

        Auto, for the share of one rank: a quarter of all, so that buckets overlap, but no less than the largest matrix
        of every replica, so that every owner has work in every bucket, nor than what latency would eat up; 64 MiB at
        most.
        """
        if self.bucket_bytes != "auto":
            return self.bucket_bytes
        held, largest = [0] * self.ranks, 0
        for cargo, dtype in loads:
            for item in cargo:
                largest = max(largest, math.prod(item.shape) * dtype.itemsize)
                held = [bytes_ + size * dtype.itemsize for bytes_, size in zip(held, item.sizes, strict=True)]
        copies = 0 if self.exchange == "gather" else len(set(self.replicas))
        share = min(BUCKET_BYTES, max(SMALLEST_BUCKET, math.ceil(max(held) / 4), copies * largest))
        return share * self._shards

    @property
    def _shards(self) -> int:
        """How many ranks hold a matrix once between them."""
        return self.ranks // len(set(self.replicas))

    def _pack(self, dealt: list[tuple[int, Cargo]], dtype: torch.dtype, limit: int) -> list[AnyBucket]:
        buckets: list[AnyBucket] = []
        waiting: list[tuple[int, Cargo]] = []
        held, owned = [0] * self.ranks, Counter[int]()
        for owner, item in dealt:
            sizes = [size * dtype.itemsize for size in item.sizes]
            now, home = list(map(add, held, sizes)), owned[owner] + sum(sizes)
            full = max(now) * self._shards > limit or (owned[owner] > 0 and home * self._shards > limit)
            if waiting and full:
                buckets.append(self._close(waiting, dtype))
                waiting, owned, now, home = [], Counter[int](), sizes, sum(sizes)
            waiting.append((owner, item))
            held, owned[owner] = now, home
        return [*buckets, self._close(waiting, dtype)] if waiting else buckets

    def _close(self, dealt: list[tuple[int, Cargo]], dtype: torch.dtype) -> AnyBucket:
        if self.exchange == "gather":
            return GatherBucket(tuple(c for _, c in dealt), dtype, self.ranks)
        dealt = sorted(dealt, key=lambda pair: (pair[0], pair[1].index))
        owners = tuple(owner for owner, _ in dealt)
        return Bucket(tuple(c for _, c in dealt), owners, dtype, self.ranks, self.replicas)
