"""Asked to stop: by a signal, or since whoever started this process is gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP", "SIGQUIT")
"""Signals that ask a run to save and stop; one that is ignored from the start, as nohup has it, stays ignored."""


def heeded() -> list[str]:
    """The stop signals that this process was not told to ignore."""
    return [name for name in STOP_SIGNALS if signal.getsignal(signal.Signals[name]) is not signal.SIG_IGN]


@contextmanager
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
    """Takes the stop signals of this process while it is entered."""

    def __init__(self) -> None:
        self._signalled = False
        self._parent = os.getppid()
        self._previous: dict[signal.Signals, Callable[..., Any] | int | None] = {}

    @property
    def asked(self) -> bool:
        """Whether this process should stop; a rank whose agent was killed would else train on unseen."""
        return self._signalled or os.getppid() != self._parent

    def __enter__(self) -> StopRequest:
        for name in heeded():
            number = signal.Signals[name]
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, *_: object) -> None:
        self._signalled = True
