"""``optimizer.period: auto``: the smallest period within a budget, by a short measured run on the run's own ranks.

A trial model of the run's shape takes a few steps with AdamW and then with the configured optimizer, and is thrown away
before the run's own is built; so nothing of the measurement is left but its times. A block by itself, on each rank,
says what forward and backward take without links. The rule is the planner's, `dit_train.planning.period`.

RUN/period.json   period (chosen), budget, within_budget, ranks (that were measured), milliseconds (computing, waiting,
                  adamw, between, refresh: see `StepTimes`), periods (1 to 64: period, step_ms, against_adamw,
                  against_hidden)
"""

from __future__ import annotations

import dataclasses
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dit_train.checkpoint.manifest import RunState
from dit_train.config import Config, ConfigError
from dit_train.data.sources import Dataset
from dit_train.model.conditioning import shared_modulation
from dit_train.model.dit import Block
from dit_train.optimizer_config import AdamWConfig, OptimizerConfig
from dit_train.parallel import precision
from dit_train.parallel.memory import checkpointing
from dit_train.parallel.mesh import World
from dit_train.planning.period import PERIODS, StepTimes, choose, overhead
from dit_train.run import optimizer

NAME = "period.json"
_WARM_UP, _TIMED = 2, 5
"""Steps of each kind."""


def settle(
    config: Config, data: Dataset, world: World, state: RunState, beat: Callable[..., None] = lambda *_, **__: None
) -> tuple[OptimizerConfig, str | None]:
    """The optimizer's settings with a number as period, and a line on where it is from; None where it was given.

    Measures where `state` has no times yet, and leaves them there: a run that goes on, on any number of ranks, has the
    same period from them, or the one that another ``period_budget`` makes of them. Collective.

    Raises:
        ConfigError: the optimizer's options do not fit the shards.
    """
    if not optimizer.is_auto(config.optimizer):
        return config.optimizer, None
    origin = "as measured when the run began"
    if not _usable(state.period_times):
        times = measure(config, data, world, precision.DTYPES[state.compute_dtype], beat)
        state.period_times = [world.size, *dataclasses.astuple(times)]
        origin = "measured"
    times, budget = StepTimes(*state.period_times[1:]), config.optimizer.period_budget
    period, _ = choose(times, budget)
    return optimizer.with_period(config.optimizer, period), f"{describe(times, budget)} ({origin})"


def _usable(recorded_times: list[float]) -> bool:
    """Whether they are there, and what a measurement gives: a checkpoint may come from anywhere."""
    right = len(recorded_times) == 1 + len(dataclasses.fields(StepTimes))
    return right and all(not isinstance(v, list) and v >= 0 for v in recorded_times) and recorded_times[1] > 0


def write(config: Config, state: RunState) -> None:
    """Write RUN/period.json; remove that of an earlier start where the period is given by now."""
    file = Path(config.run.folder) / NAME
    if not optimizer.is_auto(config.optimizer):
        file.unlink(missing_ok=True)
        return
    ranks, *seconds = state.period_times
    beside = file.with_suffix(".tmp")
    beside.write_text(json.dumps(record(StepTimes(*seconds), config.optimizer.period_budget, int(ranks)), indent=1))
    beside.replace(file)


def record(times: StepTimes, budget: float, ranks: int) -> dict[str, Any]:
    """The content of period.json."""
    period, fits = choose(times, budget)
    rows = [
        {"period": one.period, "step_ms": 1e3 * one.step_seconds}
        | {"against_adamw": one.against_adamw, "against_hidden": one.against_hidden}
        for one in (overhead(times, period) for period in PERIODS)
    ]
    milliseconds = {name: 1e3 * seconds for name, seconds in dataclasses.asdict(times).items()}
    found = {"period": period, "budget": budget, "within_budget": fits, "ranks": ranks}
    return found | {"milliseconds": milliseconds, "periods": rows}


def describe(times: StepTimes, budget: float) -> str:
    """One line: the period and why."""
    period, fits = choose(times, budget)
    share = overhead(times, period).against_hidden
    parts = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in dataclasses.asdict(times).items())
    if fits:
        found = f"period {period}, the smallest within {budget:.1%} of AdamW's step: {share:+.1%}"
    else:
        found = f"WARNING: no period is within {budget:.1%} of AdamW's step; period {period}, the longest: {share:+.1%}"
    return f"{found}; ms: {parts}"


def period_of(run: Path) -> int:
    """The period that ``auto`` chose for a run.

    Raises:
        ConfigError: the run folder does not say.
    """
    try:
        return int(json.loads((run / NAME).read_text())["period"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{run / NAME}: missing or damaged; it holds the period that auto chose") from None


def measure(
    config: Config,
    data: Dataset,
    world: World,
    dtype: torch.dtype,
    beat: Callable[..., None] = lambda *_, **__: None,
) -> StepTimes:
    """Times of a step on these ranks: medians of a few, each that of the slowest rank, the same on all. Collective.

    What links add is what the sharded model takes longer than its blocks alone. On tensor-parallel ranks those are
    taken to divide evenly. Gradient norm and averaging, which add to AdamW's step as well, are left out. It takes no
    more memory than training: AdamW's two moments are there in place of momentum and average.

    Raises:
        ConfigError: the optimizer's options do not fit the shards.
    """
    timer = _Timer(world, beat)
    model, backward = precision.trial(config, data, world, dtype)
    passes, (adamw,) = _steps(AdamWConfig(), 1, model, backward, timer)
    alternating = dataclasses.replace(config.optimizer, period=2, phase=0, stagger=False)
    more, (refresh, between) = _steps(alternating, 2, model, backward, timer)
    del model, backward
    _let_go(world)
    count = config.train.batch // world.data_size // _images(config, world)
    whole = count * timer.median(passes + more)
    blocks = count * config.model.depth * timer.median(_block_passes(config, data, world, dtype, timer))
    _let_go(world)
    computing = min(whole, blocks / world.tensor_size)
    return StepTimes(computing, whole - computing, *map(timer.median, (adamw, between, refresh)))


class _Timer:
    """Seconds of what all ranks begin together."""

    def __init__(self, world: World, beat: Callable[..., None]) -> None:
        self._device, self._beat = world.device, beat

    def __call__(self, action: Callable[[], Any]) -> float:
        """Of one call on this rank."""
        self._finish()
        dist.barrier()
        start = _now()
        action()
        self._finish()
        taken = _now() - start
        self._beat("a step of the measurement for optimizer.period")
        return taken

    def median(self, times: list[float]) -> float:
        """Of the slowest rank's, call by call; the same on all ranks."""
        slowest = torch.tensor(times, dtype=torch.float64, device=self._device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return statistics.median(slowest.tolist())

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


_now = time.perf_counter


def _let_go(world: World) -> None:
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


def _images(config: Config, world: World) -> int:
    """Images that a rank takes at once."""
    return config.train.micro_batch or config.train.batch // world.data_size


def _steps(
    settings: OptimizerConfig, kinds: int, model: nn.Module, backward: Callable[[], None], timer: _Timer
) -> tuple[list[float], list[list[float]]]:
    """Seconds of passes of the model, and of the steps after them of each of the kinds that take turns."""
    try:
        steps = optimizer.build(settings, model)
    except ValueError as error:
        raise ConfigError(f"optimizer: {error}") from None
    passes, taken = [], [[] for _ in range(kinds)]
    for number in range(kinds * (_WARM_UP + _TIMED)):
        passes.append(timer(backward))
        taken[number % kinds].append(timer(steps.step))
        model.zero_grad()
    return passes[kinds * _WARM_UP :], [one[_WARM_UP:] for one in taken]


def _block_passes(config: Config, data: Dataset, world: World, dtype: torch.dtype, timer: _Timer) -> list[float]:
    """Seconds of forward and backward of one whole block on one micro-batch: no other rank has a part in it."""
    side, width, images = data.image_size // config.model.patch, config.model.width, _images(config, world)
    with torch.device("meta"):
        block = Block(config.model, side)
        shares = shared_modulation(config.model) is not None
    block.to(dtype).to_empty(device=world.device)
    for tensor in (*block.parameters(), *block.buffers()):
        tensor.detach().fill_(0.01)  # as in `precision.trial`
    block.recompute = checkpointing(config.parallel.activation_checkpointing)
    if config.parallel.compile:
        block.compile(backend=config.parallel.compile_backend)
    row = torch.linspace(-1, 1, width, dtype=dtype, device=world.device)
    tokens, condition, piece = (row.expand(*shape, width) for shape in ((images, side**2), (images,), (images, 1)))
    inputs = [tensor.contiguous().requires_grad_() for tensor in (tokens, condition, *[piece] * (6 * shares))]

    def both_ways() -> None:
        block(*inputs[:2], tuple(inputs[2:]) or None).sum().backward()

    times = []
    for _ in range(_WARM_UP + _TIMED):
        times.append(timer(both_ways))
        block.zero_grad()
        for tensor in inputs:
            tensor.grad = None
    return times[_WARM_UP:]
