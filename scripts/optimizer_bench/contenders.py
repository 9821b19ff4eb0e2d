"""Who is compared: our optimizers, torch's, those that pip can bring, and floors that only do the unavoidable work."""

from __future__ import annotations

import importlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import optimizers
from optimizers.orthogonal.newton_schulz import compute_dtype

from .problem import Problem

DEFAULT_ADAMW, FUSED_ADAMW = "torch AdamW default", "torch AdamW fused"
MUON, MUON_BP, ROW_MUON = "Muon", "MuonBP P=5", "PeriodicRowMuon K=3"
FLOOR = "floor: batched NS"
COMPILED = " compiled"

FAMILY: tuple[tuple[str, Any, int, dict[str, Any]], ...] = (
    ("NorMuon", optimizers.NorMuon, 1, {}),
    ("AdaGO", optimizers.AdaGO, 1, {}),
    ("MarsMuon", optimizers.MarsMuon, 1, {}),
    ("MuonEq", optimizers.MuonEq, 1, {}),
    ("Muon8bit", optimizers.Muon8bit, 1, {}),
    ("Dion2", optimizers.Dion2, 1, {}),
    ("Dion, rank a quarter", optimizers.Dion, 0, {"rank_fraction": 0.25}),
    ("Scion", optimizers.Scion, 1, {}),
    ("AuON hybrid", optimizers.AuON, 1, {"form": "hybrid"}),
    ("PeriodicSignMuon P=2", optimizers.PeriodicSignMuon, 2, {}),
    ("RowMuon", optimizers.RowMuon, 0, {}),
    ("Scion row", optimizers.Scion, 0, {"ball": "row"}),
    ("Scion column", optimizers.Scion, 0, {"ball": "column"}),
    ("Scion sign", optimizers.Scion, 0, {"ball": "sign"}),
    ("AuON", optimizers.AuON, 0, {}),
    ("MarsAdamW", optimizers.MarsAdamW, 0, {}),
    ("AdamW8bit", optimizers.AdamW8bit, 0, {}),
    ("Lion", optimizers.Lion, 0, {}),
    ("SGD", optimizers.SGD, 0, {}),
)
"""The rest of ours: name, class, period, options. Measured every fourth round."""


@dataclass(frozen=True)
class Contender:
    """One row of the table. ``build`` gets sharded weights and returns an optimizer, or the bare step of a floor.

    Step t is a refresh if t mod ``period`` is 0; 0 stands for never. A ``slow`` one is measured every fourth round. One
    that ``writes_gradients`` gets copies of them.
    """

    name: str
    family: str
    build: Callable[[list[nn.Parameter]], Any]
    period: int = 1
    slow: bool = False
    writes_gradients: bool = False

    @property
    def compiles(self) -> bool:
        """Whether its own functions may be compiled; else torch runs them eagerly."""
        return self.name.endswith(COMPILED)

    def is_refresh(self, step: int) -> bool:
        """Whether a step orthogonalises whole matrices."""
        return self.period > 0 and step % self.period == 0


def contenders(problem: Problem) -> Iterator[Contender]:
    """All of them, ours first."""
    yield from _ours(problem.settings.compile)
    yield from _torch()
    if problem.settings.peers:
        yield from _peers(problem.settings.compile)
    yield Contender(FLOOR, "floor", lambda _: newton_schulz_floor(problem.owned()))
    yield Contender("floor: unit rows", "floor", lambda _: row_floor(problem.local_gradients()), period=0)


def can_compile() -> bool:
    """Whether this version of ``optimizers`` has a compiled form."""
    return "compile" in inspect.signature(optimizers.Muon).parameters


def _ours(compiled: bool) -> Iterator[Contender]:
    periodic = ((MUON, optimizers.Muon, 1, {}), (MUON_BP, optimizers.MuonBP, 5, {"period": 5}))
    periodic += ((ROW_MUON, optimizers.PeriodicRowMuon, 3, {"period": 3}),)
    yield Contender("AdamW", "ours", optimizers.AdamW, period=0)
    for name, cls, period, options in periodic:
        yield Contender(name, "ours", lambda p, cls=cls, o=options: cls(p, **o), period)
        if compiled:
            more = {**options, "compile": True}
            yield Contender(name + COMPILED, "ours", lambda p, cls=cls, o=more: cls(p, **o), period)
    yield Contender("BlockMuon", "ours", optimizers.BlockMuon, period=0)
    for name, cls, period, options in FAMILY:
        yield Contender(name, "ours", lambda p, cls=cls, o=options: cls(p, **o), period, slow=True)


def _torch() -> Iterator[Contender]:
    adamw = torch.optim.AdamW
    yield Contender(DEFAULT_ADAMW, "torch", adamw, period=0)
    yield Contender("torch AdamW foreach", "torch", lambda p: adamw(p, foreach=True), period=0)
    yield Contender(FUSED_ADAMW, "torch", lambda p: adamw(p, fused=True), period=0)
    if hasattr(torch.optim, "Muon"):
        yield Contender("torch Muon", "torch", lambda p: torch.optim.Muon(p), slow=True)


def _peers(compiled: bool) -> Iterator[Contender]:
    def named(name: str, module: str, cls: str, wrap: Callable[[Any], Any] = list) -> Iterator[Contender]:
        def build(params: list[nn.Parameter]) -> Any:
            return getattr(importlib.import_module(module), cls)(wrap(params))

        for suffix in ("", COMPILED) if compiled else ("",):
            yield Contender(name + suffix, "peer", build, slow=True, writes_gradients=True)

    yield from named("muon-fsdp2", "muon_fsdp2", "Muon", lambda params: [{"params": params, "use_muon": True}])
    yield from named("heavyball Muon", "heavyball", "Muon")
    yield from named("dtensor-muon", "dtensor_muon", "Muon")
    yield from named("dtensor-muon foreach", "dtensor_muon", "MuonForeach")


def newton_schulz_floor(matrices: list[Tensor]) -> Callable[[], None]:
    """A step that runs five Newton–Schulz iterations, batched by shape in reused buffers, and nothing else.

    It is written out here rather than taken from the package, so that the package is measured against something else;
    only the dtype is the one that the package would choose.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    dtype = compute_dtype(None, torch.float32, matrices[0].device)
    by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
    for matrix in matrices:
        wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT.contiguous()
        by_shape[wide.shape].append(wide)
    stacks = [torch.stack(same) for same in by_shape.values()]
    buffers = [[torch.empty_like(s, dtype=dtype) for _ in range(2)] for s in stacks]
    squares = [[s.new_empty(len(s), s.shape[1], s.shape[1], dtype=dtype) for _ in range(2)] for s in stacks]

    def step() -> None:
        for stack, (x, y), (gram, poly) in zip(stacks, buffers, squares, strict=True):
            x.copy_(stack).div_(torch.linalg.vector_norm(stack, dim=(1, 2), keepdim=True))
            for _ in range(5):
                torch.bmm(x, x.mT, out=gram)
                torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=poly)
                torch.baddbmm(x, poly, x, beta=a, out=y)
                x, y = y, x

    return step


def row_floor(shards: list[Tensor]) -> Callable[[], None]:
    """A step that divides the rows of all shards by their norms, in reused buffers, and nothing else."""
    out = [torch.empty_like(s) for s in shards]

    def step() -> None:
        for shard, unit in zip(shards, out, strict=True):
            torch.div(shard, torch.linalg.vector_norm(shard, dim=1, keepdim=True), out=unit)

    return step
