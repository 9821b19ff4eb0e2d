"""Divides the parameters of all groups into jobs: lists of local shards that are updated, and may travel, together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..sharding.layout import Layout, layout_of, local
from ..sharding.plan import Bucket, Cargo, Planner, require_equal
from .algorithm import ALGORITHMS
from .directions import wire_dtype
from .options import check_grid

Member = tuple[Tensor, Layout | None]


@dataclass(frozen=True)
class Job:
    """Parameters of one group, one dtype and one device that are updated together, bounded in size.

    ``bucket`` says how they travel on a refresh; None if none of their matrices ever has to. ``layouts`` is empty for
    an elementwise algorithm.
    """

    group: int
    params: list[Tensor] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    bucket: Bucket | None = None


def label(where: str, group: Mapping[str, Any], i: int) -> str:
    """How errors name the i-th parameter of a group: by name or number, shape and placements."""
    name = repr(group["param_names"][i]) if "param_names" in group else f"number {i}"
    p = group["params"][i]
    placed = f", placements {tuple(p.placements)}" if isinstance(p, DTensor) else ""
    return f"{where}, parameter {name} of shape {tuple(p.shape)}{placed}"


def divide(groups: Sequence[Mapping[str, Any]], bucket_bytes: int, max_in_flight: int) -> list[Job]:
    """The jobs of all trainable parameters. Collective over the meshes of the parameters: ranks compare their groups.

    Raises:
        ValueError: for layouts that are not supported and, on every rank, if the ranks' groups differ.
    """
    planners: dict[dist.ProcessGroup, Planner] = {}
    jobs: list[Job] = []
    for number, group in enumerate(groups):
        for (process_group, dtype, _), members in _by_kind(number, group).items():
            if process_group is None:
                jobs += _local_jobs(number, members, bucket_bytes)
                continue
            if process_group not in planners:
                planners[process_group] = Planner(dist.get_world_size(process_group), bucket_bytes)
            cargo = [Cargo(i, layout.shape, layout.rows) for i, (_, layout) in enumerate(members)]
            for bucket in planners[process_group].plan(cargo, wire_dtype(group, dtype)):
                params, layouts = zip(*(members[c.index] for c in bucket.cargo), strict=True)
                jobs.append(Job(number, list(params), list(layouts), bucket))
    lines = [f"bucket_bytes {bucket_bytes}, max_in_flight {max_in_flight}", *_describe(groups)]
    for process_group in _process_groups(groups):
        require_equal(lines, process_group)
    return jobs


def _by_kind(number: int, group: Mapping[str, Any]) -> dict[Any, list[Member]]:
    """Trainable parameters by (process group that they travel in or None, dtype, device)."""
    algorithm = ALGORITHMS[group["algorithm"]]
    kinds: dict[Any, list[Member]] = defaultdict(list)
    for i, p in enumerate(group["params"]):
        if not p.requires_grad:
            continue
        layout, travels = None, False
        if algorithm.elementwise is None:
            name = label(f"group {number}", group, i)
            layout = layout_of(p, name)
            check_grid(group.get("block_grid"), layout, name)
            travels = layout.is_cut and algorithm.can_refresh
        kinds[layout.group if travels else None, p.dtype, p.device].append((p, layout))
    return kinds


def _local_jobs(number: int, members: list[Member], bucket_bytes: int) -> list[Job]:
    jobs: list[Job] = []
    filled = 0
    for p, layout in members:
        size = local(p.detach()).nbytes
        if not jobs or filled + size > bucket_bytes:
            jobs.append(Job(number))
            filled = 0
        jobs[-1].params.append(p)
        if layout is not None:
            jobs[-1].layouts.append(layout)
        filled += size
    return jobs


def _describe(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """What all ranks have to agree about, an entry a group and a parameter."""
    lines = []
    for number, group in enumerate(groups):
        where = f"group {number}"
        settings = {k: group[k] for k in ALGORITHMS[group["algorithm"]].options if k not in ("lr", "weight_decay")}
        lines.append(f"{where}: algorithm {group['algorithm']}, step {group['step']}, {settings}")
        for i, p in enumerate(group["params"]):
            lines.append(f"{label(where, group, i)}, {p.dtype}" + ("" if p.requires_grad else ", frozen"))
    return lines


def _process_groups(groups: Sequence[Mapping[str, Any]]) -> list[dist.ProcessGroup]:
    found: dict[dist.ProcessGroup, None] = {}
    for group in groups:
        for p in group["params"]:
            if isinstance(p, DTensor):
                found |= dict.fromkeys(p.device_mesh.get_all_groups())
    return list(found)
