"""The published form of a refresh: every rank gathers whole matrices and orthogonalises its own copy of each.

It sends b·E·(N−1)/N bytes a rank for E elements over N ranks, N/2 times what owners send, and repeats the work N times;
the directions need not travel home. Shares are padded to the largest rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import assemble, cut, held
from .plan import GatherBucket

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.14


@dataclass
class Gathering:
    """One bucket on its way, later the directions of this rank. Both buffers live until the collective is complete."""

    bucket: GatherBucket
    rank: int
    sent: Tensor
    received: Tensor
    work: dist.Work
    directions: list[Tensor]


def depart(bucket: GatherBucket, shards: Sequence[Tensor], rank: int, group: dist.ProcessGroup) -> Gathering:
    """Send this rank's shards to all. ``shards[i]`` [rows_i, n_i] belongs to ``bucket.cargo[i]``."""
    sent = torch.zeros(bucket.padded, dtype=bucket.dtype, device=shards[0].device)
    received = torch.empty(bucket.ranks * bucket.padded, dtype=bucket.dtype, device=shards[0].device)
    torch._foreach_copy_(held(bucket.cargo, rank, sent), list(shards))
    work = _all_gather(received, sent, group=group, async_op=True)
    return Gathering(bucket, rank, sent, received, work, [])


def turn(trip: Gathering, orthogonalise: Callable[[list[Tensor]], list[Tensor]]) -> Gathering:
    """Wait for the shards of all ranks, orthogonalise every matrix and keep this rank's part of the directions."""
    trip.work.wait()
    bucket = trip.bucket
    shares = [held(bucket.cargo, rank, part) for rank, part in enumerate(trip.received.split(bucket.padded))]
    ranks = range(bucket.ranks)
    whole = [assemble(c, ranks, parts) for c, parts in zip(bucket.cargo, zip(*shares, strict=True), strict=True)]
    wire = [cut(o, c.shares[trip.rank]) for o, c in zip(orthogonalise(whole), bucket.cargo, strict=True)]
    # Rounded as those that owners send are, so that all forms compute the same.
    trip.directions = [part.to(bucket.dtype, copy=True) for part in wire]
    return trip


def land(trip: Gathering) -> list[Tensor]:
    """The directions of this rank's rows: one [rows_i, n_i] for each ``bucket.cargo[i]``, in wire dtype."""
    return trip.directions
