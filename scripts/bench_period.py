"""Whether the period that `optimizer.period: auto` chooses costs what was predicted, and stays within its budget.

usage: torchrun --nproc-per-node 2 scripts/bench_period.py CONFIG... --json FILE [--steps N] [--section.key VALUE ...]

Configs are laid over each other as in training; their optimizer has a period, which is chosen here as a run chooses it.
Then AdamW and that optimizer make steps (forward, backward, optimizer) on the same weights in turns, so that what slows
the machine down slows both. The overhead is the mean over a period of the medians of the differences of a step to the
AdamW step before it, refreshes and other steps apart, as a share of the median AdamW step.

FILE holds torch, device, ranks, threads, parameters, optimizer (its name), steps (of each), budget, period,
within_budget (as predicted), milliseconds (as a run measures them, see dit_train/run/period.py), predicted
(against_adamw, against_hidden: shares), measured (against_adamw; low and high: 95 % of it by resampling steps),
adamw_ms (median) and measured_over_budget (the ratio; at most 1.2 is meant).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dit_train import overlays
from dit_train.command_line import Parser, new_file, positive, refuse
from dit_train.config import Config, ConfigError
from dit_train.data import sources
from dit_train.data.sources import Dataset
from dit_train.model.sizes import check_model
from dit_train.optimizer_config import AdamWConfig
from dit_train.parallel import precision
from dit_train.parallel.mesh import World, joined
from dit_train.planning.period import StepTimes, choose, overhead
from dit_train.preflight import check_batch, check_parallel
from dit_train.run import optimizer, period

_PERIODS = 3
"""Whole periods that are measured at least."""
_RESAMPLED = 1000


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The command line, and its --section.key arguments."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="YAML files")
    parser.add_argument("--json", type=new_file, required=True, metavar="FILE", help="where all numbers go")
    parser.add_argument("--steps", type=positive, default=100, help="of each, at least (default 100)")
    return parser.parse_known_args(arguments)


def read(files: Sequence[str], overrides: Sequence[str], ranks: int) -> Config:
    """The settings.

    Raises:
        ConfigError: they are wrong, do not fit the ranks, or have no period to choose.
    """
    config = overlays.read(files, overrides)
    if not optimizer.is_auto(config.optimizer):
        raise ConfigError(
            "optimizer.period: has to be auto; add --optimizer.period auto to muon_bp's, periodic_row_muon's or "
            "periodic_sign_muon's"
        )
    check_batch(config, ranks // check_parallel(config, ranks))
    check_model(config.model, sources.check(config.data).image_size)
    return config


class Turns:
    """AdamW and the optimizer with its chosen period, on the same weights."""

    def __init__(self, config: Config, data: Dataset, world: World, dtype: torch.dtype, chosen: int) -> None:
        self.model, self._backward = precision.trial(config, data, world, dtype)
        share = config.train.batch // world.data_size
        self._passes = share // (config.train.micro_batch or share)
        settings = (AdamWConfig(), optimizer.with_period(config.optimizer, chosen))
        self._optimizers = [optimizer.build(one, self.model) for one in settings]
        self._device = world.device

    def turn(self) -> list[float]:
        """Seconds of an AdamW step and of one of the other on this rank."""
        return [self._step(one.step) for one in self._optimizers]

    def _step(self, step: Callable[[], Any]) -> float:
        self._finish()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(self._passes):
            self._backward()
        step()
        self.model.zero_grad()
        self._finish()
        return time.perf_counter() - start

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure(config: Config, world: World, steps: int) -> dict[str, Any]:
    """The numbers of FILE but for the machine's; the same on all ranks."""
    data = sources.load(config.data, str(world.device))
    name = config.train.compute_dtype
    if name == "auto":
        found = precision.measure(config, data, world)
        name = min(found, key=found.__getitem__)
    dtype, budget = precision.DTYPES[name], config.optimizer.period_budget
    times = period.measure(config, data, world, dtype)
    chosen, fits = choose(times, budget)
    turns = Turns(config, data, world, dtype, chosen)
    count = chosen * max(_PERIODS, -(-steps // chosen))
    for _ in range(chosen + 1):  # each kind of step once at least
        turns.turn()
    seconds = torch.tensor([turns.turn() for _ in range(count)], dtype=torch.float64, device=world.device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    refresh = (np.arange(count) + chosen + 1 - config.optimizer.phase) % chosen == 0
    parameters = sum(parameter.numel() for parameter in turns.model.parameters())
    about = {"parameters": parameters, "optimizer": config.optimizer.name, "steps": count, "within_budget": fits}
    return about | summary(times, budget, chosen, seconds.cpu().numpy(), refresh)


def summary(times: StepTimes, budget: float, chosen: int, seconds: np.ndarray, refresh: np.ndarray) -> dict[str, Any]:
    """What was predicted, and what steps [n, 2] of AdamW and of the other took, some of which were refreshes [n]."""
    expected, draw = overhead(times, chosen), np.random.default_rng(0)
    parts = seconds[refresh], seconds[~refresh]
    middle = _overhead(*parts, chosen)
    again = [_overhead(*(_resampled(part, draw) for part in parts), chosen) for _ in range(_RESAMPLED)]
    low, high = np.quantile(again, [0.025, 0.975])
    return {
        "budget": budget,
        "period": chosen,
        "milliseconds": {key: 1e3 * value for key, value in dataclasses.asdict(times).items()},
        "predicted": {"against_adamw": expected.against_adamw, "against_hidden": expected.against_hidden},
        "measured": {"against_adamw": middle, "low": float(low), "high": float(high)},
        "adamw_ms": 1e3 * float(np.median(seconds[:, 0])),
        "measured_over_budget": middle / budget,
    }


def _overhead(refreshes: np.ndarray, others: np.ndarray, chosen: int) -> float:
    """Share of AdamW's step on top of it: of pairs [n, 2], the refreshes and the others."""
    extra = [float(np.median(part[:, 1] - part[:, 0])) if len(part) else 0.0 for part in (refreshes, others)]
    mean = extra[0] / chosen + extra[1] * (1 - 1 / chosen)
    return mean / float(np.median(np.concatenate([refreshes, others])[:, 0]))


def _resampled(pairs: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    return pairs[draw.integers(0, max(1, len(pairs)), len(pairs))]


def text(found: dict[str, Any]) -> str:
    """Two lines."""
    predicted, measured = found["predicted"], found["measured"]
    fits = "" if found["within_budget"] else " (the longest: none is within it)"
    return (
        f"{found['optimizer']}, budget {found['budget']:.1%}: period {found['period']}{fits}, predicted "
        f"{predicted['against_adamw']:+.1%} of AdamW's step, {predicted['against_hidden']:+.1%} of it without links\n"
        f"measured {measured['against_adamw']:+.1%} ({measured['low']:+.1%} to {measured['high']:+.1%}) "
        f"of {found['adamw_ms']:.1f} ms, {found['steps']} steps of each"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; returns the exit code."""
    chosen, overrides = parse(arguments)
    try:
        config = read(chosen.configs, overrides, int(os.environ.get("WORLD_SIZE", 1)))
        with joined(config.parallel) as world:
            machine = {
                "torch": torch.__version__,
                "device": torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu",
                "ranks": world.size,
                "threads": torch.get_num_threads(),
            }
            found = machine | measure(config, world, chosen.steps)
            if world.is_main:
                chosen.json.write_text(json.dumps(found, indent=1) + "\n")
                print(f"{text(found)}\n{chosen.json}", flush=True)
    except ConfigError as error:
        return refuse(f"bench_period.py: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
