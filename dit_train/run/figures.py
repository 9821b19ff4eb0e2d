"""What a row of metrics.jsonl tells of speed, memory and norms beside the loss."""

from __future__ import annotations

import math
import resource
import sys
from typing import Any

import torch
import torch.distributed as dist

from dit_train.model.flops import model_flops
from dit_train.parallel.mesh import World
from dit_train.planning.machine import peak_tflops
from dit_train.run import faults
from dit_train.run.norms import Norms
from dit_train.run.setup import Run

_PARTS = ("momentum", "exchange", "orthogonalisation", "update")


class Figures:
    """Figures of each step, and at some steps those that ranks have to agree on."""

    def __init__(self, run: Run) -> None:
        settings = run.config.run
        self._run, self._log_every, self._norms_every = run, settings.log_every, settings.norms_every
        self._flops = run.config.train.batch * model_flops(run.model).total
        self._peak = peak_of_all(run.world, run.state.compute_dtype)
        self._norms = Norms(run.optimizer) if settings.norms_every else None
        self._squares: torch.Tensor | None = None
        self._clipped_by = 1.0
        self._waited = self._seconds = 0.0
        self._updated = False
        run.optimizer.time_spans()
        if run.world.device.type == "cuda":  # a trial of fp32 before the run may have taken more than any of its steps
            torch.cuda.reset_peak_memory_stats(run.world.device)

    def before_step(self) -> None:
        """A step begins, which may make no update."""
        self._updated = False

    def before_update(self, norm: float) -> None:
        """The optimizer is about to step on gradients that were clipped from a global `norm`."""
        self._updated = True
        if self._norms is not None and self._due(self._norms_every, self._run.state.step + 1):
            self._clipped_by = faults.clipping(self._run.config.train.clip_norm, norm)
            self._norms.before_update()

    def after_update(self) -> None:
        """It has; the gradients are there still."""
        if self._norms is not None and self._norms.begun:
            self._squares = self._norms.after_update()

    def of_step(self, seconds: float, waited: float) -> dict[str, Any]:
        """The figures of the step that took `seconds`, of which `waited` for data; every rank calls it."""
        row: dict[str, Any] = {**self._speed(seconds), "data_wait_share": waited / seconds}
        self._waited, self._seconds = self._waited + waited, self._seconds + seconds
        if self._due(self._log_every, self._run.state.step):
            row |= self._of_the_worst_rank()
        return row

    def of_update(self) -> dict[str, float]:
        """What the last update's time went to, zeros if the step made none, and its norms; on a GPU waits for its end.

        Called once for each step, before the next update.
        """
        spans = self._run.optimizer.span_ms if self._updated else {}
        row = {f"optimizer_{part}_ms": spans.get(part, 0.0) for part in _PARTS}
        if self._squares is not None:
            row |= self._norms.read(self._squares, 1 / self._clipped_by)
            self._squares = None
        return row

    def _due(self, every: int, step: int) -> bool:
        return step % every == 0 or step == self._run.config.train.steps

    def _speed(self, seconds: float) -> dict[str, float | None]:
        """Of all ranks together, TFLOP/s of each; MFU is null where the peak of a rank's device is not known."""
        done = self._flops / seconds / 1e12
        return {
            "images_per_s": self._run.config.train.batch / seconds,
            "tflops": done / self._run.world.size,
            "mfu": None if self._peak is None else done / self._peak,
        }

    def _of_the_worst_rank(self) -> dict[str, float]:
        """Memory, and the share of the time since the last look that was waited for data, of the rank with most."""
        memory = peak_memory(self._run.world.device)
        worst = torch.tensor([self._waited / self._seconds, *memory.values()], dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        self._waited = self._seconds = 0.0
        return dict(zip(("data_wait_share_max", *memory), worst.tolist(), strict=True))


def peak_of_all(world: World, dtype: str) -> float | None:
    """Stated TFLOP/s of all ranks' devices together, None where one is not known; every rank calls it."""
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    mine = peak_tflops(name, dtype)
    total = torch.tensor(math.nan if mine is None else mine, dtype=torch.float64)
    dist.all_reduce(total)
    return None if total.isnan() else total.item()


def peak_memory(device: torch.device) -> dict[str, float]:
    """Most GiB: of tensors and what the allocator holds on a GPU, since the first step; of this process on a CPU."""
    if device.type == "cuda":
        statistics = torch.cuda.memory_stats(device)
        peaks = {"memory_gib": "allocated_bytes.all.peak", "memory_reserved_gib": "reserved_bytes.all.peak"}
        return {key: statistics.get(name, 0) / 2**30 for key, name in peaks.items()}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
