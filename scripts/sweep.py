"""Finds each optimizer's learning rate on a grid that grows until the best one lies inside it, and compares them there.

usage: python scripts/sweep.py BASE... --optimizer FILE [--optimizer FILE=LR,LR,LR ...] --out FOLDER [--json FILE]

An optimizer file with rates behind it is trained at those and no others, whether or not the best lies inside.
The best is the lowest held-out loss at the end (averaged weights); the score takes no part in the choice. Each run is a
folder of its own under FOLDER: a second call goes on, and takes no time for what is done.

FILE holds losses: held-out loss by optimizer file and learning rate (null if diverged), and runs: by optimizer file
what `compare.py --json` has of the best run.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import compare

from dit_train import exits, overlays
from dit_train.command_line import Parser, positive, refuse
from dit_train.config import Config, ConfigError
from dit_train.run import metrics
from dit_train.run.tracking import clock

_MOST_COLUMNS = 8
"""Of more learning rates none has a column of its own."""
_LEAST_FACTOR = 1.001
"""Rates that differ by less may be shown alike."""


def _shown(lr: float) -> str:
    """A learning rate as folders and tables name it."""
    return f"{lr:.4g}"


@dataclass(frozen=True)
class Sweep:
    """One command's settings."""

    base: list[str]
    out: Path
    ranks: int
    jobs: int
    factor: float
    start: float | None
    rates: dict[str, list[float]] = field(default_factory=dict)
    """Of optimizer files whose rates are given."""
    started: list[subprocess.Popen] = field(default_factory=list)

    def stop(self) -> None:
        """Ask every run to save and stop."""
        for started in self.started:
            if started.poll() is None:
                started.terminate()

    def folder(self, optimizer: str, lr: float) -> Path:
        """Where a run lives."""
        return self.out / Path(optimizer).stem / f"lr_{_shown(lr)}"

    def run(self, optimizer: str, lr: float) -> float:
        """Train one run (or find it done); its final held-out loss, infinity if it diverged."""
        folder = self.folder(optimizer, lr)
        overrides = ["--optimizer.lr", repr(lr), "--run.folder", str(folder), "--run.tensorboard", "false"]
        self._check_folder(folder, overlays.read([*self.base, optimizer], overrides))
        command = [sys.executable, "-m", "dit_train", "launch", "--ranks", str(self.ranks), *self.base, optimizer]
        command += overrides
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        ) as started:
            self.started.append(started)
            errors = started.stderr.read()
        if started.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {started.returncode}: {errors.strip()[-500:]}")
        losses = [row for row in metrics.read(folder / "scores.jsonl") if row["kind"] == "held-out"]
        loss = losses[-1]["heldout_loss"]
        return loss if loss is not None else math.inf

    def _check_folder(self, folder: Path, wanted: Config) -> None:
        """A run that was made with other settings must not pass for this one."""
        if (folder / "config.yaml").is_file() and overlays.read([folder / "config.yaml"]) != wanted:
            raise ConfigError(f"{folder} was trained with other settings; name another --out")


def grow(measure: Callable[[Sequence[float]], list[float]], start: float, factor: float) -> dict[float, float]:
    """Losses on {start/f, start, start·f}, extended at an edge while the best lies on it; keyed by learning rate."""
    losses: dict[float, float] = {}
    exponents = [-1, 0, 1]
    while True:
        losses |= dict(zip(exponents, measure([start * factor**e for e in exponents]), strict=True))
        best = min(losses, key=lambda e: losses[e])
        if min(losses) < best < max(losses):
            return {start * factor**e: losses[e] for e in sorted(losses)}
        exponents = [best - 1] if best == min(losses) else [best + 1]


def sweep_all(sweep: Sweep, optimizers: Sequence[str]) -> dict[str, dict[float, float]]:
    """The losses of each optimizer; runs of all optimizers share the job slots."""
    start = time.perf_counter()
    failed = threading.Event()
    with ThreadPoolExecutor(sweep.jobs) as slots, ThreadPoolExecutor(len(optimizers)) as growers:

        def measure(optimizer: str, lr: float) -> float:
            if failed.is_set():
                raise RuntimeError("another run failed")
            print(
                f"{Path(optimizer).stem}  lr {_shown(lr)}  starts or goes on in {sweep.folder(optimizer, lr)}",
                flush=True,
            )
            try:
                loss = sweep.run(optimizer, lr)
            except BaseException:
                failed.set()
                raise
            spent = clock(time.perf_counter() - start)
            print(f"{Path(optimizer).stem}  lr {_shown(lr)}  held-out loss {loss:.4f}  after {spent}", flush=True)
            return loss

        def one(optimizer: str) -> dict[float, float]:
            if given := sweep.rates.get(optimizer):
                return dict(zip(given, slots.map(partial(measure, optimizer), given), strict=True))
            first = sweep.start or overlays.read([*sweep.base, optimizer]).optimizer.lr
            return grow(lambda lrs: list(slots.map(partial(measure, optimizer), lrs)), first, sweep.factor)

        try:
            return dict(zip(optimizers, growers.map(one, optimizers), strict=True))
        except BaseException:
            failed.set()
            sweep.stop()
            raise


def _check_measured(sweep: Sweep, optimizers: Sequence[str]) -> None:
    """Refuse, before anything is trained, settings that would leave nothing to compare."""
    for optimizer in optimizers:
        config = overlays.read([*sweep.base, optimizer])
        for name, every in (("run.validate_every", config.run.validate_every), ("score.every", config.score.every)):
            if not every:
                raise ConfigError(f"{name}: a sweep compares held-out losses and scores; set it above 0")


def loss_table(losses: dict[str, dict[float, float]]) -> str:
    """A Markdown table: final held-out loss by optimizer and learning rate, the best in bold.

    A rate is a column; where there are too many, the first columns hold each optimizer's lowest rates with their loss.
    """
    lrs = sorted({lr for found in losses.values() for lr in found})
    rows = {}
    for optimizer, found in losses.items():
        best = min(found, key=found.__getitem__)
        rows[optimizer] = {lr: f"**{found[lr]:.4f}**" if lr == best else f"{found[lr]:.4f}" for lr in sorted(found)}
    if len(lrs) <= _MOST_COLUMNS:
        heads = [_shown(lr) for lr in lrs]
        cells = {optimizer: [row.get(lr, "") for lr in lrs] for optimizer, row in rows.items()}
    else:
        heads = [f"rate {number}" for number in range(1, max(map(len, rows.values())) + 1)]
        cells = {optimizer: [f"{_shown(lr)}: {cell}" for lr, cell in row.items()] for optimizer, row in rows.items()}
    lines = ["| optimizer | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for optimizer, row in cells.items():
        lines.append(f"| {Path(optimizer).stem} | " + " | ".join([*row, *[""] * (len(heads) - len(row))]) + " |")
    return "\n".join(lines)


def _file_and_rates(text: str) -> tuple[str, list[float]]:
    """``FILE`` or ``FILE=LR,LR,…``."""
    file, given, listed = text.partition("=")
    try:
        rates = [float(rate) for rate in listed.split(",")] if given else []
    except ValueError:
        rates = [math.nan]
    if not all(0 < rate < math.inf for rate in rates) or len(set(map(_shown, rates))) < len(rates):
        raise argparse.ArgumentTypeError(f"{text!r}: expected FILE=LR,LR,... with different rates above 0 (4 digits)")
    return file, rates


def _check_names(files: Sequence[str]) -> None:
    """Refuse optimizer files whose runs would share a folder."""
    for file in files:
        if files.count(file) > 1:
            raise ConfigError(f"--optimizer: {file} stands twice; name it once, with all its rates as FILE=LR,LR,...")
    stems = [Path(file).stem for file in files]
    for stem in stems:
        if stems.count(stem) > 1:
            raise ConfigError(f"--optimizer: the runs of two files named {stem} would share a folder; rename one")


def main(line: Sequence[str] | None = None) -> int:
    """Sweep, then print both tables and write the pictures of the best runs."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="+", help="config files that all runs share")
    parser.add_argument(
        "--optimizer",
        action="append",
        required=True,
        type=_file_and_rates,
        metavar="FILE[=LR,LR,...]",
        help="may be given repeatedly",
    )
    parser.add_argument("--start", type=float, help="middle of the first three rates (default: each file's lr)")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--json", type=Path, metavar="FILE", help="losses, and the numbers of the best runs")
    parser.add_argument("--ranks", type=positive, default=1, help="ranks of each run (default 1)")
    parser.add_argument("--jobs", type=positive, default=max(1, os.cpu_count() or 1), help="runs at a time (cores)")
    parser.add_argument("--factor", type=float, default=2.0, help="ratio of neighbouring rates (default 2)")
    arguments = parser.parse_args(line)
    start = arguments.start
    if not _LEAST_FACTOR < arguments.factor < math.inf or not (start is None or 0 < start < math.inf):
        parser.error(f"--factor must be above {_LEAST_FACTOR}, --start above 0")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rates = dict(arguments.optimizer)
    grid = (arguments.factor, arguments.start, {file: given for file, given in rates.items() if given})
    sweep = Sweep(arguments.base, arguments.out, arguments.ranks, arguments.jobs, *grid)
    try:
        _check_names([file for file, _ in arguments.optimizer])
        _check_measured(sweep, list(rates))
        losses = sweep_all(sweep, list(rates))
    except (ConfigError, RuntimeError) as error:
        return refuse(f"sweep.py: {error}")
    except KeyboardInterrupt:
        print("sweep.py: stopped; the same command goes on", file=sys.stderr)
        return exits.STOPPED
    try:
        report(sweep, losses, arguments.json)
    except compare.Incomparable as error:
        return refuse(f"sweep.py: {error}")
    except OSError as error:
        return refuse(f"sweep.py: {compare.unwritten(error, arguments.out)}")
    return exits.DONE


def report(sweep: Sweep, losses: dict[str, dict[float, float]], json: Path | None) -> None:
    """Print the tables, write them and the pictures of the best runs into the sweep's folder, numbers into ``json``.

    Raises:
        Incomparable: a run's folder lacks what the table needs.
        OSError: something cannot be written.
    """
    best = {name: min(found, key=found.__getitem__) for name, found in losses.items()}
    runs = [compare.read(sweep.folder(name, lr)) for name, lr in best.items()]
    ranked = sorted(runs, key=lambda run: run.losses[-1]["heldout_loss"] or math.inf)
    # times and bytes are left out: the runs shared the cores
    text = f"{loss_table(losses)}\n\n{compare.table(ranked, costs=False)}\n"
    (sweep.out / "sweep.md").write_text(text)
    if json is not None:
        finite = {
            name: {f"{lr:g}": loss if math.isfinite(loss) else None for lr, loss in found.items()}
            for name, found in losses.items()
        }
        found = {"losses": finite, "runs": dict(zip(losses, map(compare.summary, runs), strict=True))}
        compare.write_json(found, json)
    compare.draw_curves(runs, sweep.out / "comparison.png")
    compare.draw_samples(runs, sweep.out / "samples.png")
    print(f"\n{text}\n{sweep.out / 'sweep.md'}")


if __name__ == "__main__":
    sys.exit(main())
