"""Compares runs that differ in their optimizer: a table, score curves, samples side by side.

usage: python scripts/compare.py RUN... --out FOLDER [--json FILE]

Scores are Fréchet distances and KID against held-out images, beside the floor that as many training images get. Runs
whose scores were not taken alike are refused.

FILE holds, by run folder: optimizer, lr, score (the last record), best (the record of the lowest value), heldout_loss
(null if diverged), optimizer_ms, step_ms and wire_bytes (means a step).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dit_train import overlays
from dit_train.command_line import Parser, refuse
from dit_train.config import ConfigError
from dit_train.run import metrics
from dit_train.run.period import period_of
from eval import records
from eval.records import Incomparable

_NUMBERS = {
    "score": ("value", "kid", "kid_standard_error", "floor", "floor_kid", "train_seconds"),
    "held-out": ("heldout_count",),
    "step": ("optimizer_ms", "step_ms", "wire_bytes"),
}
"""What a row of each kind must hold for the table and the pictures."""
_SECTIONS = ("model", "data", "objective", "schedule", "train")
_WARM_UP = 10
"""Steps left out of the times."""
_MANY = 6
"""Of more runs the samples take several rows, and the legend a place beside the curves."""
_DASHES = ("-", "--", ":")
"""For runs after the tenth, when all colours have been taken."""


@dataclass(frozen=True)
class Finished:
    """What a run left behind."""

    folder: Path
    config: dict[str, Any]
    steps: list[dict[str, Any]]
    scores: list[dict[str, Any]]
    losses: list[dict[str, Any]]

    @property
    def name(self) -> str:
        """The optimizer, with its form or ball, and its period."""
        optimizer = self.config["optimizer"]
        form = "".join(f" {optimizer[key]}" for key in ("form", "ball") if key in optimizer)
        period = f" (period {_shown(optimizer['period'])})" if "period" in optimizer else ""
        return f"{optimizer['name']}{form}{period}"

    @property
    def samples(self) -> Path | None:
        """The newest sample grid."""
        return max((self.folder / "samples").glob("step_*.png"), default=None)


def read(folder: Path) -> Finished:
    """Read a run folder. Raises `Incomparable` where it is none, not finished or damaged."""
    try:
        return _read(folder)
    except (ConfigError, OSError) as error:
        raise Incomparable(f"{folder}: damaged run folder ({error}); train it anew or leave it out") from None


def _read(folder: Path) -> Finished:
    if not (folder / "config.yaml").is_file():
        raise Incomparable(f"{folder}: no run folder (config.yaml is missing)")
    rows = metrics.read(folder / "scores.jsonl")
    scores = [row for row in rows if row.get("kind") == "score"]
    losses = [row for row in rows if row.get("kind") == "held-out"]
    for found, setting in ((scores, "score.every"), (losses, "run.validate_every")):
        if not found:
            raise Incomparable(f"{folder}: scores.jsonl lacks rows; train it with {setting} above 0")
    config = overlays.to_dict(overlays.read([folder / "config.yaml"]))
    if config["optimizer"].get("period") == "auto":
        config["optimizer"]["period"] = period_of(folder)
    if scores[-1]["step"] != config["train"]["steps"]:
        raise Incomparable(f"{folder}: not finished, scored last at step {scores[-1]['step']}; run its command again")
    steps = metrics.read(folder / "metrics.jsonl")
    if not steps:
        raise Incomparable(f"{folder}: metrics.jsonl is missing or empty; train it anew or leave it out")
    _check(folder, scores, losses, steps)
    return Finished(folder, config, steps, scores, losses)


def _check(folder: Path, scores: list[dict], losses: list[dict], steps: list[dict]) -> None:
    """Raise `Incomparable` at the first row without a number that the table or a picture needs."""
    needed = [
        (row, key)
        for kind, rows in (("score", scores), ("held-out", losses), ("step", steps))
        for row in rows
        for key in _NUMBERS[kind]
    ]
    needed += [(row, "heldout_loss") for row in losses if row.get("heldout_loss", "") is not None]  # null: diverged
    for row, key in needed:
        if not isinstance(row.get(key), int | float):
            found = "no" if key not in row else f"{row[key]!r} as"
            raise Incomparable(
                f"{folder}: step {row['step']} has {found} {key}; score or train the run anew, or leave it out"
            )
    if not isinstance(scores[-1].get("metric"), str):
        raise Incomparable(f"{folder}: the last score has no metric; score or train the run anew, or leave it out")


def check_alike(runs: Sequence[Finished]) -> None:
    """Raise `Incomparable` where a run's scores were taken in another way than the first one's."""
    records.check_alike({str(run.folder): run.scores[-1] for run in runs})
    first = runs[0]
    for run in runs[1:]:
        if first.losses[-1]["heldout_count"] != run.losses[-1]["heldout_count"]:
            raise Incomparable(f"{first.folder} and {run.folder} took the held-out loss on different numbers of images")
        for section in _SECTIONS:
            for key, ours in first.config[section].items():
                theirs = run.config[section][key]
                if ours != theirs and key != "path":
                    raise Incomparable(f"{first.folder} has {section}.{key} {ours!r} but {run.folder} has {theirs!r}")


def table(runs: Sequence[Finished], *, costs: bool = True) -> str:
    """A Markdown table, a row a run, and the floor; `costs` adds time and bytes of a step."""
    metric, last = runs[0].scores[-1]["metric"], runs[0].scores[-1]
    head = ["optimizer", "lr", f"best {metric}", f"final {metric}", "final KID", "held-out loss"]
    floor = ["floor (real)", "", f"{last['floor']:.1f}", f"{last['floor']:.1f}", f"{last['floor_kid']:.2f}", ""]
    rows = [head, *map(_quality, runs), floor]
    if costs:
        added = [["optimizer ms", "step ms", "wire kB/step"], *map(_costs, runs), [""] * 3]
        rows = [row + more for row, more in zip(rows, added, strict=True)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _quality(run: Finished) -> list[str]:
    best = min(run.scores, key=lambda row: row["value"])
    final, loss = run.scores[-1], run.losses[-1]["heldout_loss"]
    return [
        run.name,
        f"{run.config['optimizer']['lr']:g}",
        f"{best['value']:.1f} at {best['step']}",
        f"{final['value']:.1f}",
        f"{final['kid']:.2f} ± {final['kid_standard_error']:.2f}",
        "diverged" if loss is None else f"{loss:.4f}",
    ]


def _costs(run: Finished) -> list[str]:
    return [
        f"{_per_step(run, 'optimizer_ms'):.1f}",
        f"{_per_step(run, 'step_ms'):.1f}",
        f"{statistics.fmean(row['wire_bytes'] for row in run.steps) / 1e3:.1f}",
    ]


def summary(run: Finished) -> dict[str, Any]:
    """What the table is made of, as JSON values."""
    return {
        "optimizer": run.name,
        "lr": run.config["optimizer"]["lr"],
        "score": run.scores[-1],
        "best": min(run.scores, key=lambda row: row["value"]),
        "heldout_loss": run.losses[-1]["heldout_loss"],
        "optimizer_ms": _per_step(run, "optimizer_ms"),
        "step_ms": _per_step(run, "step_ms"),
        "wire_bytes": statistics.fmean(row["wire_bytes"] for row in run.steps),
    }


def _shown(period: int | list[list[int]]) -> str:
    """A number, or the periods of a schedule."""
    return str(period) if isinstance(period, int) else ", then ".join(f"{value} from {step}" for step, value in period)


def write_json(found: Any, path: Path) -> None:
    """Write JSON values to a file whose folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def unwritten(error: OSError, folder: Path) -> str:
    """What to say where results could not be written into a folder."""
    return f"{error.filename or folder}: {error.strerror or error}; name another place or make room"


def _per_step(run: Finished, key: str) -> float:
    """Mean over a period of the medians of its steps: refreshes count as often as they come, hiccups do not.

    Of a schedule of periods, the plain mean.
    """
    period = run.config["optimizer"].get("period", 1)
    timed = run.steps[_WARM_UP:] or run.steps
    if not isinstance(period, int):
        return statistics.fmean(row[key] for row in timed)
    phases: dict[int, list[float]] = {}
    for row in timed:
        phases.setdefault(row["step"] % period, []).append(row[key])
    return statistics.fmean(map(statistics.median, phases.values()))


def draw_curves(runs: Sequence[Finished], path: Path) -> None:
    """Score over steps, score over training seconds, and held-out loss over steps, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (steps, seconds, loss) = pyplot.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for number, run in enumerate(runs):
        style = {"color": f"C{number % 10}", "linestyle": _DASHES[number // 10 % len(_DASHES)], "label": run.name}
        scores = [row["value"] for row in run.scores]
        steps.plot([row["step"] for row in run.scores], scores, marker="o", **style)
        seconds.plot([row["train_seconds"] for row in run.scores], scores, marker="o", **style)
        losses = [math.nan if row["heldout_loss"] is None else row["heldout_loss"] for row in run.losses]
        loss.plot([row["step"] for row in run.losses], losses, marker=".", **style)
    metric, floor = runs[0].scores[-1]["metric"], runs[0].scores[-1]["floor"]
    for axes, text in ((steps, "step"), (seconds, "training seconds")):
        axes.axhline(floor, color="grey", linestyle=":", label="floor: real images")
        axes.set(xlabel=text, ylabel=metric, yscale="log")
    loss.set(xlabel="step", ylabel="held-out loss", yscale="log")
    if len(runs) <= _MANY:
        steps.legend()
    else:
        figure.legend(*steps.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_samples(runs: Sequence[Finished], path: Path) -> None:
    """The newest sample grids side by side, rows of a few, as a PNG; the same noise and classes in each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(len(runs), _MANY)
    rows = math.ceil(len(runs) / columns)
    size = (4 * columns, 4.3 * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for panel in axes.flat:
        panel.set_axis_off()
    for run, panel in zip(runs, axes.flat, strict=False):
        panel.set_title(run.name)
        if run.samples is not None:
            with contextlib.suppress(OSError, SyntaxError, ValueError):  # a damaged picture is left out
                panel.imshow(pyplot.imread(run.samples))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(line: Sequence[str] | None = None) -> int:
    """Print the table, write the pictures."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the pictures and table go")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the table's numbers")
    arguments = parser.parse_args(line)
    try:
        runs = [read(folder) for folder in arguments.runs]
        check_alike(runs)
    except Incomparable as error:
        return refuse(f"compare.py: {error}")
    ranks = {run.scores[-1].get("ranks") for run in runs}
    text = table(runs, costs=len(ranks) == 1)
    if len(ranks) > 1:
        text += "\n\nTimes and bytes are left out: the runs ended on different numbers of ranks."
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        if arguments.json is not None:
            write_json({str(run.folder): summary(run) for run in runs}, arguments.json)
        (arguments.out / "comparison.md").write_text(text + "\n")
        draw_curves(runs, arguments.out / "comparison.png")
        draw_samples(runs, arguments.out / "samples.png")
    except OSError as error:
        return refuse(f"compare.py: {unwritten(error, arguments.out)}")
    print(f"\n{text}\n")
    for name in ("comparison.md", "comparison.png", "samples.png"):
        print(arguments.out / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
