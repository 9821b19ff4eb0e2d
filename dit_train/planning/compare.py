"""Several sizes and optimizers in one table and one picture, with published figures beside the modelled ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dit_train.config import Config
from dit_train.data.sources import Summary
from dit_train.model.sizes import SIZES
from dit_train.optimizer_config import OptimizerConfig
from dit_train.planning.machine import Machine
from dit_train.planning.plan import (
    ADAMW,
    CHECKPOINTING,
    OptimizerPlan,
    Say,
    budget_of,
    gathered,
    plan_optimizer,
    planned,
    settled,
    with_checkpointing,
)
from dit_train.planning.report import Figures, figures, table, time_figures

_CUT = "-15.7 ... -24.3 % (DiT of 1.3B to 15B, K = 3)"
"""arXiv 2608.20818, on 256 H100."""
_RATES = {"muon": 105.09, "muon_bp": 113.37, "adamw": 117.30}
"""arXiv 2510.16981, TFLOP/s a GPU."""


def plans(
    config: Config,
    images: Summary,
    ranks: int,
    sizes: Sequence[str],
    optimizers: Mapping[str, OptimizerConfig],
    machine: Machine,
    budget: float | None,
    say: Say,
) -> list[Figures]:
    """`figures` of every size and named optimizer, without and with activation checkpointing, which share a pass.

    ``time_if_gathered`` is the time of the published form, in which every rank gathers and orthogonalises every matrix.

    Without a `budget` each optimizer has its own.

    Raises:
        ConfigError: a size or an optimizer does not fit the ranks.
    """
    found = []
    for size in sizes:
        own: list[OptimizerPlan] = []
        sized = dataclasses.replace(config, model=dataclasses.replace(config.model, **SIZES[size]))
        for kept in CHECKPOINTING:
            settings = with_checkpointing(sized, kept)
            with planned(settings, images, ranks, lambda text, size=size: say(f"{size}: {text}")) as one:
                # what an optimizer does knows nothing of activations
                own = own or [plan_optimizer(each, one, say) for each in (ADAMW, *optimizers.values())]
                for name, plan in zip(optimizers, own[1:], strict=True):
                    allowed = budget_of(plan.config, budget)
                    plan = settled(plan, one, own[0], machine, allowed)
                    form = time_figures(one, gathered(plan, one), own[0], machine)
                    row = figures(one, plan, own[0], machine, allowed) | {"optimizer_name": name}
                    found.append({"size": size, **row, "time_if_gathered": form})
    return found


def published(found: Sequence[Figures]) -> list[dict[str, Any]]:
    """What papers measured, and the same of these plans without checkpointing, by exchange; null where there is none.

    Step time of `periodic_row_muon` against `muon`, and TFLOP/s a GPU of `muon`, `muon_bp` and `adamw`.
    """
    rows = []
    forms = {"owner": "time", "gather": "time_if_gathered"}
    for size in dict.fromkeys(one["size"] for one in found):
        plain = [one for one in found if one["size"] == size and one["activation_checkpointing"] == CHECKPOINTING[0]]
        here = {one["optimizer_name"]: one for one in plain}
        cuts = {form: _cut(here, key) for form, key in forms.items()}
        rows.append({"what": f"{size}: step, periodic_row_muon against muon", "published": _CUT, "modelled": cuts})
        for name, rate in _RATES.items():
            rates = {form: f"{here[name][key]['tflops']:.1f}" if name in here else None for form, key in forms.items()}
            what = {"what": f"{size}: TFLOP/s a GPU, {name}", "published": f"{rate:.2f} (language model of 8B, P = 5)"}
            rows.append({**what, "modelled": rates})
    return rows


def _cut(here: Mapping[str, Figures], key: str) -> str | None:
    rows, muon = here.get("periodic_row_muon"), here.get("muon")
    return f"{rows[key]['step'] / muon[key]['step'] - 1:+.1%}" if rows and muon else None


def text(found: Sequence[Figures], rows: Sequence[Mapping[str, Any]]) -> str:
    """One table of all plans, one of what was published."""
    memory, times = ("peak GiB", "MB sent"), ("step ms", "optimizer", "vs AdamW", "TFLOP/s", "MFU", "smallest")
    lines = [("size", "checkpointing", "optimizer", "period", *memory, *times)]
    for one in found:
        time = one["time"]
        lines.append(
            (
                one["size"],
                one["activation_checkpointing"],
                one["optimizer_name"],
                str(one["period"] or "inf") if "refresh" in one["optimizer"] else "-",
                f"{one['memory']['peak']['max'] / 2**30:.2f}",
                f"{one['optimizer']['bytes_a_step'] / 1e6:,.1f}",
                f"{1e3 * time['step']:,.1f}",
                f"{time['optimizer_share']:.1%}",
                f"{time['against_adamw']:+.1%}",
                f"{time['tflops']:,.1f}",
                f"{time['mfu']:.1%}",
                str(one.get("smallest_period") or "-"),
            )
        )
    known = [("", "published, measured", "modelled, owner", "modelled, gather (as published)")]
    known += [(row["what"], row["published"], *(value or "-" for value in row["modelled"].values())) for row in rows]
    return "\n".join([*table(lines), "", *table(known)])


def draw(found: Sequence[Figures], machine: Machine, path: Path) -> None:
    """Step time and peak memory of every size, a bar an optimizer; hatched with checkpointing."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = list(dict.fromkeys(one["size"] for one in found))
    bars = list(dict.fromkeys((one["optimizer_name"], one["activation_checkpointing"]) for one in found))
    names = list(dict.fromkeys(name for name, _ in bars))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 4.5), layout="constrained")
    for number, bar in enumerate(bars):
        own = [one for one in found if (one["optimizer_name"], one["activation_checkpointing"]) == bar]
        places = [sizes.index(one["size"]) + 0.8 * (number + 0.5) / len(bars) - 0.4 for one in own]
        style = {"color": f"C{names.index(bar[0])}", "hatch": "" if bar[1] == "none" else "///", "edgecolor": "white"}
        style |= {"width": 0.8 / len(bars), "label": f"{bar[0]}, {bar[1]} checkpointing"}
        left.bar(places, [1e3 * one["time"]["step"] for one in own], **style)
        right.bar(places, [one["memory"]["peak"]["max"] / 2**30 for one in own], **style)
    right.axhline(machine.memory_gb * 1e9 / 2**30, color="black", linestyle="--", linewidth=1)
    for axes, title in ((left, "step, ms (modelled)"), (right, "peak memory of the fullest rank, GiB")):
        axes.set_xticks(range(len(sizes)), sizes)
        axes.set_yscale("log")
        axes.set_title(f"{title}; {found[0]['ranks']} {machine.name}")
    left.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
