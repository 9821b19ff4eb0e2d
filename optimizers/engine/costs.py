"""Turns jobs into a ``Plan``: what every rank computes and sends, from global facts, on whichever rank it is asked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from ..orthogonal.coefficients import resolve
from ..orthogonal.newton_schulz import flops
from ..sharding.layout import Layout
from ..sharding.matrices import Rect
from ..sharding.report import Load, Placed, Plan
from .algorithm import ALGORITHMS, Algorithm
from .directions import block, block_size, wire_dtype
from .jobs import Job

Cost = Callable[[int, int], int]
"""FLOPs that orthogonalise an m×n matrix."""


def plan_of(jobs: Sequence[Job], groups: Sequence[Mapping[str, Any]]) -> Plan:
    """The plan of all jobs of matrix algorithms."""
    loads, buckets = [], []
    ranks = {_me()}
    for job in jobs:
        group = groups[job.group]
        algorithm = ALGORITHMS[group["algorithm"]]
        if algorithm.elementwise is not None:
            continue
        cost = partial(flops, resolve(group["ns_coefficients"], group["ns_steps"]))
        members = _members(job.layouts[0])
        ranks |= {rank for layout in job.layouts for rank in _members(layout)}
        if algorithm.can_refresh and group.get("period") != float("inf"):
            loads.append(_refresh(job, members, cost))
        if algorithm.has_other_steps:
            loads.append(_other(job, algorithm, group, cost))
        if job.bucket is not None:
            names = tuple(label.split(", ", 1)[1].removeprefix("parameter ").split(" of ")[0] for label in job.labels)
            buckets.append(Placed(job.group, job.offset, job.bucket, members, names))
    lines = tuple(f"group {number}: {mode(group)}" for number, group in enumerate(groups))
    return Plan(tuple(sorted(ranks)), tuple(loads), tuple(buckets), lines)


def mode(group: Mapping[str, Any]) -> str:
    """What a group does, and when, in a line."""
    algorithm, said = ALGORITHMS[group["algorithm"]], [group["algorithm"]]
    if algorithm.elementwise is not None:
        return f"{algorithm.name}; elementwise"
    period = group.get("period", algorithm.period)
    cheap = "block steps" if algorithm.between is block else "row steps"
    if period == math.inf:
        said.append(f"period inf ({cheap} only)")
    else:
        said.append("period 1 (exact: whole matrices in every step)")
        if period > 1:
            said[-1] = f"period {period} (whole matrices every {period} steps, {cheap} between)"
        if "period" in group:
            said[-1] += f", phase {group['phase']}" + (", staggered over the period" if group["stagger"] else "")
        kinds = dict.fromkeys(str(wire_dtype(group, p.dtype)).removeprefix("torch.") for p in group["params"])
        said.append(f"wire dtype {', '.join(kinds)}")
        said.append(f"exchange {group['exchange']}")
    if "block_grid" in group:
        said.append(f"blocks {_grid(group['block_grid'])}")
    return "; ".join(said)


def _grid(grid: Any) -> str:
    if grid is None:
        return "are the shards"
    rows, columns = grid if isinstance(grid, tuple) else (grid, 1)
    return f"{rows} × {columns} a matrix"


def _refresh(job: Job, members: Sequence[int], cost: Cost) -> Load:
    done: Counter[int] = Counter()
    if job.bucket is not None:
        for place, rank in enumerate(members):
            done[rank] += sum(cost(*cargo.shape) for cargo in job.bucket.owned(place))
        sent = Counter(dict(zip(members, job.bucket.bytes_sent, strict=True)))
        return Load(job.group, "refresh", job.offset, done, sent)
    for layout in job.layouts:
        for rank, parts in zip(_members(layout), _parts(layout), strict=True):
            done[rank] += sum(cost(rect.rows, rect.columns) for _, rect in parts)
    return Load(job.group, "refresh", job.offset, done, Counter())


def _members(layout: Layout) -> tuple[int, ...]:
    """Ranks by the places of a layout's regions; jobs that stay may hold layouts of several meshes."""
    return layout.team.ranks if layout.team else (_me(),)


def _other(job: Job, algorithm: Algorithm, group: Mapping[str, Any], cost: Cost) -> Load:
    done: Counter[int] = Counter()
    sent: Counter[int] = Counter()
    for layout in job.layouts:
        for rank, parts in zip(_members(layout), _parts(layout), strict=True):
            for shape, rect in parts:
                if algorithm.between is block:
                    done[rank] += _blocks(group["block_grid"], shape, rect, cost)
                    continue
                done[rank] += 3 * rect.rows * rect.columns
                for axis in layout.column_groups:
                    n = dist.get_world_size(axis)
                    sent[rank] += 2 * 8 * rect.rows * (n - 1) // n
    return Load(job.group, "other", job.offset, done, sent)


def _parts(layout: Layout) -> list[list[tuple[tuple[int, int], Rect]]]:
    """For every rank of the team, the matrices that it holds a part of, and the part."""
    found = [[(matrix.shape, matrix.within(region)[0]) for matrix in layout.matrices] for region in layout.regions]
    return [[(shape, rect) for shape, rect in parts if rect.rows * rect.columns] for parts in found]


def _blocks(grid: Any, shape: tuple[int, int], rect: Rect, cost: Cost) -> int:
    height, width = block_size(grid, shape, (rect.rows, rect.columns))
    return sum(
        cost(min(height, rect.rows - row), min(width, rect.columns - column))
        for row in range(0, rect.rows, height)
        for column in range(0, rect.columns, width)
    )


def _me() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
