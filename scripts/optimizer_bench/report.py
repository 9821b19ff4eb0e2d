"""From samples to rows, from rows to a table, and how the figures that we promise came out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from .contenders import COMPILED, DEFAULT_ADAMW, FLOOR, FUSED_ADAMW, MUON, MUON_BP, ROW_MUON
from .timing import Runner

BASES = {"x_adamw": DEFAULT_ADAMW, "x_fused": FUSED_ADAMW, "x_muon": MUON, "x_floor": FLOOR}
"""Ratios of the table and what they are to."""


def rows(runners: Sequence[Runner]) -> list[dict[str, Any]]:
    """One row a contender: milliseconds a step over whole periods and by kind of step, ratios, bytes by rank."""
    found = {runner.contender.name: _times(runner) for runner in runners}
    result = []
    for runner in runners:
        own = found[runner.contender.name]
        ratios = {
            key: {which: own["step"][which] / found[base]["step"][which] for which in ("median_ms", "min_ms")}
            for key, base in BASES.items()
            if base in found
        }
        by_rank = [statistics.fmean(rank) for rank in zip(*runner.sent, strict=True)]
        result.append(
            {
                "name": runner.contender.name,
                "family": runner.contender.family,
                "period": runner.contender.period,
                "steps": len(runner.sample.times),
                **own,
                **{key: {"median": r["median_ms"], "min": r["min_ms"]} for key, r in ratios.items()},
                "bytes_sent_per_step": {"mean": statistics.fmean(by_rank), "max": max(by_rank)},
                "bytes_sent_by_step": [max(step) for step in runner.sent],
                "bytes_planned_by_step": runner.planned,
                "collectives_by_step": runner.collectives,
            }
        )
    return result


def _times(runner: Runner) -> dict[str, Any]:
    times, contender = runner.sample.times, runner.contender
    kinds: dict[str, list[float]] = {"refresh": [], "cheap": []}
    for step, time in enumerate(times):  # the warm-up was a whole period, so these begin with a refresh
        kinds["refresh" if contender.is_refresh(step) else "cheap"].append(time)
    result: dict[str, Any] = {"step": _summary(runner.sample.means(contender.period))}
    return result | {kind: _summary(own) if own else None for kind, own in kinds.items()}


def _summary(times: Sequence[float]) -> dict[str, float]:
    return {"median_ms": statistics.median(times), "min_ms": min(times), "samples": len(times)}


def figures(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What ``optimizers/README.md`` promises, and what was found. Times are medians.

    ``met`` says whether it was found; None where nothing is promised, or where a smoke run cannot tell: it knows counts
    only.
    """
    row = {r["name"]: r for r in result["optimizers"]}
    found: list[dict[str, Any]] = []

    def figure(
        name: str, value: float, required: float | None, aim: float | None = None, counted: bool = False
    ) -> None:
        tells = required is not None and (counted or not result["config"]["smoke"])
        met = value <= required * (1 + 1e-9) if tells else None
        found.append({"name": name, "value": value, "required": required, "aim": aim, "met": met})

    _spectral(figure, row, result["config"]["ranks"])
    for name, required, aim in (("row step", 2.0, None), ("row step compiled", 1.3, 1.1)):
        if name in result["row_step"]:
            figure(f"{name} / fused AdamW, same tensors", result["row_step"][name]["x_fused"], required, aim)
    for flights, times in result["overlap"]["in_flight"].items():
        if "ratio" in times:
            limit = None if flights == "1" else 1.10  # one bucket in flight is what overlap is measured against
            figure(f"refresh over a slow link / without it, {flights} in flight", times["ratio"], limit)
    worst = max(result["peak"], key=lambda p: p["peak_bytes"] / p["bound_bytes"])
    where = f"bucket {worst['bucket_bytes'] / 2**20:.3g} MiB, {worst['max_in_flight']} in flight"
    bound = 1.0 if worst["ns_itemsize"] == 2 else None  # promised of 16-bit iterations
    figure(f"peak of a refresh / bound, worst: {where}", worst["peak_bytes"] / worst["bound_bytes"], bound)
    _bytes(partial(figure, counted=True), row, result["config"])
    return found


def _spectral(figure: Any, row: dict[str, dict[str, Any]], ranks: int) -> None:
    def ratio(name: str, key: str) -> float:
        return row[name][key]["median"]

    figure(f"{ROW_MUON} / {MUON}", ratio(ROW_MUON, "x_muon"), 0.50, 0.40)
    figure(f"{MUON_BP} / {MUON}", ratio(MUON_BP, "x_muon"), 0.85 if ranks < 4 else 0.70)
    figure(f"{MUON} / batched-NS floor", ratio(MUON, "x_floor"), 1.5, 1.2)
    if DEFAULT_ADAMW in row:
        # No requirement, but a bound from below on what follows, which differs from processor to processor.
        figure(f"batched-NS floor / {DEFAULT_ADAMW}", ratio(FLOOR, "x_adamw"), None)
        figure(f"{ROW_MUON} / {DEFAULT_ADAMW}", ratio(ROW_MUON, "x_adamw"), 1.7, 1.4)
        figure(f"{MUON} / {DEFAULT_ADAMW}", ratio(MUON, "x_adamw"), 4.5)
        if MUON + COMPILED in row:
            figure(f"{MUON + COMPILED} / {DEFAULT_ADAMW}", ratio(MUON + COMPILED, "x_adamw"), 3.4)


def _bytes(figure: Any, row: dict[str, dict[str, Any]], config: dict[str, Any]) -> None:
    muon, ranks = row[MUON]["bytes_sent_per_step"], config["ranks"]
    bound = 4 * config["elements"] * (ranks - 1) / ranks**2
    figure(f"{MUON}: bytes sent per rank / 4·E·(N−1)/N²", muon["mean"] / bound, 1.0)
    figure(f"{MUON}: bytes of the largest rank / mean", muon["max"] / muon["mean"], 1.1)
    figure(f"{ROW_MUON}: bytes / {MUON}", row[ROW_MUON]["bytes_sent_per_step"]["mean"] / muon["mean"], 1 / 3)
    cheap = max(max(row[name]["bytes_sent_by_step"][1:]) for name in (ROW_MUON, MUON_BP))
    figure("bytes of row and block steps", max(cheap, *row["BlockMuon"]["bytes_sent_by_step"]), 0.0)


def text(result: dict[str, Any]) -> str:
    """The table, the probes and the figures as Markdown."""
    config, machine = result["config"], result["machine"]
    parts = [
        f"{config['blocks']} blocks of {', '.join(f'{m}×{n}' for m, n in config['shapes'])} ({config['elements']:,} "
        f"fp32 weights), {config['ranks']} ranks, {machine['backend']}, {machine['device']}, "
        f"{machine['threads_per_rank']} threads a rank, torch {machine['torch']}. Milliseconds: median (min).",
        _table(_HEADER, [_cells(row) for row in result["optimizers"]]),
        _overlap(result["overlap"]),
        _peak(result["peak"]),
        _table(("figure", "found", "must be", "aim", ""), [_figure(f) for f in result["figures"]]),
    ]
    if result["skipped"]:
        parts.insert(2, "Skipped: " + "; ".join(f"{name}: {why}" for name, why in result["skipped"].items()) + ".")
    return "\n\n".join(parts)


_HEADER = ("optimizer", "ms a step", "refresh", "cheap step", "× AdamW", "× fused", "× Muon", "× floor", "MB sent", "n")


def _cells(row: dict[str, Any]) -> list[str]:
    ratios = [f"{row[k]['median']:.2f} ({row[k]['min']:.2f})" if k in row else "" for k in BASES]
    return [
        row["name"],
        *(
            f"{row[k]['median_ms']:.1f} ({row[k]['min_ms']:.1f})" if row[k] else ""
            for k in ("step", "refresh", "cheap")
        ),
        *ratios,
        f"{row['bytes_sent_per_step']['mean'] / 1e6:.1f}",
        str(row["steps"]),
    ]


def _overlap(overlap: dict[str, Any]) -> str:
    head = f"refresh in {overlap['buckets']} buckets, in flight"
    body = []
    for flights, times in overlap["in_flight"].items():
        slow = times.get("delayed")
        cells = [f"{t['median_ms']:.1f} ({t['min_ms']:.1f})" if t else "" for t in (times["undelayed"], slow)]
        body.append([flights, *cells, f"{times['ratio']:.2f}" if slow else ""])
    return _table((head, "no delay", "30 ms per 4 MiB", "ratio"), body)


def _peak(peak: list[dict[str, Any]]) -> str:
    body = [
        [
            f"{p['bucket_bytes'] / 2**20:.3g} MiB",
            str(p["max_in_flight"]),
            *(f"{p[key] / 2**20:.2f}" for key in ("peak_bytes", "bound_bytes", "momentum_bytes")),
        ]
        for p in peak
    ]
    return _table(("bucket_bytes", "in flight", "peak in a refresh, MiB", "bound", "momentum"), body)


def _figure(figure: dict[str, Any]) -> list[str]:
    limits = ["" if v is None else f"≤ {v:.3g}" for v in (figure["required"], figure["aim"])]
    return [
        figure["name"],
        f"{figure['value']:.3f}",
        *limits,
        {None: "", True: "met", False: "missed"}[figure["met"]],
    ]


def _table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in (header, *body)) for i in range(len(header))]
    lines = [header, ["-" * w for w in widths], *body]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)
