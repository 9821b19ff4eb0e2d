"""Asked to stop: by a signal, a file, the clock, or since whoever started this process is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP", "SIGQUIT")
"""Signals that ask a run to save and stop; one that is ignored from the start, as nohup has it, stays ignored."""

_SECONDS_BETWEEN_LOOKS = 1.0  # at the file, which may lie on a slow shared disk
_END_OF_JOB = "SLURM_JOB_END_TIME"
"""Set by Slurm: when it will end the job, in seconds since 1970."""


def heeded() -> list[str]:
    """The stop signals that this process was not told to ignore."""
    return [name for name in STOP_SIGNALS if signal.getsignal(signal.Signals[name]) is not signal.SIG_IGN]


@contextlib.contextmanager
def fatal() -> Iterator[None]:
    """Let the stop signals end this process at once, where it has nothing to save and waits in a call that holds off
    Python's handlers, perhaps for a peer that will never come.
    """
    previous = {signal.Signals[name]: signal.signal(signal.Signals[name], signal.SIG_DFL) for name in heeded()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class StopRequest:
    """Takes the stop signals of this process while it is entered; later also told of a file and a time limit."""

    def __init__(self) -> None:
        self.reserve = 0.0
        """Seconds that must be left when the time limit counts as reached: for the saves and a step."""
        self._signalled: str | None = None
        self._parent = os.getppid()
        self._previous: dict[signal.Signals, Callable[..., Any] | int | None] = {}
        self._started = time.time()
        self._end = float("inf")
        self._file: Path | None = None
        self._looked = 0.0
        self._wakeup: tuple[int, int, int] | None = None

    def heed(self, *, file: Path | None, time_limit: float | None) -> None:
        """Look at a file from now on, and at the clock: `time_limit` in seconds from the start of this process.

        Slurm's end of the job counts as well, where it is known. A file that is there already is removed, since this
        start is the later wish.
        """
        self._file = file
        self.consume()
        limit = float("inf") if time_limit is None else self._started + time_limit
        job_end = os.environ.get(_END_OF_JOB, "")
        self._end = min(limit, float(job_end) if job_end.isdecimal() else float("inf"))

    @property
    def reason(self) -> str | None:
        """Why this process should stop; None if it should not. The first reason met stays."""
        self._signalled = self._signalled or self._found()
        return self._signalled

    @property
    def asked(self) -> bool:
        """Whether this process should stop."""
        return bool(self.reason)

    def arrived(self) -> bool:
        """Whether a signal has arrived or the launcher is gone, even if the main thread sits in a collective."""
        if self._wakeup is not None:
            with contextlib.suppress(BlockingIOError):
                if os.read(self._wakeup[0], 64):
                    self._signalled = self._signalled or "a signal"
        return bool(self._signalled) or self._orphaned

    @contextlib.contextmanager
    def handed_over(self) -> Iterator[None]:
        """While code inside puts handlers of its own in the place of these, which may take it seconds.

        A signal that has come before the last of them is in its place is sent again then.
        """
        over = threading.Event()

        def watch() -> None:
            while any(signal.getsignal(number) == self._handle for number in self._previous):
                if over.wait(0.05):
                    return
            if self._signalled in heeded():
                os.kill(os.getpid(), signal.Signals[self._signalled])

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()

    def consume(self) -> None:
        """Remove the file: the same command then goes on."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)

    def __enter__(self) -> StopRequest:
        for name in heeded():
            number = signal.Signals[name]
            self._previous[number] = signal.signal(number, self._handle)
        read, write = os.pipe()  # written to as a signal arrives, whatever the main thread is doing
        for end in (read, write):
            os.set_blocking(end, False)
        self._wakeup = (read, write, signal.set_wakeup_fd(write, warn_on_full_buffer=False))
        return self

    def __exit__(self, *_: object) -> None:
        if self._wakeup is not None:
            read, write, before = self._wakeup
            self._wakeup = None
            signal.set_wakeup_fd(before)
            os.close(read)
            os.close(write)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def _orphaned(self) -> bool:
        return os.getppid() != self._parent

    def _handle(self, number: int, _: object) -> None:
        self._signalled = signal.Signals(number).name

    def _found(self) -> str | None:
        """A reason other than a signal."""
        if self._orphaned:  # it would else train on unseen
            return "its launcher is gone"
        if time.time() > self._end - self.reserve:
            return "the time limit"
        if self._file is not None and time.monotonic() - self._looked > _SECONDS_BETWEEN_LOOKS:
            self._looked = time.monotonic()
            if self._file.exists():
                return f"the file {self._file}"
        return None
