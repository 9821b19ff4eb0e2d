"""Divides the parameters of all groups into jobs: lists of local shards that are updated, and may travel, together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..sharding.layout import Layout, layout_of, local
from ..sharding.plan import Bucket, Cargo, Planner
from .algorithm import ALGORITHMS
from .directions import iteration_dtype, wire_dtype
from .options import check_grid

Member = tuple[Tensor, str, Layout | None]


@dataclass(frozen=True)
class Job:
    """Parameters of one group, one dtype and one device that are updated together, bounded in size.

    ``bucket`` says how they travel on a refresh; None if none of their matrices ever has to. ``layouts`` is empty for
    an elementwise algorithm. ``labels`` name the parameters in errors.
    """

    group: int
    params: list[Tensor] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    bucket: Bucket | None = None

    @property
    def device(self) -> torch.device:
        """Where the parameters lie."""
        return self.params[0].device


def label(where: str, group: Mapping[str, Any], i: int) -> str:
    """How errors name the i-th parameter of a group: by name or number, shape and placements."""
    name = repr(group["param_names"][i]) if "param_names" in group else f"number {i}"
    p = group["params"][i]
    placed = f", placements {tuple(p.placements)}" if isinstance(p, DTensor) else ""
    return f"{where}, parameter {name} of shape {tuple(p.shape)}{placed}"


def divide(groups: Sequence[Mapping[str, Any]], bucket_bytes: int) -> list[Job]:
    """The jobs of all trainable parameters.

    Raises:
        ValueError: for layouts that are not supported, of frozen parameters as well.
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
            cargo = [Cargo(i, layout.shape, layout.rows) for i, (_, _, layout) in enumerate(members)]
            for bucket in planners[process_group].plan(cargo, wire_dtype(group, dtype)):
                params, labels, layouts = zip(*(members[c.index] for c in bucket.cargo), strict=True)
                jobs.append(Job(number, list(params), list(labels), list(layouts), bucket))
    return jobs


def describe(groups: Sequence[Mapping[str, Any]], bucket_bytes: int, max_in_flight: int) -> list[str]:
    """What all ranks have to agree about, an entry for each group and parameter."""
    lines = [f"bucket_bytes {bucket_bytes}, max_in_flight {max_in_flight}"]
    for number, group in enumerate(groups):
        where, algorithm = f"group {number}", ALGORITHMS[group["algorithm"]]
        settings = {k: group[k] for k in algorithm.options if k not in ("lr", "weight_decay")}
        lines.append(f"{where}: algorithm {group['algorithm']}, step {group['step']}, {settings}")
        if algorithm.elementwise is None:
            lines[-1] += f"; set ns_dtype if hardware differs: {_iterations(group)}"
        for i, p in enumerate(group["params"]):
            lines.append(f"{label(where, group, i)}, {p.dtype}" + ("" if p.requires_grad else ", frozen"))
    return lines


def _iterations(group: Mapping[str, Any]) -> str:
    """In which dtype a group iterates on this rank: its hardware has a say if ``ns_dtype`` is None."""
    kinds = dict.fromkeys((p.dtype, p.device) for p in group["params"])
    chosen = {f"{dtype} on {device.type}": iteration_dtype(group, dtype, device) for dtype, device in kinds}
    return ", ".join(f"{kind} iterates in {dtype}" for kind, dtype in chosen.items())


def _by_kind(number: int, group: Mapping[str, Any]) -> dict[Any, list[Member]]:
    """Trainable parameters by (process group that they travel in or None, dtype, device)."""
    algorithm = ALGORITHMS[group["algorithm"]]
    kinds: dict[Any, list[Member]] = defaultdict(list)
    for i, p in enumerate(group["params"]):
        name = label(f"group {number}", group, i)
        layout, travels = None, False
        if algorithm.elementwise is None:
            layout = layout_of(p, name)
            check_grid(group.get("block_grid"), layout, name)
            travels = layout.is_cut and algorithm.can_refresh
        if p.requires_grad:
            kinds[layout.group if travels else None, p.dtype, p.device].append((p, name, layout))
    return kinds


def _local_jobs(number: int, members: list[Member], bucket_bytes: int) -> list[Job]:
    jobs: list[Job] = []
    filled = 0
    for p, name, layout in members:
        size = local(p.detach()).nbytes
        if not jobs or filled + size > bucket_bytes:
            jobs.append(Job(number))
            filled = 0
        jobs[-1].params.append(p)
        jobs[-1].labels.append(name)
        if layout is not None:
            jobs[-1].layouts.append(layout)
        filled += size
    return jobs
