"""state.json: what a checkpoint holds besides tensors, and the size and SHA-256 of every file beside it.

Whoever wrote it is not trusted: a value of another type, a number that no run reaches or a name that leaves the folder
is one `ConfigError`. Its last entry is its own SHA-256, so that a flipped bit in it is noticed as well.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from dit_train.checkpoint.files import write_durably
from dit_train.config import ConfigError

NAME = "state.json"
_LARGEST = 1 << 26
"""Bytes that are read at most; one of a thousand ranks has 200 kB."""
_SUM = "sha256"


@dataclass
class RunState:
    """What a run has done and chosen so far."""

    step: int = 0
    """Optimizer steps."""
    train_seconds: float = 0.0
    """Wall time of steps, without scoring, sampling and saving."""
    skipped: int = 0
    """Updates left out since loss or gradient were not finite."""
    spikes: int = 0
    """Updates left out since loss or gradient norm lay far above those of the steps before."""
    bad_in_a_row: int = 0
    """Updates left out, of either kind, since the last one that was not."""
    unreadable: int = 0
    """Images trained on in place of unreadable ones."""
    recent: list[list[float]] = field(default_factory=list, repr=False)
    """Loss and gradient norm of the last steps, which spikes are told by; replaced each step, never changed."""
    save_seconds: float = 0.0
    """What the last save took; 0: none has been measured."""
    compute_dtype: str = ""
    """Precision of forward and backward, as configured or as ``auto`` chose."""
    period_times: list[float] = field(default_factory=list, repr=False)
    """What ``optimizer.period: auto`` goes by: the ranks that were measured, and `StepTimes`; empty: nothing yet."""
    evaluated: bool = True
    """Whether what was due after the last step (losses, scores, samples) was done before the save."""


@dataclass(frozen=True)
class File:
    """A file of a checkpoint as it was written."""

    bytes: int
    sha256: str
    """In hexadecimal."""


@dataclass(frozen=True)
class Manifest:
    """The content of state.json."""

    run: RunState
    fixed: dict[str, Any]
    """Settings that a resume may not change, by dotted name."""
    optimizer_steps: list[int]
    """Completed steps of each parameter group, which place a period's phase."""
    files: dict[str, File]
    """Every other file, by its name in the folder."""


def damaged(folder: Path, reason: str, what: str = "damaged checkpoint") -> ConfigError:
    """The one line about a checkpoint that cannot be used."""
    reason = " ".join(reason.split())[:300]
    return ConfigError(f"{folder}: {what} ({reason}); remove that folder to go on from the one before it")


def write(folder: Path, manifest: Manifest) -> None:
    """Write state.json, whole and to the disk."""
    content = asdict(manifest)
    write_durably(folder / NAME, json.dumps({**content, _SUM: _sum(content)}, indent=1, allow_nan=False))


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder.

    Raises:
        ConfigError: it is missing, not as it was written, or not what a run writes.
    """
    try:
        return _parse(_load(folder / NAME))
    except FileNotFoundError:
        raise damaged(folder, f"{NAME} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        known = isinstance(error, _NotOurs)
        raise damaged(folder, f"{NAME}: {error}" if known else f"{NAME} is unreadable") from None


class _NotOurs(ValueError):
    """Valid JSON that no run writes; the message says where."""


def _load(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        raw = file.read(_LARGEST + 1)
    if len(raw) > _LARGEST:
        raise _NotOurs(f"longer than {_LARGEST >> 20} MiB")
    content = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    if not isinstance(content, dict):
        raise _NotOurs("no mapping")
    if content.pop(_SUM, None) != _sum(content):
        raise _NotOurs("not as it was written: its own SHA-256 differs")
    return content


def _refuse_constant(name: str) -> None:
    raise _NotOurs(f"{name} is no number")


def _sum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _parse(content: dict[str, Any]) -> Manifest:
    run, fixed, steps, files = (content[key] for key in ("run", "fixed", "optimizer_steps", "files"))
    if len(content) > 4 or not isinstance(steps, list) or not all(isinstance(x, dict) for x in (run, fixed, files)):
        raise _NotOurs("other entries than a run writes")
    blank = vars(RunState())
    for key, value in run.items():
        if key not in blank or not _like(value, blank[key]):
            raise _NotOurs(f"run.{key[:40]}: {_short(value)}")
    for key, value in fixed.items():
        if not _is_setting(value):
            raise _NotOurs(f"fixed.{key[:40]}: {_short(value)}")
    if not all(_like(step, 0) for step in steps):
        raise _NotOurs(f"optimizer_steps: {_short(steps)}")
    return Manifest(RunState(**run), fixed, steps, {name: _file(name, entry) for name, entry in files.items()})


def _file(name: str, entry: Any) -> File:
    if PurePosixPath(name).name != name or name in ("", "..", NAME) or "\0" in name:
        raise _NotOurs(f"files: {_short(name)} is no file of this folder")
    count, digest = entry["bytes"], entry["sha256"]
    if not _like(count, 0) or not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise _NotOurs(f"files.{name[:40]}: {_short(entry)}")
    return File(count, digest)


def _like(value: Any, example: Any) -> bool:
    """Whether a value of JSON may stand where a run has `example`; a list holds numbers, or lists of them."""
    if isinstance(example, list):
        return type(value) is list and all(_like(item, example if type(item) is list else 0.0) for item in value)
    if isinstance(example, bool) or not isinstance(example, int | float):
        return type(value) is type(example)
    if isinstance(example, int):
        return type(value) is int and 0 <= value < 1 << 63
    return type(value) in (int, float) and math.isfinite(value)


def _is_setting(value: Any) -> bool:
    """Whether a config holds such values: text, numbers, switches, null, and short lists of them."""
    if isinstance(value, list):
        return len(value) < 100 and not any(isinstance(item, list) for item in value) and all(map(_is_setting, value))
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, str):
        return len(value) <= 4096
    return value is None or isinstance(value, bool) or (isinstance(value, int) and abs(value) < 1 << 63)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
