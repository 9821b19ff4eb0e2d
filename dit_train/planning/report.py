"""A plan as numbers, and numbers as text."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from dit_train.config import Config
from dit_train.data.sources import Summary
from dit_train.planning.machine import Machine
from dit_train.planning.period import PERIODS, overhead, smallest_period
from dit_train.planning.plan import (
    CHECKPOINTING,
    ModelPlan,
    OptimizerPlan,
    Say,
    has_period,
    planned,
    with_checkpointing,
)
from dit_train.planning.record import Recorder
from dit_train.planning.simulate import compute_dtype
from dit_train.planning.steps import StepCost
from dit_train.run.optimizer import batch_passes

Figures = dict[str, Any]

_GATHERED = ("Unsharded Param", "All Gather")
_WHOLE_GRADIENTS = ("Unsharded Grad", "Reduce Scatter")
_SHOWN = range(1, 17)
"""Periods that have a row."""


def figures(model: ModelPlan, plan: OptimizerPlan, adamw: OptimizerPlan, machine: Machine, budget: float) -> Figures:
    """Everything about one optimizer on one model, as JSON can hold it; keys as in ``scripts/plan.py``."""
    parallel = model.config.parallel
    numbers = {
        "ranks": model.ranks,
        "mesh": dict(zip(model.world.mesh.mesh_dim_names, model.world.mesh.shape, strict=True)),
        "parameters": model.parameters,
        "images_a_rank": model.images,
        "optimizer_name": plan.config.name,
        "period": plan.period if plan.period < float("inf") else None,
        "activation_checkpointing": parallel.activation_checkpointing,
        "flops_an_image": dataclasses.asdict(model.flops) | {"total": model.flops.total},
        "memory": memory_figures(model, plan),
        "model_traffic": _model_traffic(model, batch_passes(plan.config)),
        "optimizer": _optimizer_figures(plan, machine),
        "time": time_figures(model, plan, adamw, machine),
    }
    if has_period(plan.config):
        times = model.step_times(plan, adamw, machine)
        numbers["periods"] = [dataclasses.asdict(overhead(times, period)) for period in _SHOWN]
        numbers["budget"], numbers["smallest_period"] = budget, smallest_period(times, budget)
    return numbers


def memory_figures(model: ModelPlan, plan: OptimizerPlan) -> Figures:
    """Bytes as maximum and mean over all ranks."""
    held = {
        "parameters": model.parameter_bytes,
        "gradients": model.parameter_bytes,
        "optimizer_states": plan.state_bytes,
        "average": model.average_bytes,
    }
    numbers = {name: {"max": int(by.max()), "mean": float(by.mean())} for name, by in held.items()}
    passes = [one for _, one in model.steps.passes]
    same = {
        "gathered_weights": max(sum(one.peak[key] for key in _GATHERED) for one in passes),
        "whole_gradients": max(sum(one.peak[key] for key in _WHOLE_GRADIENTS) for one in passes),
        "activations": max(one.kept for one in passes),
    }
    numbers |= {name: {"max": size, "mean": float(size)} for name, size in same.items()}
    beside = plan.state_bytes + model.average_bytes  # of which rank 0 holds the most
    training = max(one.peak["Total"] for one in passes) + int(beside[0])
    stepping = plan.peak + int(model.average_bytes[0])
    peak = max(training, stepping)
    numbers["peak"] = {"max": peak, "mean": peak - float(beside[0] - np.mean(beside))}
    return numbers | {"peak_in": "forward and backward" if training >= stepping else "optimizer step"}


def peaks(
    config: Config, images: Summary, ranks: int, plan: OptimizerPlan, known: dict[str, float], say: Say
) -> Figures:
    """Peak memory without activation checkpointing and with it, whatever the config has, for which it is `known`.

    Raises:
        ConfigError: the settings do not fit each other or the ranks.
    """
    names = ("peak_without_checkpointing", "peak_with_full_checkpointing")
    found = {}
    for name, kept in zip(names, CHECKPOINTING, strict=True):
        found[name] = known
        if kept != config.parallel.activation_checkpointing:
            with planned(with_checkpointing(config, kept), images, ranks, say) as model:
                found[name] = memory_figures(model, plan)["peak"]
    return found


def _model_traffic(model: ModelPlan, rounds: int) -> Figures:
    """Collectives and bytes that a rank sends in a step of so many passes over its batch, but for the optimizer."""
    numbers = {}
    for name in ("forward", "backward"):
        total: Counter[str] = Counter()
        sent = 0
        for count, one in model.steps.passes:
            recorder: Recorder = getattr(one, name)
            sent += rounds * count * recorder.bytes_sent
            for call, times in recorder.calls.items():
                total[call] += rounds * count * times
        numbers[name] = {"collectives": dict(total), "bytes_sent": sent}
    rest = model.steps.rest
    return numbers | {"rest": {"collectives": dict(rest.calls), "bytes_sent": rest.bytes_sent}}


def _optimizer_figures(plan: OptimizerPlan, machine: Machine) -> Figures:
    kinds = {"refresh": plan.cost.refresh, "between": plan.cost.between}
    numbers: Figures = {name: _step_figures(cost, machine) for name, cost in kinds.items() if cost is not None}
    return numbers | {"bytes_a_step": plan.bytes_a_step}


def _step_figures(cost: StepCost, machine: Machine) -> Figures:
    numbers: Figures = {}
    for name, by in (("flops", cost.flops), ("bytes_sent", cost.bytes_sent)):
        values = list(by.values())
        most, mean = max(values), sum(values) / len(values)
        numbers[name] = {"max": most, "mean": mean, "max_over_mean": most / mean if mean else None}
    calls = dict(cost.simulated.recorder.calls)
    return numbers | {"collectives": calls, "buckets": cost.buckets, "seconds": cost.seconds(machine)}


def time_figures(model: ModelPlan, plan: OptimizerPlan, adamw: OptimizerPlan, machine: Machine) -> Figures:
    """Modelled seconds of a step, and what follows from them."""
    one, optimizing = model.time(machine), plan.cost.seconds(machine, plan.period)
    plain = adamw.cost.seconds(machine, 1)
    second = model.second_pass(plan.config, machine)
    step = one.total + second + optimizing
    rate = model.flops_a_rank / step
    peak = machine.bf16_tflops if compute_dtype(model.config) == "bf16" else machine.fp32_tflops
    return {
        "forward": one.forward,
        "backward": one.backward,
        "rest": one.rest,
        "waiting_for_links": one.waiting,
        "second_pass": second,
        "optimizer": optimizing,
        "step": step,
        "optimizer_share": optimizing / step,
        "against_adamw": (second + optimizing - plain) / (one.total + plain),
        "tflops": rate / 1e12,
        "mfu": rate / (peak * 1e12),
        "images_a_second": model.config.train.batch / step,
    }


def text(numbers: Figures, machine: Machine) -> str:
    """What one plan says."""
    return "\n\n".join(
        [_heading(numbers, machine), _memory_text(numbers, machine), _traffic_text(numbers), _time_text(numbers)]
    )


def _heading(numbers: Figures, machine: Machine) -> str:
    work, mesh = numbers["flops_an_image"], " x ".join(f"{n} {name}" for name, n in numbers["mesh"].items())
    return "\n".join(
        [
            f"{numbers['parameters'] / 1e9:.3f}B parameters on {numbers['ranks']} {machine.name} ({mesh}), "
            f"{numbers['images_a_rank']} images a rank, {numbers['optimizer_name']}",
            f"GFLOP an image, forward and backward: {work['total'] / 1e9:,.1f} = {work['per_token'] / 1e9:,.1f} for "
            f"tokens + {work['per_image'] / 1e9:,.2f} once an image + {work['attention'] / 1e9:,.1f} attention",
        ]
    )


def _memory_text(numbers: Figures, machine: Machine) -> str:
    rows = [("GiB a rank", "max", "mean")]
    for name, size in numbers["memory"].items():
        if isinstance(size, dict):
            rows.append((name.replace("_", " "), f"{size['max'] / 2**30:.3f}", f"{size['mean'] / 2**30:.3f}"))
    peak = numbers["memory"]["peak"]["max"]
    fits = "fits into" if peak < 1e9 * machine.memory_gb else "DOES NOT FIT into"
    note = f"peak in {numbers['memory']['peak_in']}; {fits} {machine.memory_gb:.0f} GB (NCCL and fragments: GiB more)"
    return "\n".join([*table(rows), note])


def _traffic_text(numbers: Figures) -> str:
    rows = [("a step, a rank", "collectives", "MB sent", "GFLOP", "max/mean")]
    for name, part in numbers["model_traffic"].items():
        rows.append((name, str(sum(part["collectives"].values())), f"{part['bytes_sent'] / 1e6:,.1f}", "", ""))
    for name in ("refresh", "between"):
        if name in numbers["optimizer"]:
            part = numbers["optimizer"][name]
            load = part["flops"]["max_over_mean"]
            count = str(sum(part["collectives"].values()))
            sizes = f"{part['bytes_sent']['max'] / 1e6:,.1f}", f"{part['flops']['max'] / 1e9:,.1f}"
            rows.append((f"optimizer, {name}", count, *sizes, f"{load:.2f}" if load else ""))
    return "\n".join(table(rows))


def _time_text(numbers: Figures) -> str:
    time = numbers["time"]
    names = ("forward", "backward", *["second_pass"] * (time["second_pass"] > 0), "rest", "optimizer")
    parts = ", ".join(f"{name.replace('_', ' ')} {1e3 * time[name]:,.1f}" for name in names)
    lines = [
        f"modelled step {1e3 * time['step']:,.1f} ms: {parts}; {1e3 * time['waiting_for_links']:,.1f} wait for links",
        f"{time['tflops']:,.1f} TFLOP/s a GPU, MFU {time['mfu']:.1%}, {time['images_a_second']:,.0f} images/s; the "
        f"optimizer takes {time['optimizer_share']:.1%}, {time['against_adamw']:+.1%} against AdamW's step",
    ]
    if "periods" not in numbers:
        return "\n".join(lines)
    rows = [("period", "step ms", "against AdamW", "its links hidden")]
    for one in numbers["periods"]:
        shares = f"{one['against_adamw']:+.2%}", f"{one['against_hidden']:+.2%}"
        rows.append((str(one["period"]), f"{1e3 * one['step_seconds']:,.1f}", *shares))
    best = numbers["smallest_period"]
    found = (
        f"smallest period within {numbers['budget']:.1%}: {best}"
        if best
        else f"no period up to {max(PERIODS)} within {numbers['budget']:.1%}"
    )
    return "\n".join([*lines, "", *table(rows), found])


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
