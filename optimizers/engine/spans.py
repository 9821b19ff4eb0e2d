"""What the time of a step goes to: momentum, exchange, orthogonalisation, update, and what is left.

    momentum            the new M, and U where it is formed as a whole, in the dtype in which it travels
    exchange            waiting for what other ranks send, and launching what this one does; what travels while
                        something is computed is not waited for and does not count
    orthogonalisation   Newton–Schulz, of whole matrices or of blocks
    update              decay and add; all of AdamW and of row steps, each of which is one walk from gradient to weight,
                        and of low-rank steps
    other               choosing what to do, above all on the host

A stretch inside another counts as its own kind only, so that the five sum to the step.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

KINDS = ("momentum", "exchange", "orthogonalisation", "update", "other")


class Spans:
    """Times of the last step by kind: by events on a GPU, read later without stalling it; by the clock on a CPU.

    Events lie on the stream that is current when a step begins, which waits for collectives: exchange is how long it
    stood still for them.
    """

    def __init__(self, device: Callable[[], torch.device]) -> None:
        """``device``: where the present step runs; asked as each begins."""
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._inside: list[str] = []
        self._marks: list[tuple[str | None, Any]] = []
        self._milliseconds: dict[str, float] | None = {}

    @contextmanager
    def of(self, kind: str) -> Iterator[None]:
        """Count what happens inside, less what is counted in there, as one of ``KINDS``; the outermost is a step."""
        if not self._inside:
            self._begin()
        self._inside.append(kind)
        self._mark()
        try:
            yield
        finally:
            self._inside.pop()
            self._mark()

    def milliseconds(self) -> dict[str, float]:
        """Of the last step by kind, {} before the first; on a GPU waits for its end."""
        if self._milliseconds is None:
            found = dict.fromkeys(KINDS, 0.0)
            if self._stream is not None:
                self._marks[-1][1].synchronize()
            for (kind, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
                found[kind] += 1e3 * (end - start) if self._stream is None else start.elapsed_time(end)
            self._milliseconds, self._marks = found, []
        return dict(self._milliseconds)

    def _begin(self) -> None:
        device = self._device()
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._marks, self._milliseconds = [], None

    def _mark(self) -> None:
        """From now on it is the innermost kind's time."""
        kind = self._inside[-1] if self._inside else None
        if not self._marks or kind != self._marks[-1][0]:
            now = time.perf_counter() if self._stream is None else torch.cuda.Event(enable_timing=True)
            if self._stream is not None:
                now.record(self._stream)
            self._marks.append((kind, now))


def spent_on(kind: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Count a method of something with ``_spans`` as ``kind`` where that is not None, which is all it costs else."""

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def counted(self: Any, *args: Any, **options: Any) -> R:
            if self._spans is None:
                return method(self, *args, **options)
            with self._spans.of(kind):
                return method(self, *args, **options)

        return counted

    return decorate
