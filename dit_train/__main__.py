"""The command line: ``torchrun -m dit_train``, ``python -m dit_train launch``, ``dit-train``."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sys
import time
import traceback
import typing
from collections.abc import Sequence
from typing import Any

from dit_train import exits, overlays
from dit_train.checkpoint import verify
from dit_train.config import Config, ConfigError, OptimizerConfig
from dit_train.run import folder
from dit_train.run.stop import StopRequest

_USAGE = """\
usage: torchrun --nproc-per-node N -m dit_train CONFIG... [--section.key VALUE ...]
       python -m dit_train launch --ranks N CONFIG... [--section.key VALUE ...]
       python -m dit_train verify RUN...

Trains a class-conditional DiT. CONFIG files are laid over each other in order, then the command line; configs that
come with the package are found by name (configs/quickstart/base.yaml). The same command again resumes; a finished
run returns at once. Where settings changed, those of the command win over the checkpoint's, or are refused if they
would make it another model. `launch` checks everything first, starts N local ranks and returns the run's own exit code:
0 done, 1 failed, 2 bad input, 85 asked to stop and resumable (also in RUN/exit.json). A run stops on a signal, at
run.time_limit, or when there is a file RUN/stop. `verify` reads a run's checkpoints and returns 0 if all are as they
were written, 2 if one is not.
"""

_SECONDS_FOR_RANK_0 = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["verify"]:
        return verify.main(words[1:])
    launching = words[:1] == ["launch"]
    words = words[1:] if launching else words
    if not words or {"-h", "--help"} & set(words):
        return _help(words)
    run_folder = None
    try:
        ranks, words = _take_ranks(words) if launching else (int(os.environ.get("WORLD_SIZE", 1)), words)
        config = _read(words)
        run_folder = config.run.folder
        with StopRequest() as stop:  # from here on, since imports take seconds
            return _start(config, ranks, words, launching, stop)
    except ConfigError as error:
        _tell(error, None if launching else run_folder)
        return exits.BAD_INPUT


def _tell(error: ConfigError, run_folder: str | None) -> None:
    """Rank 0 prints the line and records the code; the others leave it the time to, since torchrun ends all at once.

    Where another host alone has met bad input, its first rank speaks.
    """
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    if rank == 0:
        print(f"dit_train: {error}", file=sys.stderr, flush=True)
        if run_folder is not None:
            folder.record(run_folder, exits.BAD_INPUT, str(error))
        return
    time.sleep(_SECONDS_FOR_RANK_0)
    if local_rank == 0:
        print(f"dit_train: {socket.gethostname()}: {error}", file=sys.stderr, flush=True)


def _start(config: Config, ranks: int, words: list[str], launching: bool, stop: StopRequest) -> int:
    from dit_train import preflight

    plan = preflight.check(config, ranks)
    if plan.finished:
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"{config.run.folder}  done: {plan.resume.state.step} steps", flush=True)
            folder.record(config.run.folder, exits.DONE, "done")
        return exits.DONE
    if launching:
        from dit_train.launch import launch

        return launch(plan, ranks, words, stop)
    from dit_train.run.loop import train

    if stop.asked:  # nothing to save, and a peer who is gone already would be waited for
        return exits.STOPPED
    return train(plan, stop)


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Config files, and the arguments from the first ``--`` on."""
    first = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    return list(words[:first]), list(words[first:])


def _read(words: Sequence[str]) -> Config:
    files, overrides = _split(words)
    if not files:
        raise ConfigError("name at least one config file, for example configs/quickstart/base.yaml")
    return overlays.read(files, overrides)


def _take_ranks(words: list[str]) -> tuple[int, list[str]]:
    """``--ranks N`` (or ``--ranks=N``) out of the arguments of `launch`."""
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--ranks":
            value = value if equals else "".join(words[i + 1 : i + 2])
            if not value.isdecimal() or int(value) < 1:
                raise ConfigError(f"--ranks: expected a whole number above 0, not {value!r}")
            return int(value), words[:i] + words[i + (1 if equals else 2) :]
    raise ConfigError("launch needs --ranks N, the number of local ranks (one a GPU, or for example 2 on a CPU)")


def _help(words: list[str]) -> int:
    """Usage, then every setting with the defaults that the given config files leave."""
    print(_USAGE, flush=True)
    if not {"-h", "--help"} & set(words):
        return exits.BAD_INPUT
    import tyro

    files, _ = _split(words)
    try:
        default = overlays.read(files)
    except ConfigError as error:
        print(f"dit_train: {error}", file=sys.stderr)
        return exits.BAD_INPUT
    flags = (tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff)

    def show(settings: Any, title: str) -> None:
        with contextlib.suppress(SystemExit):
            tyro.cli(type(settings), default=settings, args=["--help"], config=flags, prog=title)

    show(default, "dit_train")
    for other in typing.get_args(OptimizerConfig):
        if type(default.optimizer) is not other:
            only = dataclasses.make_dataclass("Other", [("optimizer", other)])
            only.__doc__ = "With that optimizer instead."
            show(only(other()), f"dit_train --optimizer.name {other.name}")
    return exits.DONE


if __name__ == "__main__":
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = exits.FAILED
    if "RANK" in os.environ:  # gloo's threads abort the process now and then while the interpreter ends, NCCL's wait
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
