"""Which compute dtype is faster here: measured, since tiny models lose by bf16 even where the hardware has it."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from dit_train.config import Config, ConfigError
from dit_train.data.sources import Dataset
from dit_train.model.dit import DiT
from dit_train.parallel.mesh import World
from dit_train.parallel.shard import shard

_WARM_UP, _TIMED = 2, 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SECONDS_TO_AGREE = 120.0
"""That a rank which has run out of memory waits for the others to say so."""


def measure(config: Config, data: Dataset, world: World) -> dict[str, float]:
    """Median milliseconds of a forward and backward of the real sharded model in each dtype, slowest rank's.

    Infinity where a dtype does not fit into the memory of the ranks.

    Raises:
        ConfigError: it fits into that of some; on those where it does not.
    """
    times = {}
    for name in ("bf16", "fp32"):  # the smaller one first: it may be the only one that fits
        times[name] = _slowest(_time(lambda name=name: _trial_step(config, data, world, DTYPES[name]), world), name)
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
    return times


def _trial_step(config: Config, data: Dataset, world: World, dtype: torch.dtype) -> Callable[[], None]:
    model, backward = trial(config, data, world, dtype)

    def step() -> None:
        backward()
        model.zero_grad()

    return step


def trial(config: Config, data: Dataset, world: World, dtype: torch.dtype) -> tuple[DiT, Callable[[], None]]:
    """A sharded model of the run's shape, to be measured and thrown away, and its pass over one micro-batch.

    The pass leaves gradients. No global random number is drawn.
    """
    with torch.device("meta"):
        model = DiT(config.model, channels=data.channels, image_size=data.image_size, num_classes=data.num_classes)
    shard(model, config.parallel, world, dtype)
    model.to_empty(device=world.device)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().fill_(0.01)  # weights do not matter, but NaN and denormals change the speed
    batch = config.train.micro_batch or config.train.batch // world.data_size
    x = torch.randn(batch, data.channels, data.image_size, data.image_size, generator=torch.Generator().manual_seed(0))
    x, t = x.to(world.device), torch.full((batch,), 0.5, device=world.device)
    labels = torch.zeros(batch, dtype=torch.int64, device=world.device)

    def backward() -> None:
        model(x, t, labels).square().mean().backward()

    return model, backward


def _time(make_step: Callable[[], Callable[[], None]], world: World) -> float:
    """Median of this rank, infinity where it does not fit into memory."""
    times = []
    try:
        step = make_step()
        for _ in range(_WARM_UP + _TIMED):
            start = time.perf_counter()
            step()
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
    except torch.OutOfMemoryError:
        return math.inf
    return statistics.median(times[_WARM_UP:])


def _slowest(milliseconds: float, name: str) -> float:
    """The most of all ranks. Agreed over the CPUs: on GPUs a rank that fits may wait for one that has given up."""
    slowest = torch.tensor(milliseconds, dtype=torch.float64)
    answers = dist.all_reduce(slowest, op=dist.ReduceOp.MAX, async_op=True)
    if math.isfinite(milliseconds):
        answers.wait()  # others may have to compile for long
        return slowest.item()
    try:
        answers.wait(timedelta(seconds=_SECONDS_TO_AGREE))
    except RuntimeError:
        fix = "lower train.micro_batch" if name == "bf16" else "set it to bf16, or lower train.micro_batch"
        raise ConfigError(
            f"train.compute_dtype: {name} does not fit into the memory of rank {dist.get_rank()}, but into that of "
            f"others; {fix}"
        ) from None
    return slowest.item()
