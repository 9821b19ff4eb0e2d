"""A slow link: an all-to-all completes no earlier than so many milliseconds after its launch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

SECONDS_PER_BYTE = 0.030 / (4 * 2**20)


class SlowWork:
    """A ``Work`` that completes when the real one has and the link has had its time. All else is the real one's."""

    def __init__(self, work: Any, ready: float, rest: float = 0.0) -> None:
        self._work, self._ready, self._rest = work, ready, rest

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for both."""
        result = self._work.wait(*args, **kwargs)
        time.sleep(max(self._rest, self._ready - time.monotonic()))
        return result

    def is_completed(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._work.is_completed() and time.monotonic() >= self._ready

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextmanager
def slow_link(seconds_per_byte: float = SECONDS_PER_BYTE, rest: float = 0.0) -> Iterator[list[int]]:
    """Delay every asynchronous ``all_to_all_single`` inside by the bytes of its larger buffer; yields those bytes.

    Transfers do not queue behind each other: what is measured is whether work goes on while one is under way. Every
    wait takes ``rest`` seconds more at least.
    """
    real, seen = dist.all_to_all_single, []

    def delayed(output: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        work = real(output, input, *args, **kwargs)
        if work is None:
            return None
        size = max(output.nbytes, input.nbytes)
        seen.append(size)
        return SlowWork(work, time.monotonic() + size * seconds_per_byte, rest)

    dist.all_to_all_single = delayed
    try:
        yield seen
    finally:
        dist.all_to_all_single = real
