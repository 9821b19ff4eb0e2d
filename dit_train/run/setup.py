"""From a checked plan to a run that can step: data, model, optimizer, averages, and what an earlier start left."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import optimizers
from dit_train import overlays
from dit_train.checkpoint import reading
from dit_train.checkpoint.manifest import RunState
from dit_train.config import Config, ConfigError
from dit_train.data import sources
from dit_train.data.sources import Dataset
from dit_train.model.dit import DiT
from dit_train.parallel import precision, shard
from dit_train.parallel.mesh import World
from dit_train.preflight import Plan
from dit_train.run import folder, optimizer, period, sampling
from dit_train.run.ema import EMA
from dit_train.run.tracking import Reporter

_LATENTS_SEEN = 256
"""Latents whose standard deviation is taken at the start."""


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
    beat: Callable[..., None]
    """Told whatever has ended: see `Watchdog.beat`."""

    @property
    def config(self) -> Config:
        """The settings."""
        return self.plan.config


def prepare(plan: Plan, world: World, beat: Callable[..., None] = lambda *_, **__: None) -> Run:
    """Build the run and load its newest checkpoint; `beat` is called as the run moves."""
    config = plan.config
    _agree(plan, world)
    data = sources.load(config.data, str(world.device))
    state = plan.resume.state if plan.resume else RunState()
    dtype_note = _choose_dtype(config, data, world, state)
    dtype = precision.DTYPES[state.compute_dtype]
    chosen, period_note = period.settle(config, data, world, state, beat)
    model = shard.build(config.model, config.parallel, data, world, dtype, config.train.seed)
    model.train()
    try:
        steps = optimizer.build(chosen, model)
    except ValueError as error:  # for example a block_grid that these shards cut through
        raise ConfigError(f"optimizer: {error}") from None
    peak_lrs = [group["lr"] for group in steps.param_groups]
    ema = EMA(model, config.train.ema_decay, ramp=config.train.ema_ramp)
    if plan.resume:
        if config.run.verify_checkpoint:
            reading.check_sums(plan.resume)
        reading.load(plan.resume, model, ema, steps)
    changed = _changed_settings(config) if plan.resume else []
    if world.is_main:
        _write_config(config, dtype_note, period_note, world)
        period.write(config, state)
    dist.barrier()
    reporter = Reporter(config, state.step, evaluated=state.evaluated, enabled=world.is_main)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    reporter.say(f"DiT of {parameters:,} parameters on {world.size} x {world.device.type}, {dtype_note}")
    reporter.say(f"data {data.name}: {len(data.train):,} images to train on, {len(data.heldout):,} held out")
    for line in _about_latents(config, data):
        reporter.say(line)
    reporter.say("optimizer\n" + optimizers.routing_table(steps))
    if period_note is not None:
        reporter.say(period_note)
    if config.schedule.warmup_steps >= config.train.steps:
        reporter.say(f"the warm-up of {config.schedule.warmup_steps} steps does not end within train.steps")
    if plan.resume:
        reporter.say(f"going on after step {state.step} from {plan.resume.folder}")
        for line in changed:
            reporter.say(f"changed since the last start: {line}")
    return Run(plan, world, data, model, ema, steps, peak_lrs, state, reporter, beat)


def _about_latents(config: Config, data: Dataset) -> list[str]:
    """What a person should know of latents: above all whether shift and scale have been applied, and once."""
    if data.encoding is None:
        return []
    some = np.linspace(0, len(data.train) - 1, min(len(data.train), _LATENTS_SEEN)).astype(np.int64)
    std = data.train.inputs(some, config.train.seed, "look", samples=some).std().item()
    lines = [
        f"latents of {data.encoding.vae}, images of {data.encoding.image_size} pixels, standard deviation {std:.2f}"
    ]
    if not 0.5 <= std <= 2:
        lines.append(
            f"WARNING: scaled latents have a standard deviation of {std:.2f}, where about 1 is right; mend "
            "scaling_factor and shift_factor in the autoencoder's config.json and call scripts/encode_latents.py again "
            "(it encodes nothing anew)"
        )
    if config.sample.grid and not sampling.can_decode(config.data):
        lines.append("no sample grids: data.vae names no autoencoder that would decode them")
    return lines


def _agree(plan: Plan, world: World) -> None:
    """Refuse to start where ranks read other configs or see other checkpoints, as on hosts that share no disk."""
    mine = (overlays.dump(plan.config), str(plan.resume.state) if plan.resume else "no checkpoint")
    theirs: list[tuple[str, str]] = [mine] * world.size
    dist.all_gather_object(theirs, mine)
    for rank, (config, resume) in enumerate(theirs):
        if config != theirs[0][0]:
            raise ConfigError(
                f"rank {rank} has another config than rank 0; give all hosts the same files and arguments"
            )
        if resume != theirs[0][1]:
            raise ConfigError(
                f"run.folder: rank {rank} sees {resume} in {plan.config.run.folder}, rank 0 {theirs[0][1]}; "
                "the run folder must lie on a disk that all hosts share"
            )


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


@contextmanager
def hold_folder(plan: Plan, world: World) -> Iterator[None]:
    """Make the run folder and keep other runs out of it; all ranks wait until the main one has it.

    Raises:
        ConfigError: it cannot be made or another run holds it; on all ranks.
    """
    path = plan.config.run.folder
    with ExitStack() as held:
        refused: list[str | None] = [None]
        if world.is_main:
            try:
                Path(path).mkdir(parents=True, exist_ok=True)
                held.enter_context(folder.locked(path))
                folder.forget(path)
            except ConfigError as error:
                refused = [str(error)]
            except OSError as error:
                refused = [f"run.folder: {error}; mend it and run the same command"]
        dist.broadcast_object_list(refused)
        if refused[0] is not None:
            raise ConfigError(refused[0])
        yield


@contextmanager
def determinism(wanted: bool) -> Iterator[None]:
    """Kernels that repeat bit for bit while this is entered, if wanted; before CUDA starts."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read as cuBLAS starts
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


def _write_config(config: Config, dtype_note: str, period_note: str | None, world: World) -> None:
    """Write the resolved config; its first line marks the folder as a run's."""
    header = {"dit-train": _version(), "git": _git_hash(), "torch": torch.__version__, "ranks": str(world.size)}
    notes = {"compute": dtype_note} | ({} if period_note is None else {"period": period_note})
    text = overlays.dump(config, **header, **notes)
    assert text.startswith(folder.HEADER)
    (Path(config.run.folder) / "config.yaml").write_text(text)


def _changed_settings(config: Config) -> list[str]:
    """Settings that differ from those of the last start, as ``section.key: before -> now``."""
    try:
        before = overlays.to_dict(overlays.read([Path(config.run.folder) / "config.yaml"]))
    except ConfigError:
        return []
    now = overlays.to_dict(config)
    return [
        f"{section}.{key}: {before[section].get(key)} -> {value}"
        for section, settings in now.items()
        for key, value in settings.items()
        if before[section].get(key) != value
    ]


def _version() -> str:
    try:
        return metadata.version("dit-train")
    except metadata.PackageNotFoundError:
        return "not installed"


def _git_hash() -> str:
    """The checkout's commit, with + where files differ from it; none outside a checkout of this project."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # an environment may lie inside another repository
        return git("describe", "--always", "--dirty=+", "--abbrev=12")
    except (OSError, subprocess.SubprocessError):
        return "none"
