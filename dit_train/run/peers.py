"""What ranks tell each other beside the collectives: which failed first and why, and that they are alive.

It goes through the store of the process group, which torchrun's agent keeps, so it works while every rank that is left
sits in a collective that will never end.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_FAILURE = "failure"
_LONGEST_ANSWER = 10.0  # seconds
FIRST_HOST = "the first host"


@dataclass(frozen=True)
class Failure:
    """Why a run cannot go on."""

    rank: int
    code: int
    """Exit code of all ranks."""
    message: str
    """One line."""


class Peers:
    """This rank's word to the others, and theirs; each thread has an instance of its own.

    No call takes more than ten seconds, whatever has become of the other hosts.
    """

    def __init__(self, store: dist.Store | None, rank: int, size: int) -> None:
        """Without a store, as in a group that the caller has started, there is nobody to tell."""
        self.rank, self._size = rank, size
        self._store = None if store is None else dist.PrefixStore("dit_train", store.clone())
        if self._store is not None:
            self._store.set_timeout(timedelta(seconds=_LONGEST_ANSWER))
        self._asked: Future | None = None
        self._answered = time.monotonic()
        self._heard = (b"", time.monotonic())

    def claim(self, code: int, message: str) -> Failure:
        """Say that this rank failed; returns the failure of the rank that said so first, which may be this one."""
        mine = Failure(self.rank, code, message)
        if self._store is None:
            return mine
        words = json.dumps(asdict(mine))
        try:
            return Failure(**json.loads(self._ask(lambda store: store.compare_set(_FAILURE, "", words))))
        except RuntimeError:  # the store is gone with the first host
            return mine

    def failure(self) -> Failure | None:
        """What the first failed rank said; None if all is well, or if nobody can be asked."""
        try:
            if self._store is None or not self._ask(lambda store: store.check([_FAILURE])):
                return None
            return Failure(**json.loads(self._ask(lambda store: store.get(_FAILURE))))
        except RuntimeError:
            return None

    def say_alive(self) -> None:
        """Renew this rank's sign of life; every rank does so before any looks for it."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # of a store that is gone, which `silent` tells
                self._ask(lambda store: store.set(f"alive/{self.rank}", str(time.time_ns())))

    def silent(self, seconds: float) -> str | None:
        """Names the next rank if it has shown no life while this was asked again and again for `seconds`.

        Each rank looks after the one that follows it, so that the store is asked for few signs by many ranks. Raises
        `RuntimeError` where the store does not answer; `unanswered` says for how long.
        """
        if self._store is None:
            return None
        follower = (self.rank + 1) % self._size
        sign, now = self._ask(lambda store: store.get(f"alive/{follower}")), time.monotonic()
        if sign != self._heard[0]:
            self._heard = (sign, now)
        return f"rank {follower}" if now - self._heard[1] > seconds else None

    def unanswered(self) -> float:
        """Seconds since the store has answered last."""
        return time.monotonic() - self._answered

    def _ask(self, call: Callable[[dist.Store], Any]) -> Any:
        """What `call` gets of the store; a store whose host is cut off holds up some calls for ever, time-out or not.

        Raises:
            RuntimeError: no answer in time, or the one before is still awaited.
        """
        if self._asked is not None and not self._asked.done():
            raise RuntimeError("the store has not answered yet")
        self._asked = asked = Future()
        threading.Thread(target=_fulfil, args=(asked, call, self._store), name="peers", daemon=True).start()
        try:
            answer = asked.result(_LONGEST_ANSWER)
        except TimeoutError:
            raise RuntimeError("the store does not answer") from None
        if answer is not None:  # None is of `set`, which does not wait for one
            self._answered = time.monotonic()
        return answer


def _fulfil(asked: Future, call: Callable[[dist.Store], Any], store: dist.Store) -> None:
    try:
        asked.set_result(call(store))
    except Exception as error:
        asked.set_exception(error)
