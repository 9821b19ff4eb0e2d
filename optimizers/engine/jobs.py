"""Divides the parameters of all groups into jobs: lists of local shards that are updated, and may travel, together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..sharding.layout import Layout, layout_of, local
from ..sharding.matrices import SPLIT_FORMS, MatrixSplit, is_split
from ..sharding.plan import BUCKET_BYTES, AnyBucket, BucketBytes, Cargo, Planner
from ..sharding.team import Team
from .algorithm import ALGORITHMS
from .directions import block, iteration_dtype, wire_dtype
from .forms import forms_of
from .narrow import narrowed
from .options import check_grid, check_whole_rows
from .schedule import stagger_offsets

Member = tuple[Tensor, str, Layout | None]


@dataclass(frozen=True)
class Job:
    """Parameters of one group, one dtype and one device that are updated together, bounded in size.

    ``bucket`` says how they travel on a refresh; None if none of their matrices ever has to. If it is not None, each
    entry is one matrix, so that a parameter of several has several entries. ``layouts`` is empty for an elementwise
    algorithm. ``labels`` name the parameters in errors. ``offset``: how long after the group's phase it refreshes.
    ``codes``: of state keys of 8 bits.
    """

    group: int
    params: list[Tensor] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    bucket: AnyBucket | None = None
    offset: int = 0
    codes: Mapping[str, str] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where the parameters lie."""
        return self.params[0].device

    @property
    def team(self) -> Team | None:
        """The ranks that its matrices are divided over."""
        return self.layouts[0].team if self.layouts else None

    def select(self, shards: Iterable[Tensor | None]) -> list[Tensor | None]:
        """What the entries cover of local shards, one for each: [rows, n] or [e, m, n]; untouched if elementwise."""
        if not self.layouts:
            return list(shards)
        return [s if s is None else layout.select(s) for layout, s in zip(self.layouts, shards, strict=True)]


def label(where: str, group: Mapping[str, Any], i: int) -> str:
    """How errors name the i-th parameter of a group: by name or number, shape and placements."""
    name = repr(group["param_names"][i]) if "param_names" in group else f"number {i}"
    p = group["params"][i]
    placed = f", placements {tuple(p.placements)}" if isinstance(p, DTensor) else ""
    return f"{where}, parameter {name} of shape {tuple(p.shape)}{placed}"


def divide(groups: Sequence[Mapping[str, Any]], bucket_bytes: BucketBytes, holders: Team | None = None) -> list[Job]:
    """The jobs of all trainable parameters; ``holders`` each have a copy of the plain ones.

    Raises:
        ValueError: for layouts that are not supported, of frozen parameters as well.
    """
    loads: dict[Any, list[_Load]] = defaultdict(list)
    jobs: list[Job] = []
    for number, group in enumerate(groups):
        for kind, members in _by_kind(number, group, holders).items():
            if kind.team is None:
                jobs += _local_jobs(number, members, bucket_bytes, kind.offset, _codes(group, members[0][0]))
                continue
            replicas = members[0][2].replicas
            loads[kind.team, replicas, group["exchange"], kind.offset].append(
                _Load(number, kind.offset, members, wire_dtype(group, kind.dtype), _cargo(group, members))
            )
    for (team, replicas, exchange, _), together in loads.items():
        planner = Planner(len(team.ranks), bucket_bytes, replicas, exchange)
        plans = planner.plan_all([(load.cargo, load.dtype) for load in together])
        for load, buckets in zip(together, plans, strict=True):
            for bucket in buckets:
                params, labels, layouts = zip(*(load.members[c.index] for c in bucket.cargo), strict=True)
                codes = _codes(groups[load.group], params[0])
                jobs.append(Job(load.group, list(params), list(labels), list(layouts), bucket, load.offset, codes))
    return sorted(jobs, key=lambda job: job.group)


class _Kind(NamedTuple):
    """What the members of a job have in common; ``team`` is None if they never travel."""

    team: Team | None
    replicas: tuple[int, ...]
    column_groups: tuple[dist.ProcessGroup, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int
    codes: bool


@dataclass(frozen=True)
class _Load:
    """Members of one kind that travel: their buckets are planned together with those of other groups."""

    group: int
    offset: int
    members: list[Member]
    dtype: torch.dtype
    cargo: list[Cargo]


def _cargo(group: Mapping[str, Any], members: Sequence[Member]) -> list[Cargo]:
    """The matrices; where rows are selected, as many of them in each rank's share as if all were alike."""
    whole = [Cargo(i, layout.shape, layout.shares) for i, (_, _, layout) in enumerate(members)]
    if not ALGORITHMS[group["algorithm"]].selects:
        return whole
    return [narrowed(c, group, layout) for c, (_, _, layout) in zip(whole, members, strict=True)]


def describe(
    groups: Sequence[Mapping[str, Any]], bucket_bytes: BucketBytes, max_in_flight: int, compile: bool
) -> list[str]:
    """What all ranks have to agree about, an entry for each group, option and parameter."""
    lines = [f"bucket_bytes {bucket_bytes}, max_in_flight {max_in_flight}, compile {compile}"]
    for number, group in enumerate(groups):
        where, algorithm = f"group {number}", ALGORITHMS[group["algorithm"]]
        lines.append(f"{where}: algorithm {group['algorithm']}, step {group['step']}")
        lines += [f"{where}: {key} {group[key]!r}" for key in algorithm.options if key not in ("lr", "weight_decay")]
        if "ns_dtype" in algorithm.options:
            lines.append(f"{where}: set ns_dtype if hardware differs: {_iterations(group)}")
        for i, p in enumerate(group["params"]):
            split = split_of(group, i)
            lines.append(f"{label(where, group, i)}, {p.dtype}" + ("" if p.requires_grad else ", frozen"))
            lines[-1] += "" if split is None else f", matrix_splits {split}"
    return lines


def _iterations(group: Mapping[str, Any]) -> str:
    """In which dtype a group iterates on this rank: its hardware has a say if ``ns_dtype`` is None."""
    kinds = dict.fromkeys((p.dtype, p.device) for p in group["params"])
    chosen = {f"{dtype} on {device.type}": iteration_dtype(group, dtype, device) for dtype, device in kinds}
    return ", ".join(f"{kind} iterates in {dtype}" for kind, dtype in chosen.items())


def _by_kind(number: int, group: Mapping[str, Any], holders: Team | None) -> dict[_Kind, list[Member]]:
    """Trainable parameters by kind, those that travel taken apart into their matrices."""
    algorithm = ALGORITHMS[group["algorithm"]]
    kinds: dict[_Kind, list[Member]] = defaultdict(list)
    names = [label(f"group {number}", group, i) for i in range(len(group["params"]))]
    if algorithm.elementwise is not None:
        for p, name in zip(group["params"], names, strict=True):
            if p.requires_grad:
                kinds[_Kind(None, (), (), p.dtype, p.device, 0, bool(_codes(group, p)))].append((p, name, None))
        return kinds
    check_splits(group, f"group {number}")
    layouts = [
        layout_of(p, name, split_of(group, i), group.get("exchange") == "gather", holders)
        for i, (p, name) in enumerate(zip(group["params"], names, strict=True))
    ]
    offsets = [0] * len(layouts)
    if group.get("stagger"):
        costs = [sum(Cargo(0, matrix.shape, ()).flops for matrix in layout.matrices) for layout in layouts]
        offsets = stagger_offsets(costs, group["period"])
    for p, name, layout, offset in zip(group["params"], names, layouts, offsets, strict=True):
        check_grid(group.get("block_grid"), layout, name)
        if algorithm.between is block and group.get("neuron_beta2") is not None:
            check_whole_rows(group["block_grid"], layout, name)
        if not p.requires_grad or p.numel() == 0:
            continue
        travels = layout.is_shared and algorithm.can_refresh
        kind = _Kind(
            layout.team if travels else None, layout.replicas if travels else (), layout.column_groups,
            p.dtype, p.device, offset, bool(_codes(group, p)),
        )  # fmt: skip
        kinds[kind] += [(p, name, one) for one in (layout.each() if travels else [layout])]
    return kinds


def _codes(group: Mapping[str, Any], p: Tensor) -> dict[str, str]:
    """The codes of what state a parameter has of 8 bits, by key."""
    forms = forms_of(ALGORITHMS[group["algorithm"]].state, group, p)
    return {key: form.code for key, form in forms.items() if form.code is not None}


def split_of(group: Mapping[str, Any], i: int) -> MatrixSplit | None:
    """Which logical matrices the rows of the i-th parameter are; None: its own."""
    splits = group.get("matrix_splits")
    return None if splits is None else splits[i]


def check_splits(group: Mapping[str, Any], where: str) -> None:
    """Raise a ValueError for ``matrix_splits`` of another form or number than the parameters need."""
    splits, count = group.get("matrix_splits"), len(group["params"])
    if splits is None:
        return
    if not isinstance(splits, (tuple, list)) or len(splits) != count:
        raise ValueError(f"{where}: matrix_splits has to name a split or None for each of its {count} parameters")
    for split in splits:
        if split is not None and not is_split(split):
            raise ValueError(f"{where}: {split!r} in matrix_splits has to be {SPLIT_FORMS}")


def _local_jobs(
    number: int, members: list[Member], bucket_bytes: BucketBytes, offset: int, codes: Mapping[str, str]
) -> list[Job]:
    jobs: list[Job] = []
    filled, auto = 0, bucket_bytes == "auto"
    limit = BUCKET_BYTES if auto else bucket_bytes
    for p, name, layout in members:
        size = local(p.detach()).nbytes if auto else p.numel() * p.element_size()
        if not jobs or filled + size > limit:
            jobs.append(Job(number, offset=offset, codes=codes))
            filled = 0
        jobs[-1].params.append(p)
        jobs[-1].labels.append(name)
        if layout is not None:
            jobs[-1].layouts.append(layout)
        filled += size
    return jobs
