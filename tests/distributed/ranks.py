"""Runs a function on N gloo ranks, each a process of its own, and brings results and errors back.

Importing torch costs a process seconds: start ranks once and check many things inside.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any


class RankError(AssertionError):
    """A rank raised, died or did not finish; the message holds its traceback."""


def run(function: Callable[..., Any], ranks: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call ``function(*args)`` on every rank inside a gloo process group; the results by rank.

    The function has to be importable (top level of its module), arguments and results picklable. The first error of
    any rank ends the others and is raised here as a ``RankError``.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes, ends = [], []
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"  # inherited, and read when the child imports torch
        try:
            for rank in range(ranks):
                end, other = context.Pipe(duplex=False)
                store = str(Path(folder) / "store")
                process = context.Process(
                    target=_rank_main, args=(function, args, rank, ranks, store, other, timeout), daemon=True
                )
                process.start()
                other.close()
                processes.append(process)
                ends.append(end)
        finally:
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = before
        try:
            return _collect(ends, timeout)
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()


def run_case(case: Callable[[], None]) -> None:
    """Call one of several checks that share a start; an error names it."""
    try:
        case()
    except BaseException as error:
        raise AssertionError(f"case {case.__name__}") from error


def _collect(ends: list[Connection], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(results) < len(ends):
        missing = [rank for rank in range(len(ends)) if rank not in results]
        ready = wait([ends[rank] for rank in missing], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {missing} of {len(ends)} did not finish in {timeout:.0f} s")
        for end in ready:
            rank = ends.index(end)
            try:
                ok, value = pickle.loads(end.recv_bytes())
            except EOFError:
                raise RankError(f"rank {rank} of {len(ends)} died without a word") from None
            if not ok:
                raise RankError(f"rank {rank} of {len(ends)}:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(ends))]


def _rank_main(
    function: Callable[..., Any], args: tuple, rank: int, ranks: int, store: str, end: Connection, timeout: float
) -> None:
    import torch
    import torch.distributed as dist

    faulthandler.dump_traceback_later(max(1.0, timeout - 5), exit=False)  # shows where a hanging rank stands
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout)
    )
    try:
        answer = pickle.dumps((True, function(*args)))  # by value: shared memory would end with this process
        dist.barrier()
    except BaseException:
        end.send_bytes(pickle.dumps((False, traceback.format_exc())))
        os._exit(1)  # the others wait in a collective: an orderly farewell would hang
    end.send_bytes(answer)
    dist.destroy_process_group()
