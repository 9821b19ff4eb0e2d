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
from ..sharding.layout import Layout, dividing_groups
from ..sharding.matrices import Rect
from ..sharding.report import Load, Placed, Plan
from .algorithm import ALGORITHMS, Algorithm
from .directions import block, block_size, wire_dtype
from .jobs import Job
from .narrow import count_of
from .schedule import held

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
            if sent := _clipping(job, group):
                loads.append(Load(job.group, "other", job.offset, Counter(), sent))
                ranks |= sent.keys()
            continue
        cost = _no_cost
        if "ns_coefficients" in group:
            cost = partial(flops, resolve(group["ns_coefficients"], group["ns_steps"]))
        members = _members(job.layouts[0])
        ranks |= {rank for layout in job.layouts for rank in _members(layout)}
        kinds = []
        if algorithm.can_refresh and held(group.get("period", algorithm.period), group["step"]) != math.inf:
            kinds.append(_refresh(job, group, members, cost))
        if algorithm.other_steps:
            kinds.append(_other(job, algorithm, group, cost))
        for load in kinds:
            load.bytes_sent.update(_sums(job, algorithm, group, load.kind))
        loads += kinds
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
    if algorithm.together is not None:
        return f"{algorithm.name}; {algorithm.together.name}"
    period = held(group.get("period", algorithm.period), group["step"])
    cheap = algorithm.other_steps
    if period == math.inf:
        said.append(f"period inf ({cheap} only)")
    else:
        said.append("period 1 (exact: whole matrices in every step)")
        if period > 1:
            said[-1] = f"period {period} (whole matrices every {period} steps, {cheap} between)"
        if isinstance(group.get("period"), tuple):
            said[-1] += " now, by a schedule"
        if "period" in group:
            said[-1] += f", phase {group['phase']}" + (", staggered over the period" if group["stagger"] else "")
        kinds = dict.fromkeys(str(wire_dtype(group, p.dtype)).removeprefix("torch.") for p in group["params"])
        said.append(f"wire dtype {', '.join(kinds)}")
        said.append(f"exchange {group['exchange']}")
    if "block_grid" in group:
        said.append(f"blocks {_grid(group['block_grid'])}")
    return "; ".join(said)


def _no_cost(m: int, n: int) -> int:
    return 0


def _grid(grid: Any) -> str:
    if grid is None:
        return "are the shards"
    rows, columns = grid if isinstance(grid, tuple) else (grid, 1)
    return f"{rows} × {columns} a matrix"


def _height(group: Mapping[str, Any], rows: int) -> int:
    """Rows that are orthogonalised of so many."""
    return count_of(group, rows) if "fraction" in group else rows


def _refresh(job: Job, group: Mapping[str, Any], members: Sequence[int], cost: Cost) -> Load:
    done: Counter[int] = Counter()
    bucket = job.bucket
    if bucket is not None:
        for place, rank in enumerate(members):
            done[rank] += sum(cost(*cargo.shape) for cargo in bucket.owned(place))
        sent = Counter(dict(zip(members, bucket.bytes_sent, strict=True)))
        return Load(job.group, "refresh", job.offset, done, sent)
    for layout in job.layouts:
        for rank, parts in zip(_members(layout), _parts(layout), strict=True):
            done[rank] += sum(cost(_height(group, rect.rows), rect.columns) for _, rect in parts)
    return Load(job.group, "refresh", job.offset, done, Counter())


def _members(layout: Layout) -> tuple[int, ...]:
    """Ranks by the places of a layout's regions; jobs that stay may hold layouts of several meshes."""
    return layout.team.ranks if layout.team else (_me(),)


def _other(job: Job, algorithm: Algorithm, group: Mapping[str, Any], cost: Cost) -> Load:
    done: Counter[int] = Counter()
    for layout in job.layouts:
        if algorithm.together is not None:
            for rank, region in zip(_members(layout), layout.regions, strict=True):
                parts = [(matrix.shape, matrix.within(region)[0]) for matrix in layout.matrices]
                done[rank] += sum(algorithm.together.flops(group, shape, part) for shape, part in parts)
            continue
        for rank, parts in zip(_members(layout), _parts(layout), strict=True):
            for shape, rect in parts:
                if algorithm.between is block:
                    done[rank] += _blocks(group["block_grid"], shape, rect, cost)
                    continue
                done[rank] += 3 * rect.rows * rect.columns if algorithm.unit else 0
    return Load(job.group, "other", job.offset, done, Counter())


def _sums(job: Job, algorithm: Algorithm, group: Mapping[str, Any], kind: str) -> Counter[int]:
    """Bytes that each rank sends for numbers which ranks add up (sums.py, across.py), in one kind of step."""
    found: Counter[tuple[int, int]] = Counter()

    def add(layout: Layout, axes: Sequence[dist.ProcessGroup], of_rank: Callable[[int], int], size: int = 8) -> None:
        for place, rank in enumerate(_members(layout)):
            for n in map(dist.get_world_size, axes):
                found[rank, n] += size * of_rank(place)

    unit = algorithm.unit if kind == "other" else None
    for layout in job.layouts:
        rows = [sum(matrix.within(region)[0].rows for matrix in layout.matrices) for region in layout.regions]
        count, home = len(layout.matrices), kind == "refresh" and job.bucket is not None
        neurons = home and group.get("neuron_beta2") is not None
        if algorithm.step_sizes is not None:
            add(layout, layout.groups, lambda _, count=count: count)
        if unit == "rows" or neurons:
            add(layout, layout.column_groups, rows.__getitem__)
        if algorithm.selects:
            axes = layout.groups if group["selection"] == "global" else layout.column_groups
            add(layout, axes, lambda _, numbers=count * layout.shape[0]: numbers)
        if algorithm.together is not None:
            for axes, numbers in algorithm.together.sums(group, layout, job.params[0].dtype):
                add(layout, axes, numbers.__getitem__, 1)
        if unit == "columns":
            add(layout, layout.groups, lambda _, numbers=count * layout.shape[1]: numbers)
        if unit == "matrix" or neurons:
            add(layout, layout.groups, lambda _, count=count: 2 * count)
    if group.get("mars_gamma") and group["mars_clip"] is not None:
        for p, layout in zip(job.params, job.layouts, strict=True):
            if layout.matrices[0].index == layout.matrices[0].start == 0:  # once a parameter, whatever its matrices
                add(layout, dividing_groups(p), lambda _: 1)
    return _all_reduced(found)


def _clipping(job: Job, group: Mapping[str, Any]) -> Counter[int]:
    """The same for the norms that an elementwise algorithm's gradients are clipped by."""
    found: Counter[tuple[int, int]] = Counter()
    if group.get("mars_gamma") and group["mars_clip"] is not None:
        for p in job.params:
            for n in map(dist.get_world_size, dividing_groups(p)):
                found.update({(rank, n): 8 for rank in p.device_mesh.mesh.flatten().tolist()})
    return _all_reduced(found)


def _all_reduced(sizes: Mapping[tuple[int, int], int]) -> Counter[int]:
    """Bytes that ranks send in all-reduces of so many bytes, by rank and how many ranks add them up."""
    sent: Counter[int] = Counter()
    for (rank, n), size in sizes.items():
        sent[rank] += 2 * size * (n - 1) // n
    return sent


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
