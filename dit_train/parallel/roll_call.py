"""The ranks of one start find each other in a store that may still hold what an earlier start has left.

torchrun's agent keeps the store of its ranks over restarts (``--max-restarts``), and with it the addresses and words of
ranks that are gone: a rank that reads those connects to nobody, or ends with a failure of the past.
"""

from __future__ import annotations

import time
import uuid

import torch.distributed as dist

from dit_train import console

_LOOK_EVERY = 0.05
_SAY_AFTER = 30.0


def meet(store: dist.Store, rank: int, size: int, seconds: float) -> dist.Store:
    """Wait until all ranks of this start are here; returns a part of `store` that no other start has used.

    Rank 0 calls a new name, every other rank answers it with a name of its own, and rank 0 lists the answers: a rank
    that has answered an old call does not find itself in the list, and waits for the next.

    Raises:
        Absent: a rank has not come within `seconds`.
    """
    mine = uuid.uuid4().hex
    call = _call(store, size, mine, seconds) if rank == 0 else _answer(store, rank, mine, seconds)
    return dist.PrefixStore(f"start/{call}", store)


class Absent(RuntimeError):
    """Ranks that have not come, and what to do."""


def _call(store: dist.Store, size: int, call: str, seconds: float) -> str:
    """Rank 0's part; returns its call."""
    store.set("call", call)
    started, said = time.monotonic(), False
    answers: dict[int, str] = {}
    while missing := [rank for rank in range(1, size) if rank not in answers]:
        waited = time.monotonic() - started
        if waited > seconds:
            raise Absent(
                f"{_ranks(missing)} of {size} did not come within {seconds:.0f} s; look at what the hosts of these "
                "say, and give all the same command"
            )
        if waited > _SAY_AFTER and not said:
            said = True
            console.err(f"dit_train: waiting for {_ranks(missing)} of {size}")
        present = [rank for rank in missing if store.check([f"answer/{rank}"])]
        for rank, answer in zip(present, _get(store, [f"answer/{rank}" for rank in present]), strict=True):
            to, _, name = answer.partition(" ")
            if to == call:
                answers[rank] = name
        time.sleep(_LOOK_EVERY)
    store.set(f"list/{call}", " ".join(answers[rank] for rank in range(1, size)))
    return call


def _answer(store: dist.Store, rank: int, mine: str, seconds: float) -> str:
    """Any other rank's part; returns rank 0's call."""
    started = time.monotonic()
    answered = ""
    while time.monotonic() - started < seconds:
        if store.check(["call"]):
            call = _get(store, ["call"])[0]
            if call != answered:
                store.set(f"answer/{rank}", f"{call} {mine}")
                answered = call
            if store.check([f"list/{call}"]) and mine in _get(store, [f"list/{call}"])[0].split():
                return call
        time.sleep(_LOOK_EVERY)
    raise Absent(f"rank {rank} was not let in by rank 0 within {seconds:.0f} s; look at what its host says")


def _get(store: dist.Store, keys: list[str]) -> list[str]:
    return [value.decode() for value in store.multi_get(keys)] if keys else []


def _ranks(missing: list[int]) -> str:
    shown = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
    return f"rank {shown}" if len(missing) == 1 else f"ranks {shown}"
