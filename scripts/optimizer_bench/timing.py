"""Times of steps that alternate with one another, so that noise hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from optimizers import census

from .contenders import Contender
from .problem import Problem


class Unfit(Exception):
    """A contender that cannot run here; the text says why."""


@dataclass
class Sample:
    """Milliseconds of steps, each that of the slowest rank."""

    times: list[float] = field(default_factory=list)

    def means(self, period: int) -> list[float]:
        """The mean step of every whole period."""
        size = max(1, period)
        starts = range(0, len(self.times) - size + 1, size)
        return [statistics.fmean(self.times[i : i + size]) for i in starts]


@dataclass
class Runner:
    """A contender that has been built and warmed up.

    Of each step of a period: ``sent`` the bytes by rank, ``planned`` those that the optimizer itself names for this
    rank, ``collectives`` their number.
    """

    contender: Contender
    step: Callable[[], None]
    prepare: Callable[[], None]
    optimizer: Any = None
    sent: list[list[int]] = field(default_factory=list)
    collectives: list[int] = field(default_factory=list)
    planned: list[int] = field(default_factory=list)
    sample: Sample = field(default_factory=Sample)


def clock(step: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of one call on this rank, begun by all ranks together as after a backward pass."""
    dist.barrier()
    synchronize(device)
    begin = time.perf_counter()
    step()
    synchronize(device)
    return 1e3 * (time.perf_counter() - begin)


def synchronize(device: torch.device) -> None:
    """Wait for what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def slowest(times: Sequence[float], device: torch.device) -> list[float]:
    """Element by element the maximum over ranks."""
    reduced = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(reduced, dist.ReduceOp.MAX)
    return reduced.tolist()


def of_all_ranks(numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """``result[i][rank]`` for every number."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return torch.stack(everyone, 1).tolist()


def build(contender: Contender, problem: Problem) -> Runner:
    """Build a contender and run one whole period, in which its bytes are counted.

    Raises:
        Unfit: on all ranks, if it failed on any. One of ours raises its own error instead.
    """
    error: Exception | None = None
    runner = None
    try:
        runner = _build(contender, problem)
        _count(runner)
    except Exception as problem_here:
        if contender.family == "ours":
            raise
        error = problem_here
    if max(slowest([float(error is not None)], problem.device)):
        raise Unfit("failed on another rank" if error is None else reason(error))
    assert runner is not None
    runner.sent = of_all_ranks([row[0] for row in runner.sent], problem.device)
    return runner


def reason(error: Exception) -> str:
    """One short line."""
    if isinstance(error, ModuleNotFoundError):
        return f"not installed ({error.name})"
    said = str(error).strip().split("\n")[0].split(". ")[0]
    return f"{type(error).__name__}: {said[:150]}" if said else type(error).__name__


def _build(contender: Contender, problem: Problem) -> Runner:
    params = problem.parameters() if contender.family != "floor" else []
    built = contender.build(params)
    if not isinstance(built, torch.optim.Optimizer):
        return Runner(contender, built, lambda: None)
    give_gradients(params, problem.gradients, False)

    def prepare() -> None:
        if contender.writes_gradients:
            give_gradients(params, problem.gradients, True)

    step = built.step if contender.compiles or contender.family != "peer" else _eagerly(built.step)
    return Runner(contender, step, prepare, built)


def _eagerly(step: Callable[[], Any]) -> Callable[[], None]:
    """``step`` with the compiled functions of a package run as they are written."""

    def eager() -> None:
        with torch.compiler.set_stance("force_eager"):
            step()

    return eager


def _count(runner: Runner) -> None:
    """Run a period under the census, and one before it that may compile."""
    period = max(1, runner.contender.period)
    for _ in range(period if runner.contender.compiles else 0):
        runner.prepare()
        runner.step()
    for _ in range(period):
        runner.prepare()
        with census() as seen, torch.compiler.set_stance("force_eager"):  # a dispatch mode keeps torch from compiling
            runner.step()
        runner.sent.append([seen.bytes_sent])
        runner.collectives.append(seen.collectives)
        if hasattr(runner.optimizer, "wire_bytes"):
            runner.planned.append(runner.optimizer.wire_bytes)


def give_gradients(params: Sequence[Tensor], gradients: Sequence[Tensor], copy: bool) -> None:
    """Set ``grad`` of every parameter."""
    for p, g in zip(params, gradients, strict=True):
        p.grad = g.clone() if copy else g


def interleave(runners: Sequence[Runner], rounds: int, device: torch.device, tell: Callable[[str], None]) -> None:
    """One step of every runner a round, of slow ones every fourth round."""
    for number in range(rounds):
        for runner in runners:
            if runner.contender.slow and number % 4:
                continue
            runner.prepare()
            runner.sample.times.append(clock(runner.step, device))
        tell(f"round {number + 1} of {rounds}")
    for runner in runners:
        runner.sample.times = slowest(runner.sample.times, device)
