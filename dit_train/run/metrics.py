"""metrics.jsonl: a line a step; on resume, lines after the checkpoint are dropped."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


class JsonLines:
    """A file with one JSON object a line, each with a ``step``."""

    def __init__(self, path: Path, *, keep_through: int) -> None:
        """Open for appending, after dropping lines whose step is above `keep_through` or that were cut off."""
        self.path = path
        kept = [json.dumps(row) for row in read(path) if row["step"] <= keep_through]
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".tmp")
        beside.write_text("".join(f"{line}\n" for line in kept))
        beside.replace(path)
        self._file = path.open("ab", buffering=0)
        self._owed = b""

    def write(self, row: dict[str, Any]) -> None:
        """Append a line; a number that is not finite becomes null, since JSON has none.

        Raises `OSError` where the disk is full; a later call then writes what is owed, so no line is lost or cut.
        """
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
        }
        self._owed += f"{json.dumps(finite)}\n".encode()
        while self._owed:
            self._owed = self._owed[self._file.write(self._owed) :]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a file, [] if there is none."""
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the last line of a killed run
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def is_late(device: torch.device) -> bool:
    """Whether what a device has done is known only after it is waited for."""
    return device.type == "cuda"


class LateRow:
    """A row whose last figures are asked for when that costs no waiting: on a GPU, once the next step has met it.

    ``tell`` takes a whole row. Without ``late`` it is told at once.
    """

    def __init__(self, tell: Callable[[dict[str, Any]], None], late: bool) -> None:
        self._tell, self._late = tell, late
        self._held: tuple[dict[str, Any], Callable[[], dict[str, Any]]] | None = None

    def hold(self, row: dict[str, Any], rest: Callable[[], dict[str, Any]]) -> None:
        """Keep a row, and how to get what it lacks, until ``flush``."""
        self.flush()
        self._held = row, rest
        if not self._late:
            self.flush()

    def flush(self) -> None:
        """Tell the row that is held, if there is one."""
        if self._held is not None:
            (row, rest), self._held = self._held, None
            self._tell({**row, **rest()})


class Stopwatch:
    """Milliseconds of a span of work: by events on a GPU, read later without stalling it; by the clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._span: tuple[Any, Any] | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time what happens inside."""
        start = self._now()
        try:
            yield
        finally:
            self._span = (start, self._now())

    def milliseconds(self) -> float:
        """Length of the span since the last call, 0 if there was none; on a GPU waits for its end."""
        if self._span is None:
            return 0.0
        (start, end), self._span = self._span, None
        if not self._cuda:
            return 1e3 * (end - start)
        end.synchronize()
        return start.elapsed_time(end)

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
