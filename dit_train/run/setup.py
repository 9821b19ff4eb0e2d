"""From a checked plan to a run that can step: data, model, optimizer, averages, and what an earlier start left."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import optimizers
from dit_train import exits, overlays
from dit_train.config import Config
from dit_train.data import sources
from dit_train.data.sources import Dataset
from dit_train.model.dit import DiT
from dit_train.parallel import precision, shard
from dit_train.parallel.mesh import World
from dit_train.preflight import Plan
from dit_train.run import checkpoint, optimizer
from dit_train.run.checkpoint import RunState
from dit_train.run.ema import EMA
from dit_train.run.tracking import Reporter


@dataclass
class Run:
    """Everything that a run holds."""

    plan: Plan
    world: World
    data: Dataset
    model: DiT
    ema: EMA
    optimizer: Any
    """An `optimizers` class: a torch Optimizer that knows the bytes it sends."""
    peak_lrs: list[float]
    """Learning rate of each group before the schedule."""
    state: RunState
    reporter: Reporter

    @property
    def config(self) -> Config:
        """The settings."""
        return self.plan.config


def prepare(plan: Plan, world: World) -> Run:
    """Build the run and load its newest checkpoint."""
    config = plan.config
    data = sources.load(config.data)
    state = plan.resume.state if plan.resume else RunState()
    dtype_note = _choose_dtype(config, data, world, state)
    dtype = precision.DTYPES[state.compute_dtype]
    model = shard.build(config.model, config.parallel, data, world, dtype, config.train.seed)
    model.train()
    steps = optimizer.build(config.optimizer, model)
    peak_lrs = [group["lr"] for group in steps.param_groups]
    ema = EMA(model, config.train.ema_decay)
    if plan.resume:
        checkpoint.load(plan.resume, model, ema, steps)
    if world.is_main:
        _open_folder(config, dtype_note, world)
    dist.barrier()
    reporter = Reporter(config, state.step, enabled=world.is_main)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    reporter.say(f"DiT of {parameters:,} parameters on {world.size} x {world.device.type}, {dtype_note}")
    reporter.say(f"data {data.name}: {len(data.train):,} images to train on, {len(data.heldout):,} held out")
    reporter.say("optimizer\n" + optimizers.routing_table(steps))
    if plan.resume:
        reporter.say(f"going on after step {state.step} from {plan.resume.folder}")
    return Run(plan, world, data, model, ema, steps, peak_lrs, state, reporter)


def _choose_dtype(config: Config, data: Dataset, world: World, state: RunState) -> str:
    """Fix ``state.compute_dtype`` (a resumed run keeps what it measured) and say how."""
    configured = config.train.compute_dtype
    if configured != "auto":
        state.compute_dtype = configured
        return f"compute dtype {configured}"
    if state.compute_dtype:
        return f"compute dtype {state.compute_dtype} (as measured when the run began)"
    times = precision.measure(config, data, world)
    state.compute_dtype = min(times, key=times.__getitem__)
    measured = ", ".join(f"{name} {ms:.1f} ms" for name, ms in times.items())
    return f"compute dtype {state.compute_dtype} (measured: {measured})"


def _open_folder(config: Config, dtype_note: str, world: World) -> None:
    """Create the run folder and write the resolved config."""
    folder = Path(config.run.folder)
    folder.mkdir(parents=True, exist_ok=True)
    exits.forget(folder)
    header = {"dit-train": _version(), "git": _git_hash(), "torch": torch.__version__, "ranks": str(world.size)}
    (folder / "config.yaml").write_text(overlays.dump(config, **header, compute=dtype_note))


def _version() -> str:
    try:
        return metadata.version("dit-train")
    except metadata.PackageNotFoundError:
        return "not installed"


def _git_hash() -> str:
    """The checkout's commit, with + where files differ from it; none outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "none"
