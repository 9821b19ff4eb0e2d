"""Executes a plan: packed all-to-all of shards to the owners, Newton–Schulz there, packed all-to-all back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..orthogonal.pieces import Part, Pieces
from .plan import Bucket, Cargo

Item = TypeVar("Item")
Out = TypeVar("Out")
Home = TypeVar("Home")

Write = Callable[[list[Tensor | None]], None]
"""Fills tensors [rows_i, n_i] with this rank's part of each matrix of a bucket; a None is not wanted."""

Orthogonalise = Callable[[list[Pieces], int], None]
"""(matrices, bytes of a stack): orthogonalises matrices where they lie."""


@dataclass
class Trip:
    """One bucket on its way. Both buffers live until the collective that uses them is complete.

    ``work`` is None on the way out if the owners hold their matrices whole: ``received`` is ``sent`` then.
    """

    bucket: Bucket
    rank: int
    group: dist.ProcessGroup
    sent: Tensor | None
    received: Tensor | None
    work: dist.Work | None

    def arrive(self) -> Tensor:
        """Wait, and return what was received. All else is let go, at once: the work, too, holds both buffers."""
        if self.work is not None:
            self.work.wait()
        received = self.received
        self.work = self.sent = self.received = None
        return received


def warm_up(group: dist.ProcessGroup, device: torch.device) -> None:
    """Exchange one element with every rank, so that the communicator of the device exists before the first refresh.

    Object collectives do not do it: under ``cpu:gloo,cuda:nccl`` they run on gloo, and NCCL's lazy set-up, met in
    another order on other ranks, deadlocks.
    """
    if dist.get_backend(group) != "fake":
        sent = torch.zeros(dist.get_world_size(group), device=device)
        dist.all_to_all_single(torch.empty_like(sent), sent, group=group)


def depart(bucket: Bucket, write: Write, rank: int, group: dist.ProcessGroup, device: torch.device) -> Trip:
    """Send this rank's shards to the owners. ``write`` forms them where they leave, in the order of the cargo."""
    to_owner = list(bucket.traffic[rank])
    from_rank = [row[rank] for row in bucket.traffic]
    sent = torch.empty(sum(to_owner), dtype=bucket.dtype, device=device)
    places = bucket.outgoing(rank)
    parts = dict(zip(places, held([bucket.cargo[i] for i in places], rank, sent), strict=True))
    write([parts.get(i) for i in range(len(bucket.cargo))])
    if not bucket.departs:
        return Trip(bucket, rank, group, sent, sent, None)
    received = torch.empty(sum(from_rank), dtype=bucket.dtype, device=device)
    work = dist.all_to_all_single(received, sent, from_rank, to_owner, group=group, async_op=True)
    return Trip(bucket, rank, group, sent, received, work)


def turn(trip: Trip, orthogonalise: Orthogonalise) -> Trip:
    """Wait for the shards of the matrices that this rank owns, orthogonalise them and send the rows back."""
    bucket, rank, arrived = trip.bucket, trip.rank, trip.arrive()
    owned = bucket.owned(rank)
    senders = [src for src in range(bucket.ranks) if bucket.sends(src, rank)]
    to_rank = [row[rank] for row in bucket.home]
    from_owner = list(bucket.home[rank])
    # Without replicas each row goes back to where it came from, so directions take the place of what arrived.
    sent = arrived if len(senders) == bucket.ranks else arrived.new_empty(sum(to_rank))
    parts = zip(owned, inbound(owned, senders, arrived), inbound(owned, range(bucket.ranks), sent), strict=True)
    orthogonalise([Pieces(c.shape, read, written) for c, read, written in parts], bucket.share_bytes)
    del arrived, parts  # before more is asked for
    received = sent.new_empty(sum(from_owner))
    work = dist.all_to_all_single(received, sent, from_owner, to_rank, group=trip.group, async_op=True)
    return Trip(bucket, rank, trip.group, sent, received, work)


def land(trip: Trip) -> list[Tensor]:
    """Wait for the directions of this rank's rows: one [rows_i, n_i] for each ``bucket.cargo[i]``, in wire dtype."""
    return held(trip.bucket.cargo, trip.rank, trip.arrive())


def pipeline(
    items: Iterable[Item],
    depart: Callable[[Item], Out],
    turn: Callable[[Out], Home],
    land: Callable[[Home], None],
    max_in_flight: int,
    meanwhile: Callable[[], None],
) -> None:
    """Run every item through depart, turn and land, in order.

    With two in flight, item k+1 travels out and item k−1 travels home while item k is at its turn. More travel out, but
    only one travels home: it has the whole turn of the next for it, and what is at home needs no buffers. ``meanwhile``
    is called once, when the first items are on their way.
    """
    outward: deque[Out] = deque()
    homeward: deque[Home] = deque()
    idle = True

    def advance() -> None:
        nonlocal idle
        if idle:
            meanwhile()
            idle = False
        homeward.append(turn(outward.popleft()))
        if len(homeward) == min(2, max_in_flight):
            land(homeward.popleft())

    for item in items:
        outward.append(depart(item))
        if len(outward) == max_in_flight:
            advance()
    while outward:
        advance()
    while homeward:
        land(homeward.popleft())
    if idle:
        meanwhile()


def held(cargo: Sequence[Cargo], rank: int, buffer: Tensor) -> list[Tensor]:
    """Views of a rank's buffer: its share of each matrix, in the order of the cargo, that is by owner."""
    sizes = [c.elements(rank) for c in cargo]
    parts = buffer[: sum(sizes)].split(sizes)  # what is beyond is padding
    return [part.view(c.shares[rank].rows, c.shares[rank].columns) for part, c in zip(parts, cargo, strict=True)]


def part_of(cargo: Cargo, rank: int, entries: Tensor) -> Part:
    """A rank's part of a matrix, from its entries in a row."""
    share = cargo.shares[rank]
    return share.row, share.column, entries.view(share.rows, share.columns)


def inbound(owned: Sequence[Cargo], ranks: Sequence[int], buffer: Tensor) -> list[list[Part]]:
    """Views of an owner's buffer: for each owned matrix its parts by rank; the buffer is ordered by rank first."""
    if not owned:
        return []
    parts = iter(buffer.split([c.elements(rank) for rank in ranks for c in owned]))
    views: list[list[Part]] = [[] for _ in owned]
    for rank in ranks:
        for i, c in enumerate(owned):
            views[i].append(part_of(c, rank, next(parts)))
    return views
