"""What ranks tell each other beside the collectives: which failed first and why, and that they are alive.

It goes through the store of the process group, which torchrun's agent keeps, so it works while every rank that is left
sits in a collective that will never end.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

_FAILURE = "failure"
_LONGEST_ANSWER = timedelta(seconds=10)


@dataclass(frozen=True)
class Failure:
    """Why a run cannot go on."""

    rank: int
    code: int
    """Exit code of all ranks."""
    message: str
    """One line."""


class Peers:
    """This rank's word to the others, and theirs; each thread has an instance of its own."""

    def __init__(self, store: dist.Store | None, rank: int, size: int) -> None:
        """Without a store, as in a group that the caller has started, there is nobody to tell."""
        self.rank, self._size = rank, size
        self._store = None if store is None else dist.PrefixStore("dit_train", store.clone())
        if self._store is not None:
            self._store.set_timeout(_LONGEST_ANSWER)
        self._heard: dict[int, tuple[bytes, float]] = {}

    def claim(self, code: int, message: str) -> Failure:
        """Say that this rank failed; returns the failure of the rank that said so first, which may be this one."""
        mine = Failure(self.rank, code, message)
        if self._store is None:
            return mine
        try:
            return Failure(**json.loads(self._store.compare_set(_FAILURE, "", json.dumps(asdict(mine)))))
        except RuntimeError:  # the store is gone with the first host
            return mine

    def failure(self) -> Failure | None:
        """What the first failed rank said; None if all is well, or if nobody can be asked."""
        try:
            if self._store is None or not self._store.check([_FAILURE]):
                return None
            return Failure(**json.loads(self._store.get(_FAILURE)))
        except RuntimeError:
            return None

    def say_alive(self) -> None:
        """Renew this rank's sign of life; every rank does so before any looks for it."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # of a store that is gone, which `silent` tells
                self._store.set(f"alive/{self.rank}", str(time.time_ns()))

    def silent(self, seconds: float) -> str | None:
        """Names a peer that has shown no life while this was asked again and again for `seconds`.

        Raises `RuntimeError` where the store is gone.
        """
        if self._store is None:
            return None
        now = time.monotonic()
        signs = self._store.multi_get([f"alive/{rank}" for rank in range(self._size)])
        for rank, sign in enumerate(signs):
            if rank not in self._heard or self._heard[rank][0] != sign:
                self._heard[rank] = (sign, now)
        return next((f"rank {rank}" for rank, (_, since) in self._heard.items() if now - since > seconds), None)
