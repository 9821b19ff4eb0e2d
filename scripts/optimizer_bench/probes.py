"""Three questions beside the table: a row step against AdamW, overlap with a slow link, memory inside a refresh."""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from optimizers import Muon, PeriodicRowMuon
from optimizers.orthogonal.newton_schulz import compute_dtype

from .link import slow_link
from .problem import Problem
from .timing import clock, give_gradients, slowest

IN_FLIGHT = (1, 2, 3)


def row_step(problem: Problem, rounds: int) -> dict[str, Any]:
    """Times of a row step and of fused AdamW on the same plain tensors, the shards of this rank."""
    gradients = problem.local_gradients()
    builders: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "fused AdamW": lambda params: torch.optim.AdamW(params, fused=True),
        "row step": lambda params: PeriodicRowMuon(params, period=math.inf),
    }
    if problem.settings.compile:
        builders["row step compiled"] = lambda params: PeriodicRowMuon(params, period=math.inf, compile=True)
    steps = {}
    for name, builder in builders.items():
        params = [nn.Parameter(torch.randn_like(g)) for g in gradients]
        give_gradients(params, gradients, False)
        steps[name] = builder(params).step
        steps[name]()
    times = _alternate(steps, rounds, problem)
    base = times["fused AdamW"]
    return {
        name: {**_summary(own), "x_fused": statistics.median(own) / statistics.median(base)}
        for name, own in times.items()
    }


def overlap(problem: Problem, rounds: int) -> dict[str, Any]:
    """Times of a refresh over a slow link and without it, for several buckets in flight.

    A bucket holds as many matrices as there are ranks, so that each of at least eight gives every rank work.
    """
    params = problem.parameters()
    give_gradients(params, problem.gradients, False)
    bucket_bytes = problem.settings.largest_bytes * problem.settings.ranks
    steps: dict[str, Callable[[], Any]] = {}
    seen: list[int] = []
    for flights in IN_FLIGHT:
        plain = Muon(params, bucket_bytes=bucket_bytes, max_in_flight=flights).step

        def delayed(plain: Callable[[], Any] = plain) -> None:
            with slow_link() as bytes_seen:
                plain()
            seen[:] = bytes_seen

        steps |= {f"{flights}": plain, f"{flights} delayed": delayed}
        delayed()
    if problem.device.type == "cuda":  # a host that sleeps would hold up the launches: only the undelayed times count
        steps = {name: step for name, step in steps.items() if "delayed" not in name}
    times = _alternate(steps, rounds, problem)
    rows = {}
    for flights in map(str, IN_FLIGHT):
        rows[flights] = {"undelayed": _summary(times[flights])}
        if slow := times.get(f"{flights} delayed"):
            ratio = statistics.median(slow) / statistics.median(times[flights])
            rows[flights] |= {"delayed": _summary(slow), "ratio": ratio}
    return {"buckets": len(seen) // 2, "bucket_bytes": bucket_bytes, "in_flight": rows}


def peak(problem: Problem) -> list[dict[str, Any]]:
    """Bytes that a refresh allocates at its peak, beyond what was there, for some bucket sizes and buckets in flight.

    The bound is (2·max_in_flight + 6)·max(bucket_bytes, largest matrix in bf16)/N. The share of a rank is half a matrix
    or two, so that on two ranks the smaller bucket is one matrix. A backend's thread may let go of the last reference
    to a buffer a moment after the wait, unseen by the profiler, which looks at this thread: so each wait takes longer.
    """
    params = problem.parameters()
    give_gradients(params, problem.gradients, False)
    largest = problem.settings.largest_bytes
    momentum = sum(g.nbytes for g in problem.local_gradients())
    dtype = compute_dtype(None, torch.float32, problem.device)
    rows = []
    smaller, larger = largest * problem.settings.ranks // 2, 2 * largest * problem.settings.ranks
    for bucket_bytes, flights in ((smaller, 1), (smaller, 2), (smaller, 3), (larger, 2)):
        optimizer = Muon(params, bucket_bytes=bucket_bytes, max_in_flight=flights)
        optimizer.step()
        dist.barrier()
        with slow_link(0.0, rest=0.005):
            used = int(slowest([allocated_inside(optimizer.step, problem.device)], problem.device)[0])
        bound = (2 * flights + 6) * max(bucket_bytes, largest) // problem.settings.ranks
        sizes = {"peak_bytes": used, "bound_bytes": bound, "momentum_bytes": momentum, "ns_itemsize": dtype.itemsize}
        rows.append({"bucket_bytes": bucket_bytes, "max_in_flight": flights, **sizes})
    return rows


def allocated_inside(step: Callable[[], Any], device: torch.device) -> int:
    """The largest sum of tensors alive inside a call beyond those alive before it, in bytes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"]
    alive = most = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        alive += change
        most = max(most, alive)
    return most


def _alternate(steps: dict[str, Callable[[], Any]], rounds: int, problem: Problem) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(clock(step, problem.device))
    return {name: slowest(own, problem.device) for name, own in times.items()}


def _summary(times: list[float]) -> dict[str, float]:
    return {"median_ms": statistics.median(times), "min_ms": min(times)}
