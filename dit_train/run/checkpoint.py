"""Checkpoints: torch DCP for tensors, JSON for the rest, written beside and committed by a rename.

    RUN/checkpoints/step_0000500/   .metadata, *.distcp   model, EMA and optimizer tensors, resharded on load
                                    state.json            counters, what may not change, and every file's size
    RUN/checkpoints/step_0000500.tmp/                      a save that was cut off; ignored and replaced

The listing (`find_latest`) needs no torch, so that a refused resume is told before any rank starts.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dit_train.config import ConfigError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from dit_train.run.ema import EMA

_STATE = "state.json"


@dataclass
class RunState:
    """What a run has done and chosen so far."""

    step: int = 0
    """Optimizer steps."""
    train_seconds: float = 0.0
    """Wall time of steps, without scoring, sampling and saving."""
    skipped: int = 0
    """Updates left out since loss or gradient were not finite."""
    compute_dtype: str = ""
    """Precision of forward and backward, as configured or as ``auto`` chose."""
    evaluated: bool = True
    """Whether what was due after the last step (losses, scores, samples) was done before the save."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    state: RunState
    fixed: dict[str, Any]
    """Settings that a resume may not change."""

    @property
    def sha256(self) -> str:
        """Of its step, its training time and its files' sizes, which together are no other checkpoint's."""
        sizes = json.loads((self.folder / _STATE).read_text())["files"]
        text = json.dumps([self.state.step, self.state.train_seconds, sizes], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def folder_of(run: str | Path) -> Path:
    """Where a run keeps its checkpoints."""
    return Path(run) / "checkpoints"


def find_latest(run: str | Path) -> Checkpoint | None:
    """The newest checkpoint of a run, None if it has none yet.

    Raises:
        ConfigError: the newest committed checkpoint is damaged; nothing is changed.
    """
    folders = _committed(folder_of(run))
    return read(folders[-1]) if folders else None


def find(run: str | Path, step: int) -> Checkpoint:
    """The checkpoint of a step. Raises `ConfigError` with those that there are, if there is none of it."""
    folders = _committed(folder_of(run))
    for folder in folders:
        if int(folder.name.removeprefix("step_")) == step:
            return read(folder)
    there = ", ".join(str(int(folder.name.removeprefix("step_"))) for folder in folders) or "none"
    raise ConfigError(f"{run}: no checkpoint of step {step}; there are {there}")


def read(folder: Path) -> Checkpoint:
    """The state of a checkpoint folder, whose files must all be there with the sizes they were written with."""
    try:
        state = json.loads((folder / _STATE).read_text())
        sizes, run_state, fixed = dict(state["files"]), RunState(**state["run"]), dict(state["fixed"])
        steps = [*state["optimizer_steps"], run_state.step, run_state.skipped]
        if not all(type(step) is int and step >= 0 for step in steps):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError):
        raise _damaged(folder, f"{_STATE} is missing or unreadable") from None
    for name, size in sizes.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            raise _damaged(folder, f"{name} has {found} bytes of {size}" if found is not None else f"no {name}")
    return Checkpoint(folder, run_state, fixed)


def _damaged(folder: Path, reason: str) -> ConfigError:
    return ConfigError(f"{folder}: damaged checkpoint ({reason}); remove that folder to go on from the one before it")


def save(
    run: str | Path,
    model: nn.Module,
    ema: EMA,
    optimizer: Optimizer,
    run_state: RunState,
    *,
    fixed: dict[str, Any],
    keep: int,
) -> Path:
    """Write a checkpoint on all ranks; older ones beyond the newest `keep` go once it is complete."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    final = folder_of(run) / f"step_{run_state.step:07d}"
    partial = final.with_suffix(".tmp")
    main = dist.get_rank() == 0
    if main:
        for remains in folder_of(run).glob("step_*.tmp"):
            shutil.rmtree(remains) if remains.is_dir() else remains.unlink()
        partial.mkdir(parents=True)
    dist.barrier()
    try:
        dcp.save(_tensors(model, ema, optimizer), checkpoint_id=partial)
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise ConfigError(f"run.folder: {partial} cannot be written ({' '.join(str(reason).split())[:200]})") from None
    if main:
        state = {
            "run": vars(run_state),
            "fixed": fixed,
            "optimizer_steps": [group["step"] for group in optimizer.param_groups],
            "files": {path.name: path.stat().st_size for path in sorted(partial.iterdir())},
        }
        (partial / _STATE).write_text(json.dumps(state, indent=1))
        partial.rename(final)
        _prune(folder_of(run), keep)
    dist.barrier()
    return final


def mark_evaluated(checkpoint: Checkpoint) -> None:
    """Note, in a checkpoint of a run that was stopped, that what was due at its step has been done by now."""
    path = checkpoint.folder / _STATE
    state = json.loads(path.read_text())
    state["run"]["evaluated"] = True
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(state, indent=1))
    beside.replace(path)


def load(checkpoint: Checkpoint, model: nn.Module, ema: EMA, optimizer: Optimizer) -> None:
    """Fill model, EMA and optimizer in place; the number of ranks may differ from the one that saved."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        dcp.load(_tensors(model, ema, optimizer), checkpoint_id=checkpoint.folder)
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise _damaged(checkpoint.folder, " ".join(str(reason).split())[:200]) from None
    steps = json.loads((checkpoint.folder / _STATE).read_text())["optimizer_steps"]
    for group, step in zip(optimizer.param_groups, steps, strict=True):
        group["step"] = step


def load_weights(checkpoint: Checkpoint, model: nn.Module, kind: Literal["ema", "model"]) -> None:
    """Fill a model alone, with averaged or with trained weights; the number of ranks may differ."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    tensors = {f"{kind}.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    try:
        dcp.load(tensors, checkpoint_id=checkpoint.folder)
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise _damaged(checkpoint.folder, " ".join(str(reason).split())[:200]) from None


def _tensors(model: nn.Module, ema: EMA, optimizer: Optimizer) -> dict[str, Any]:
    """Every tensor of a run under a flat name; tensors only, since DCP stores anything else as a pickle."""
    tensors: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        tensors[f"ema.{name}"] = ema.weights[name]
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def _committed(folder: Path) -> list[Path]:
    """Checkpoint folders that a save has committed, oldest first; a folder of another name is somebody's own."""
    found = folder.glob("step_*")
    return sorted(
        (p for p in found if re.fullmatch(r"step_\d+", p.name)), key=lambda p: int(p.name.removeprefix("step_"))
    )


def _prune(folder: Path, keep: int) -> None:
    for old in _committed(folder)[:-keep]:
        shutil.rmtree(old.rename(old.with_suffix(".tmp")))  # a kill in between leaves no half checkpoint
