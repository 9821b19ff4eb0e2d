"""The published form of a refresh: every rank gathers whole matrices and orthogonalises its own copy of each.

It sends b·E·(N−1)/N bytes a rank for E elements over N ranks, N/2 times what owners send, and repeats the work N times;
the directions need not travel home. Shares are padded to the largest rank's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..orthogonal.pieces import Pieces
from .exchange import Orthogonalise, Write, held
from .plan import GatherBucket

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.14


@dataclass
class Gathering:
    """One bucket on its way. Both buffers live until the collective is complete."""

    bucket: GatherBucket
    rank: int
    sent: Tensor
    received: Tensor
    work: dist.Work


def depart(bucket: GatherBucket, write: Write, rank: int, group: dist.ProcessGroup, device: torch.device) -> Gathering:
    """Send this rank's shards to all. ``write`` forms them where they leave, in the order of the cargo."""
    sent = torch.zeros(bucket.padded, dtype=bucket.dtype, device=device)
    received = torch.empty(bucket.ranks * bucket.padded, dtype=bucket.dtype, device=device)
    write(list(held(bucket.cargo, rank, sent)))
    work = _all_gather(received, sent, group=group, async_op=True)
    return Gathering(bucket, rank, sent, received, work)


def turn(trip: Gathering, orthogonalise: Orthogonalise) -> list[Tensor]:
    """Wait for the shards of all ranks and orthogonalise every matrix; this rank's part of the directions.

    They are rounded as those that owners send are, so that all forms compute the same.
    """
    trip.work.wait()
    bucket = trip.bucket
    directions = held(bucket.cargo, trip.rank, trip.sent)  # it has been sent: they take its place
    buffers = [held(bucket.cargo, rank, part) for rank, part in enumerate(trip.received.split(bucket.padded))]
    matrices = []
    for cargo, own, *parts in zip(bucket.cargo, directions, *buffers, strict=True):
        corners = [(share.row, share.column) for share in cargo.shares]
        read = [(*corner, part) for corner, part in zip(corners, parts, strict=True)]
        matrices.append(Pieces(cargo.shape, read, [(*corners[trip.rank], own)]))
    orthogonalise(matrices, bucket.share_bytes)
    return directions


def land(directions: list[Tensor]) -> list[Tensor]:
    """The directions of this rank's rows: one [rows_i, n_i] for each matrix of the bucket, in wire dtype."""
    return directions
