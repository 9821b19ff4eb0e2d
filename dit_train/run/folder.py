"""The run folder as such: whether it may be used, by one run at a time, and the exit code that it keeps.

RUN/config.yaml   resolved settings; its header is how a run folder is known
RUN/period.json   the period that ``optimizer.period: auto`` chose and why, see `dit_train.run.period`
RUN/exit.json     the code of the last start, where torchrun would turn each into 1
RUN/stop          made by a person to have the run save and stop; removed when it does
RUN/profile       made by a person to have some steps recorded; removed when they are
RUN/profiles/     what was recorded
RUN/stalls/       stacks of ranks that stalled
RUN/lock          held by the main rank while it runs
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dit_train.config import ConfigError
from eval.files import try_lock

HEADER = "# dit-train: "
STOP_FILE = "stop"
PROFILE_FILE = "profile"
PROFILES = "profiles"
_FILES = ("config.yaml", "metrics.jsonl", "scores.jsonl", "period.json", "exit.json", "lock", STOP_FILE, PROFILE_FILE)
_FOLDERS = ("checkpoints", "samples", "tensorboard", "stalls", PROFILES)
_SECONDS_A_LOOK_MAY_LAST = 1.0  # of a process that only asks whether the folder is in use


def check(run: str) -> None:
    """Refuse a folder that is somebody else's, cannot be made, is in use, or has something in the way.

    Raises:
        ConfigError: names what is wrong; nothing has been changed.
    """
    folder = Path(run)
    try:
        if "\0" in run:
            raise ValueError("a name cannot hold a zero byte")
        if not _is_free(folder):
            raise ConfigError(f"run.folder: {folder} holds other files; name a new or empty folder")
        nearest = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
        if not nearest.is_dir() or not os.access(nearest, os.W_OK):
            raise ConfigError(f"run.folder: {folder}: {nearest} is no folder that may be written to; name another")
    except (OSError, ValueError) as error:
        raise ConfigError(f"run.folder: {run!r} cannot be a folder ({error}); name another") from None
    for names, fits, kind in ((_FILES, Path.is_file, "a file"), (_FOLDERS, Path.is_dir, "a folder")):
        for name in names:
            if os.path.lexists(folder / name) and not fits(folder / name):
                raise ConfigError(f"run.folder: {folder / name} is not {kind}; move it away")
    if (folder / "lock").exists():
        with (folder / "lock").open("rb") as file:
            if not try_lock(file, fcntl.LOCK_SH):  # shared: every rank looks, and looks must not meet each other
                raise _in_use(run)


@contextmanager
def locked(run: str | Path) -> Iterator[None]:
    """Hold the folder; the system lets go of it when this process ends, however it ends.

    Raises:
        ConfigError: another run holds it.
    """
    with (Path(run) / "lock").open("a") as file:
        deadline = time.monotonic() + _SECONDS_A_LOOK_MAY_LAST
        while not try_lock(file):
            if time.monotonic() > deadline:
                raise _in_use(run)
            time.sleep(0.02)
        yield


def _in_use(run: str | Path) -> ConfigError:
    return ConfigError(f"run.folder: another run is using {run}; wait for it, or name another folder")


def is_run(folder: str | Path) -> bool:
    """Whether a folder holds a run: its config.yaml begins as those of runs do."""
    try:
        with (Path(folder) / "config.yaml").open(errors="replace") as file:
            return file.readline().startswith(HEADER)
    except OSError:
        return False


def record(run: str | Path, code: int, message: str) -> None:
    """Write RUN/exit.json, except into a folder that holds something else."""
    folder = Path(run)
    try:
        if not _is_free(folder):
            return
        folder.mkdir(parents=True, exist_ok=True)
        beside = folder / f"exit.json.{os.getpid()}.tmp"  # several ranks may fail at once
        beside.write_text(json.dumps({"code": code, "message": message}) + "\n")
        beside.replace(folder / "exit.json")
    except (OSError, ValueError):
        pass  # the folder itself may be what is wrong; the line on the terminal says so


def forget(run: str | Path) -> None:
    """Remove the code of an earlier start."""
    (Path(run) / "exit.json").unlink(missing_ok=True)


def recorded(run: str | Path) -> int | None:
    """The code in RUN/exit.json, None if the run left none."""
    try:
        return int(json.loads((Path(run) / "exit.json").read_text())["code"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_free(folder: Path) -> bool:
    """Whether a run may use it: it is a run's, empty, not there yet, or holds what a start leaves before its config."""
    if not folder.is_dir():
        return not os.path.lexists(folder)
    if (folder / "config.yaml").is_file():
        return is_run(folder)
    return {path.name for path in folder.iterdir()} <= {"exit.json", "lock", "stalls", STOP_FILE, PROFILE_FILE}
