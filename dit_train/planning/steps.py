"""A model of time: what a step computes and sends, divided by what a machine can do.

    operator      the longer of its products at the peak (times an efficiency) and its bytes through GPU memory
    forward, backward
                  the longer of their operators and FSDP2's collectives, which hide behind each other; the sums over
                  tensor-parallel ranks hide behind nothing
    optimizer     its exchange in b buckets, and Newton–Schulz and passes over memory of the busiest rank: the longer
                  of the two, and a b-th of the shorter, which the first bucket or the last waits for
    rest          gradient norm, clipping, averaging: one after the other

Left out: kernel launches, ranks that wait for each other, compiled blocks (whose operators are fewer), the data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from dit_train.planning.machine import Machine
from dit_train.planning.period import StepTimes
from dit_train.planning.record import Collective, Recorder
from dit_train.planning.simulate import ModelSteps, OptimizerStep


@dataclass(frozen=True)
class StepCost:
    """What all ranks together do in one kind of step of an optimizer, by its plan."""

    flops: Mapping[int, int]
    """Newton–Schulz, and row steps, by rank."""
    bytes_sent: Mapping[int, int]
    """By rank."""
    products: str
    """``bf16`` or ``fp32``: the dtype of the matrix products."""
    buckets: int
    simulated: OptimizerStep
    """The same step on rank 0."""

    def seconds(self, machine: Machine) -> float:
        """Time of the step."""
        products = machine.product_seconds(max(self.flops.values(), default=0), self.products)
        operators = self.simulated.recorder.operators.items()
        walks = machine.memory_seconds(sum(n * o.bytes for o, n in operators if not o.flops))
        sent = self.simulated.recorder.bytes_sent
        busiest = max(self.bytes_sent.values(), default=0) / sent if sent else 1.0
        exchange = _link_seconds(self.simulated.recorder.links, machine, busiest)
        computing = products + walks
        return max(computing, exchange) + min(computing, exchange) / max(1, self.buckets)


@dataclass(frozen=True)
class OptimizerCost:
    """What an optimizer costs: refreshes, and the steps between; one of them for those that know one kind only."""

    refresh: StepCost | None
    between: StepCost | None

    def kind(self, refresh: bool) -> StepCost:
        """The cost of a step of that kind, or of the only one."""
        found = self.refresh if refresh else self.between
        return found or self.between or self.refresh

    def seconds(self, machine: Machine, period: float) -> float:
        """Mean time of a step, one in `period` of which is a refresh."""
        share = 1 / period
        return share * self.kind(True).seconds(machine) + (1 - share) * self.kind(False).seconds(machine)


@dataclass(frozen=True)
class ModelTime:
    """Seconds of a step without its optimizer."""

    forward: float
    backward: float
    rest: float
    waiting: float
    """Of these, waiting for links."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.forward + self.backward + self.rest


def model_time(steps: ModelSteps, machine: Machine, tensor_ranks: tuple[int, ...]) -> ModelTime:
    """Time of forward, backward and what follows but the optimizer; `tensor_ranks` share the matrices of a block."""
    times, waiting = [0.0, 0.0], 0.0
    for count, one in steps.passes:
        for i, recorder in enumerate((one.forward, one.backward)):
            taken, waited = _hidden(recorder, machine, tensor_ranks)
            times[i] += count * taken
            waiting += count * waited
    links = _link_seconds(steps.rest.links, machine)
    rest = operator_seconds(steps.rest, machine) + links
    return ModelTime(times[0], times[1], rest, waiting + links)


def _hidden(recorder: Recorder, machine: Machine, tensor_ranks: tuple[int, ...]) -> tuple[float, float]:
    """Time of a pass, and how much of it waits for links."""
    computing = operator_seconds(recorder, machine)
    exposed = Counter({link: n for link, n in recorder.links.items() if link.ranks == tensor_ranks})
    behind = _link_seconds(recorder.links - exposed, machine)
    summing = _link_seconds(exposed, machine)
    taken = max(computing + summing, behind)
    return taken, taken - computing


def operator_seconds(recorder: Recorder, machine: Machine) -> float:
    """Time of operators one after the other."""
    return sum(
        n * max(machine.product_seconds(o.flops, o.dtype), machine.memory_seconds(o.bytes))
        for o, n in recorder.operators.items()
    )


def _link_seconds(links: Counter[Collective], machine: Machine, factor: float = 1.0) -> float:
    return sum(n * machine.link_seconds(link.name, factor * link.bytes_sent, link.ranks) for link, n in links.items())


def step_times(
    model: ModelTime, cost: OptimizerCost, adamw: OptimizerCost, machine: Machine, second_pass: float = 0.0
) -> StepTimes:
    """What a period is chosen by; a `second_pass` of the model, in seconds, is the optimizer's own cost."""
    return StepTimes(
        computing=model.total - model.waiting,
        waiting=model.waiting,
        adamw=adamw.seconds(machine, 1),
        between=second_pass + cost.kind(False).seconds(machine),
        refresh=second_pass + cost.kind(True).seconds(machine),
    )
