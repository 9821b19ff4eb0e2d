"""The command line: ``torchrun -m dit_train``, ``python -m dit_train launch``, ``dit-train``."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import textwrap
import time
import traceback
import typing
from collections.abc import Sequence
from typing import Any

from dit_train import console, exits, overlays
from dit_train.checkpoint import verify
from dit_train.config import Config, ConfigError
from dit_train.optimizer_config import OptimizerConfig
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
        console.err(f"dit_train: {error}")
        if run_folder is not None:
            folder.record(run_folder, exits.BAD_INPUT, str(error))
        return
    time.sleep(_SECONDS_FOR_RANK_0)
    if local_rank == 0:
        console.err(f"dit_train: {socket.gethostname()}: {error}")


def _start(config: Config, ranks: int, words: list[str], launching: bool, stop: StopRequest) -> int:
    from dit_train import preflight

    plan = preflight.check(config, ranks)
    if plan.finished:
        if int(os.environ.get("RANK", 0)) == 0:
            console.out(f"{config.run.folder}  done: {plan.resume.state.step} steps")
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
    """Usage, then every setting with the defaults that the given files and arguments leave, then the optimizers."""
    console.out(_USAGE)
    asked = {"-h", "--help"} & set(words)
    if not asked:
        return exits.BAD_INPUT
    import tyro

    words = [word for word in words if word not in asked]
    with contextlib.suppress(ConfigError):
        _, words = _take_ranks(words)
    try:
        default = overlays.read(*_split(words))
    except ConfigError as error:
        console.err(f"dit_train: {error}")
        return exits.BAD_INPUT
    flags = (tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff)
    with contextlib.suppress(SystemExit):
        tyro.cli(Config, default=default, args=["--help"], config=flags, prog="dit_train")
    console.out(_optimizers())
    return exits.DONE


def _optimizers() -> str:
    """Every optimizer with its settings and their defaults, as far as they differ from the first of its kind."""
    blocks = ["optimizers; what each setting means: --help --optimizer.name NAME (and --optimizer.form or .ball)"]
    members = typing.get_args(OptimizerConfig)
    for of_matrices, title in ((False, "for every parameter"), (True, "for matrices, beside AdamW for the rest")):
        blocks.append(title)
        first: dict[str, str] = {}
        for one in (member for member in members if hasattr(member, "momentum_dtype") == of_matrices):
            settings = _flat(one())
            own = [f"{key} {value}" for key, value in settings.items() if first.get(key) != value]
            lacking = ", ".join(key.removeprefix("--optimizer.") for key in first if key not in settings)
            lines = [" ".join(own), f"without {lacking}" if lacking else ""]
            first = first or settings
            indent = {"initial_indent": "    ", "subsequent_indent": "      ", "break_on_hyphens": False}
            text = "\n".join(textwrap.fill(line, 110, **indent) for line in lines if line)
            blocks.append(f"  {one.__doc__}\n{text}")
    return "\n".join(blocks)


def _flat(settings: Any) -> dict[str, str]:
    """Defaults, as YAML has them, by their flags."""
    found = {}
    for key, value in overlays.to_dict(settings).items():
        inner = value if isinstance(value, dict) else {"": value}
        for name, item in inner.items():
            flag = f"--optimizer.{key}{'.' * bool(name)}{name}".replace("_", "-")
            found[flag] = " ".join(map(str, item)) if isinstance(item, list) else json.dumps(item)
    return found


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
