"""A thread that sees whether this rank still moves, while the main thread may sit in a collective for ever."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from pathlib import Path

from dit_train import console, exits
from dit_train.config import RunConfig
from dit_train.run import folder
from dit_train.run.peers import FIRST_HOST, Failure, Peers
from dit_train.run.stop import StopRequest

FOLDER = "stalls"
_LOOK_EVERY = 1.0
_ALIVE_EVERY = 5.0
_QUIET_AFTER = 5.0  # seconds without progress before peers are asked after; the main thread speaks first if it can
_DEAD_AFTER = 15.0  # seconds without a sign of life
_STORE_GONE_AFTER = 60.0  # seconds without progress where nobody's signs of life can be read


class Watchdog:
    """Writes the stacks of a rank that stalls; ends one that waits for a peer that has failed, or is dead or cut off.

    A host that is cut off closes no connection, so that gloo would wait for half an hour and NCCL for ten minutes; and
    a signal reaches no Python code while the main thread waits inside a collective. It is this thread that then leaves.
    """

    def __init__(self, settings: RunConfig, stop: StopRequest, peers: Peers) -> None:
        self._folder, self._stop, self._peers = settings.folder, stop, peers
        self._stall_seconds, self._ends_run = settings.stall_seconds, settings.stall_ends_run
        self._silence_seconds = settings.silence_seconds
        self._last, self._since, self._patience = "the start", time.monotonic(), 0.0
        self._reported = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self, what: str, *, patience: float = 0.0) -> None:
        """Something has ended: a step, a batch of an evaluation, a save. What comes next may take `patience` longer."""
        self._last, self._since, self._patience, self._reported = what, time.monotonic(), patience, False

    def __enter__(self) -> Watchdog:
        self._peers.say_alive()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        alive = time.monotonic()
        while not self._ended.wait(_LOOK_EVERY):
            if time.monotonic() - alive > _ALIVE_EVERY:
                alive = time.monotonic()
                self._peers.say_alive()
            quiet = time.monotonic() - self._since
            if quiet > _QUIET_AFTER:
                self._look_after_peers(quiet)
            if self._stall_seconds and quiet > self._stall_seconds + self._patience and not self._reported:
                self._reported = True
                self._report(quiet)

    def _look_after_peers(self, quiet: float) -> None:
        """Leave if a peer has failed, or nobody hears of it any more: soon where this rank is asked to stop."""
        failure = self._peers.failure()
        if failure is not None and failure.rank != self._peers.rank:
            self._leave(failure)
        asked, unheard = self._stop.arrived(), min(quiet, self._peers.unanswered()) - self._patience
        seconds = _DEAD_AFTER if asked else self._silence_seconds
        if not seconds:
            return
        silent = self._silent(seconds, unheard > (_STORE_GONE_AFTER if asked else seconds))
        if silent is not None and asked:
            self._fail(f"asked to stop, but {silent} is dead and nothing can be saved")
        if silent is not None:
            self._fail(f"no sign of life of {silent} for {seconds:.0f} s: it is dead, or its host is gone or cut off")

    def _silent(self, seconds: float, store_is_gone: bool) -> str | None:
        """Names who has shown no life for so long, if anyone."""
        try:
            return self._peers.silent(seconds)
        except RuntimeError:  # the first host's agent is gone or cut off; ranks may still be able to save
            return FIRST_HOST if store_is_gone else None

    def _report(self, quiet: float) -> None:
        """Write the stacks of all threads and say so."""
        rank = self._peers.rank
        path = Path(self._folder) / FOLDER / f"rank_{rank}.txt"
        line = f"rank {rank}: nothing has ended for {quiet:.0f} s after {self._last}"
        try:
            path.parent.mkdir(exist_ok=True)
            with path.open("a") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {line}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            _say(f"{line}; the stacks of its threads are in {path}")
        except OSError:  # the disk may be what stalls
            _say(f"{line}; the stacks of its threads:")
            faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
        if self._ends_run:
            self._fail(f"stalled after {self._last}")

    def _fail(self, message: str) -> None:
        failure = self._peers.claim(exits.FAILED, message)
        if failure.rank == self._peers.rank:
            folder.record(self._folder, failure.code, f"rank {failure.rank}: {message}")
        self._leave(failure)

    def _leave(self, failure: Failure) -> None:
        rank = self._peers.rank
        _say(f"rank {rank}: {failure.message}" if failure.rank == rank else echo(rank, failure))
        os._exit(failure.code)


def echo(rank: int, failure: Failure) -> str:
    """The one line of a rank that ends since another has failed."""
    return f"rank {rank} ends with rank {failure.rank}, which failed: {failure.message}"


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        console.err(f"dit_train: {line}")
