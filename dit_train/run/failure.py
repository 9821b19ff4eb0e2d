"""How a rank leaves that cannot go on: the first one to fail tells why, the others point to it."""

from __future__ import annotations

import os
import re
import traceback

import torch.distributed as dist

from dit_train import console, exits
from dit_train.config import ConfigError
from dit_train.parallel.roll_call import Absent
from dit_train.run import folder
from dit_train.run.peers import Peers
from dit_train.run.watchdog import echo


class Left(BaseException):
    """This rank has said what there is to say and ends with `code`; no collective may follow, nor another handler."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def leave(run_folder: str, peers: Peers, error: Exception) -> Left:
    """Tell the other ranks, the run folder and a person about an error; to be raised.

    Bad input is one line and code 2, anything else a traceback and code 1. The rank that fails first speaks before it
    closes any connection, so a peer that the broken collective ends finds the failure told and adds one line only.
    """
    code, message = _describe(error)
    first = peers.claim(code, message)
    if first.rank == peers.rank:
        text = message if code == exits.BAD_INPUT else f"rank {peers.rank}: {message}"
        folder.record(run_folder, code, text)
        if code == exits.FAILED and not _is_echo(error):
            text = f"rank {peers.rank} failed\n{''.join(traceback.format_exception(error))}".rstrip()
    else:
        text = "" if first.code == exits.BAD_INPUT else echo(peers.rank, first)
    if text:  # written at once, or the lines of several ranks would mix
        console.err(f"dit_train: {text}")
    return Left(first.code)


def tell_absent(run_folder: str, absent: Absent) -> None:
    """Say that ranks have not come; no group exists, so each rank speaks for itself and rank 0 records it."""
    if int(os.environ.get("RANK", 0)) == 0:
        folder.record(run_folder, exits.FAILED, str(absent))
    console.err(f"dit_train: {absent}")


def _describe(error: Exception) -> tuple[int, str]:
    """Exit code and one line."""
    if isinstance(error, ConfigError):
        return exits.BAD_INPUT, str(error)
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError | ConnectionError):
        return exits.BAD_INPUT, f"run.folder: {error}; mend it and run the same command"  # no space, a disk is gone, …
    line = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return exits.FAILED, f"a peer was killed, or its host is gone ({line})" if _is_echo(error) else line


def _is_echo(error: Exception) -> bool:
    """Whether a collective has broken off, which is not where the fault lies."""
    broken = re.search(r"(closed|reset) by peer|Broken pipe", str(error)) is not None  # in gloo's words
    return isinstance(error, dist.DistNetworkError | dist.DistBackendError) or (
        broken and isinstance(error, RuntimeError)
    )
