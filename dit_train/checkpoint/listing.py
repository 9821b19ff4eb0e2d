"""The checkpoints of a run: finding, reading and pruning them. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dit_train.checkpoint import manifest
from dit_train.checkpoint.manifest import Manifest, RunState, damaged
from dit_train.config import ConfigError


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    manifest: Manifest

    @property
    def state(self) -> RunState:
        """What the run had done."""
        return self.manifest.run

    @property
    def fixed(self) -> dict[str, Any]:
        """Settings that a resume may not change."""
        return self.manifest.fixed

    @property
    def bytes(self) -> int:
        """Size of its tensors and their metadata."""
        return sum(file.bytes for file in self.manifest.files.values())

    @property
    def sha256(self) -> str:
        """Of its step, its training time and its files' sums, which together are no other checkpoint's."""
        content = asdict(self.manifest)
        text = json.dumps([self.state.step, self.state.train_seconds, content["files"]], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def folder_of(run: str | Path) -> Path:
    """Where a run keeps its checkpoints."""
    return Path(run) / "checkpoints"


def folder_of_step(run: str | Path, step: int) -> Path:
    """Where the checkpoint of a step lies once it is complete."""
    return folder_of(run) / f"step_{step:07d}"


def step_of(folder: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    return int(folder.name.removeprefix("step_"))


def committed(run: str | Path) -> list[Path]:
    """Checkpoint folders that a save has committed, oldest first; a folder of another name is somebody's own."""
    found = folder_of(run).glob("step_*")
    return sorted((path for path in found if re.fullmatch(r"step_\d{1,18}", path.name)), key=step_of)


def remains(run: str | Path) -> list[Path]:
    """What saves and prunings that were cut off have left."""
    return sorted(folder_of(run).glob("step_*.tmp"))


def find_latest(run: str | Path) -> Checkpoint | None:
    """The newest checkpoint of a run, None if it has none yet.

    Raises:
        ConfigError: the newest committed checkpoint is damaged; nothing is changed.
    """
    folders = committed(run)
    return read(folders[-1]) if folders else None


def find(run: str | Path, step: int) -> Checkpoint:
    """The checkpoint of a step. Raises `ConfigError` with those that there are, if there is none of it."""
    folders = committed(run)
    for folder in folders:
        if step_of(folder) == step:
            return read(folder)
    there = ", ".join(str(step_of(folder)) for folder in folders) or "none"
    raise ConfigError(f"{run}: no checkpoint of step {step}; there are {there}")


def read(folder: Path) -> Checkpoint:
    """A checkpoint whose manifest is sound and whose files have the sizes they were written with.

    Raises:
        ConfigError: they have not; what is inside the files is `verify`'s to check.
    """
    content = manifest.read(folder)
    check_sizes(folder, content)
    if content.run.step != step_of(folder):
        raise damaged(folder, f"it is of step {content.run.step}")
    return Checkpoint(folder, content)


def check_sizes(folder: Path, content: Manifest) -> None:
    """Raise `ConfigError` where a file of the manifest is missing or of another size."""
    for name, file in content.files.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != file.bytes:
            raise damaged(folder, f"{name} has {found} bytes of {file.bytes}" if found is not None else f"no {name}")


def mark_evaluated(checkpoint: Checkpoint) -> None:
    """Note, in a checkpoint of a run that was stopped, that what was due at its step has been done by now."""
    content = manifest.read(checkpoint.folder)
    manifest.write(checkpoint.folder, replace(content, run=replace(content.run, evaluated=True)))


def prune(run: str | Path, keep: int, keep_every: int) -> None:
    """Remove all checkpoints but the newest `keep` and those of every `keep_every`-th step (0: of none)."""
    for old in committed(run)[:-keep]:
        if not (keep_every and step_of(old) % keep_every == 0):
            discard(old)


def discard(folder: Path) -> None:
    """Remove a checkpoint; a kill in between leaves none that looks complete."""
    shutil.rmtree(folder.rename(folder.with_name(f"{folder.name}.old.tmp")))


def clear(run: str | Path) -> None:
    """Remove what was cut off."""
    for path in remains(run):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
