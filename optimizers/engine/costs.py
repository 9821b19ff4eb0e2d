"""Turns jobs into a ``Plan``: what every rank computes and sends, from global facts, on whichever rank it is asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ..orthogonal.coefficients import resolve
from ..sharding.layout import Layout
from ..sharding.matrices import Rect
from ..sharding.report import Load, Placed, Plan
from .algorithm import ALGORITHMS, Algorithm
from .directions import block, block_size
from .jobs import Job


def plan_of(jobs: Sequence[Job], groups: Sequence[Mapping[str, Any]]) -> Plan:
    """The plan of all jobs of matrix algorithms."""
    loads, buckets = [], []
    ranks = {_me()}
    for job in jobs:
        group = groups[job.group]
        algorithm = ALGORITHMS[group["algorithm"]]
        if algorithm.elementwise is not None:
            continue
        iterations = len(resolve(group["ns_coefficients"], group["ns_steps"]).rows)
        members = job.team.ranks if job.team else (_me(),)
        ranks |= {*members}
        if algorithm.can_refresh and group.get("period") != float("inf"):
            loads.append(_refresh(job, members, iterations))
        if algorithm.between is not None:
            loads.append(_other(job, algorithm, group, members, iterations))
        if job.bucket is not None:
            names = tuple(label.split(", ", 1)[1].removeprefix("parameter ").split(" of ")[0] for label in job.labels)
            buckets.append(Placed(job.group, job.offset, job.bucket, members, names))
    return Plan(tuple(sorted(ranks)), tuple(loads), tuple(buckets))


def _refresh(job: Job, members: Sequence[int], iterations: int) -> Load:
    flops: Counter[int] = Counter()
    if job.bucket is not None:
        for rank, work in zip(members, job.bucket.work, strict=True):
            flops[rank] += 2 * iterations * work
        sent = Counter(dict(zip(members, job.bucket.bytes_sent, strict=True)))
        return Load(job.group, "refresh", job.offset, flops, sent)
    for layout in job.layouts:
        for rank, parts in zip(members, _parts(layout), strict=True):
            flops[rank] += sum(2 * iterations * _work(rect.rows, rect.columns) for _, rect in parts)
    return Load(job.group, "refresh", job.offset, flops, Counter())


def _other(job: Job, algorithm: Algorithm, group: Mapping[str, Any], members: Sequence[int], iterations: int) -> Load:
    flops: Counter[int] = Counter()
    sent: Counter[int] = Counter()
    for layout in job.layouts:
        for rank, parts in zip(members, _parts(layout), strict=True):
            for shape, rect in parts:
                if algorithm.between is block:
                    flops[rank] += 2 * iterations * _blocks(group["block_grid"], shape, rect)
                    continue
                flops[rank] += 3 * rect.rows * rect.columns
                for axis in layout.column_groups:
                    n = dist.get_world_size(axis)
                    sent[rank] += 2 * 8 * rect.rows * (n - 1) // n
    return Load(job.group, "other", job.offset, flops, sent)


def _parts(layout: Layout) -> list[list[tuple[tuple[int, int], Rect]]]:
    """For every rank of the team, the matrices that it holds a part of, and the part."""
    found = [[(matrix.shape, matrix.within(region)[0]) for matrix in layout.matrices] for region in layout.regions]
    return [[(shape, rect) for shape, rect in parts if rect.rows * rect.columns] for parts in found]


def _blocks(grid: Any, shape: tuple[int, int], rect: Rect) -> int:
    height, width = block_size(grid, shape, (rect.rows, rect.columns))
    return sum(
        _work(min(height, rect.rows - row), min(width, rect.columns - column))
        for row in range(0, rect.rows, height)
        for column in range(0, rect.columns, width)
    )


def _work(m: int, n: int) -> int:
    s, long = sorted((m, n))
    return 2 * s * s * long + s**3


def _me() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
