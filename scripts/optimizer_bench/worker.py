"""What one rank of the benchmark does."""

from __future__ import annotations

import gc
import json
import os
import platform
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from . import probes, report
from .contenders import contenders
from .problem import Problem, Settings
from .timing import Runner, Unfit, build, interleave


def main(rank: int, settings: Settings, store: str, out: str) -> None:
    """Measure everything; rank 0 writes the results to ``out``."""
    torch.set_num_threads(settings.threads)
    backend = "gloo"
    if settings.device == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, settings.ranks),
        rank=rank,
        world_size=settings.ranks,
        timeout=timedelta(minutes=10),
    )
    result = measure(settings, Teller(rank == 0))
    if rank == 0:
        Path(out).write_text(json.dumps(result, indent=1))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads now and then abort a process that takes its time to end


class Teller:
    """Prints progress on one rank."""

    def __init__(self, aloud: bool) -> None:
        self._aloud, self._begin = aloud, time.monotonic()

    def __call__(self, text: str) -> None:
        """Print a line, with the seconds since the begin."""
        if self._aloud:
            print(f"[{time.monotonic() - self._begin:5.0f} s] {text}", flush=True)


def measure(settings: Settings, tell: Teller) -> dict[str, Any]:
    """All results, the same on every rank."""
    problem = Problem(settings, init_device_mesh(settings.device, (settings.ranks,)))
    megabytes = settings.elements * 4 / 1e6
    tell(f"{settings.ranks} ranks on {settings.device}: {settings.elements:,} fp32 weights, {megabytes:.0f} MB")
    runners, skipped = enter(problem, tell)
    interleave(runners, settings.steps, problem.device, tell)
    rows = report.rows(runners)
    del runners
    gc.collect()
    tell("a row step against fused AdamW")
    row = probes.row_step(problem, settings.steps)
    tell("overlap with a slow link")
    overlap = probes.overlap(problem, max(3, settings.steps // 5))
    tell("memory inside a refresh")
    peak = probes.peak(problem)
    result = {
        "config": config(settings),
        "machine": machine(settings),
        "optimizers": rows,
        "skipped": skipped,
        "row_step": row,
        "overlap": overlap,
        "peak": peak,
    }
    return result | {"figures": report.figures(result)}


def enter(problem: Problem, tell: Teller) -> tuple[list[Runner], dict[str, str]]:
    """Build all contenders; those that cannot run are skipped with a line."""
    runners, skipped = [], {}
    for contender in contenders(problem):
        tell(f"warming up {contender.name}")
        try:
            runners.append(build(contender, problem))
        except Unfit as error:
            skipped[contender.name] = str(error)
            tell(f"skipped {contender.name}: {error}")
    return runners, skipped


def config(settings: Settings) -> dict[str, Any]:
    """What was measured."""
    return {
        "ranks": settings.ranks,
        "steps": settings.steps,
        "blocks": settings.blocks,
        "shapes": settings.shapes,
        "elements": settings.elements,
        "compile": settings.compile,
        "smoke": settings.smoke,
    }


def machine(settings: Settings) -> dict[str, Any]:
    """Where it was measured: kinds of things, no names."""
    cuda = settings.device == "cuda"
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if cuda else processor(),
        "backend": "nccl" if cuda else "gloo",
        "world_size": dist.get_world_size(),
        "cores": settings.cores,
        "threads_per_rank": settings.threads,
    }


def processor() -> str:
    """The model of the CPU, and with what it multiplies bf16, which decides how dear Newton–Schulz is beside AdamW."""
    model, info = platform.machine(), Path("/proc/cpuinfo")
    if info.is_file():
        named = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = named[0] if named else model
    able = torch.cpu.get_capabilities()
    return f"{model}, {next((unit for unit in ('amx_bf16', 'avx512_bf16', 'bf16') if able.get(unit)), 'no bf16')}"
