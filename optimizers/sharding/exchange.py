"""Executes a plan: packed all-to-all of shards to the owners, Newton–Schulz there, packed all-to-all back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .matrices import Rect
from .plan import Bucket, Cargo

Item = TypeVar("Item")
Out = TypeVar("Out")
Home = TypeVar("Home")


@dataclass
class Trip:
    """One bucket on its way. Both buffers live until the collective that uses them is complete.

    ``work`` is None on the way out if the owners hold their matrices whole: ``received`` is ``sent`` then.
    """

    bucket: Bucket
    rank: int
    group: dist.ProcessGroup
    sent: Tensor
    received: Tensor
    work: dist.Work | None


def warm_up(group: dist.ProcessGroup, device: torch.device) -> None:
    """Exchange one element with every rank, so that the communicator of the device exists before the first refresh.

    Object collectives do not do it: under ``cpu:gloo,cuda:nccl`` they run on gloo, and NCCL's lazy set-up, met in
    another order on other ranks, deadlocks.
    """
    if dist.get_backend(group) != "fake":
        sent = torch.zeros(dist.get_world_size(group), device=device)
        dist.all_to_all_single(torch.empty_like(sent), sent, group=group)


def depart(bucket: Bucket, shards: Sequence[Tensor], rank: int, group: dist.ProcessGroup) -> Trip:
    """Send this rank's shards to the owners. ``shards[i]`` [rows_i, n_i] belongs to ``bucket.cargo[i]``."""
    to_owner = list(bucket.traffic[rank])
    from_rank = [row[rank] for row in bucket.traffic]
    sent = torch.empty(sum(to_owner), dtype=bucket.dtype, device=shards[0].device)
    places = bucket.outgoing(rank)
    if places:
        targets = held([bucket.cargo[i] for i in places], rank, sent)
        torch._foreach_copy_(targets, [shards[i] for i in places])
    if not bucket.departs:
        return Trip(bucket, rank, group, sent, sent, None)
    received = torch.empty(sum(from_rank), dtype=bucket.dtype, device=shards[0].device)
    work = dist.all_to_all_single(received, sent, from_rank, to_owner, group=group, async_op=True)
    return Trip(bucket, rank, group, sent, received, work)


def turn(trip: Trip, orthogonalise: Callable[[list[Tensor]], list[Tensor]]) -> Trip:
    """Wait for the shards of the matrices that this rank owns, orthogonalise them and send the rows back."""
    if trip.work is not None:
        trip.work.wait()
    bucket, rank = trip.bucket, trip.rank
    owned = bucket.owned(rank)
    senders = [src for src in range(bucket.ranks) if bucket.sends(src, rank)]
    arrived = _inbound(owned, senders, trip.received)
    directions = orthogonalise([assemble(c, senders, parts) for c, parts in zip(owned, arrived, strict=True)])
    to_rank = [row[rank] for row in bucket.home]
    from_owner = list(bucket.home[rank])
    # Home they travel in each other's buffer, if the sizes are the same: they are unless there are replicas.
    free = [trip.sent] if trip.sent is trip.received else [trip.received, trip.sent]
    received, sent = (
        free.pop() if free and free[-1].numel() == sum(sizes) else trip.sent.new_empty(sum(sizes))
        for sizes in (from_owner, to_rank)
    )
    everyone = range(bucket.ranks)
    targets = [part for parts in _inbound(owned, everyone, sent) for part in parts]
    sources = [cut(o, c.shares[dst]) for o, c in zip(directions, owned, strict=True) for dst in everyone]
    if targets:
        torch._foreach_copy_(targets, sources)
    work = dist.all_to_all_single(received, sent, from_owner, to_rank, group=trip.group, async_op=True)
    return Trip(bucket, rank, trip.group, sent, received, work)


def land(trip: Trip) -> list[Tensor]:
    """Wait for the directions of this rank's rows: one [rows_i, n_i] for each ``bucket.cargo[i]``, in wire dtype."""
    trip.work.wait()
    return held(trip.bucket.cargo, trip.rank, trip.received)


def cut(matrix: Tensor, share: Rect) -> Tensor:
    """A rank's share of a whole matrix [m, n], a view."""
    return matrix[share.row : share.row + share.rows, share.column : share.column + share.columns]


def assemble(cargo: Cargo, ranks: Sequence[int], parts: Sequence[Tensor]) -> Tensor:
    """The whole matrix [m, n] from the shares of ranks that hold it once between them; a view if it is one's share."""
    for part in parts:
        if part.shape == cargo.shape:
            return part
    if all(cargo.shares[rank].columns == cargo.shape[1] for rank in ranks):
        pairs = sorted(zip(ranks, parts, strict=True), key=lambda pair: cargo.shares[pair[0]].row)
        return torch.cat([part for _, part in pairs])
    whole = parts[0].new_empty(cargo.shape)
    torch._foreach_copy_([cut(whole, cargo.shares[rank]) for rank in ranks], list(parts))
    return whole


def pipeline(
    items: Iterable[Item],
    depart: Callable[[Item], Out],
    turn: Callable[[Out], Home],
    land: Callable[[Home], None],
    max_in_flight: int,
    meanwhile: Callable[[], None],
) -> None:
    """Run every item through depart, turn and land, in order.

    With two in flight, item k+1 travels out and item k−1 travels home while item k is at its turn. ``meanwhile`` is
    called once, when the first items are on their way.
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
        if len(homeward) == max_in_flight:
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


def _inbound(owned: Sequence[Cargo], ranks: Sequence[int], buffer: Tensor) -> list[list[Tensor]]:
    """Views of an owner's buffer: for each owned matrix its parts by rank; the buffer is ordered by rank first."""
    if not owned:
        return []
    parts = iter(buffer.split([c.elements(rank) for rank in ranks for c in owned]))
    views: list[list[Tensor]] = [[] for _ in owned]
    for rank in ranks:
        for i, c in enumerate(owned):
            views[i].append(next(parts).view(c.shares[rank].rows, c.shares[rank].columns))
    return views
