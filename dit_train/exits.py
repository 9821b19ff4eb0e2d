"""Exit codes, and RUN/exit.json, which keeps them where torchrun would turn each into 1."""

from __future__ import annotations

import json
import os
from pathlib import Path

DONE = 0
FAILED = 1
BAD_INPUT = 2
STOPPED = 85
"""Asked to stop; the same command goes on."""

STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
"""Signals that ask a run to save and stop."""

LAUNCHED = "DIT_TRAIN_LAUNCHED"
"""Environment variable of ranks under ``launch``, which reads the code from the file: ranks that agree leave with 0,
so that torchrun does not report a failure that is none."""


def record(run_folder: str | Path, code: int, message: str) -> None:
    """Write RUN/exit.json, except into a folder that holds something else."""
    folder = Path(run_folder)
    if is_free(folder) and not folder.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        beside = folder / f"exit.json.{os.getpid()}.tmp"  # several ranks may fail at once
        beside.write_text(json.dumps({"code": code, "message": message}) + "\n")
        beside.replace(folder / "exit.json")


def is_free(folder: Path) -> bool:
    """Whether a run may use a folder: it is a run's, empty, not there yet, or holds a code alone."""
    if not folder.is_dir() or (folder / "config.yaml").is_file():
        return True
    return {path.name for path in folder.iterdir()} <= {"exit.json"}


def forget(run_folder: str | Path) -> None:
    """Remove the code of an earlier start."""
    (Path(run_folder) / "exit.json").unlink(missing_ok=True)


def recorded(run_folder: str | Path) -> int | None:
    """The code in RUN/exit.json, None if the run left none."""
    try:
        return int(json.loads((Path(run_folder) / "exit.json").read_text())["code"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def of_rank(code: int) -> int:
    """What a rank returns to torchrun: asked to stop is no failure to report where `launch` reads the file."""
    return DONE if code == STOPPED and LAUNCHED in os.environ else code
