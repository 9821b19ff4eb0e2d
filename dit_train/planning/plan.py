"""From a config to a plan: memory, traffic, FLOPs and time of a run on ranks that are not there."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from dit_train.config import Config
from dit_train.data.sources import Summary
from dit_train.model.flops import ModelFlops, model_flops
from dit_train.model.sizes import check_model
from dit_train.optimizer_config import PERIOD_BUDGET, AdamWConfig, OptimizerConfig
from dit_train.parallel.mesh import World
from dit_train.planning import memory, simulate
from dit_train.planning.machine import Machine
from dit_train.planning.period import StepTimes, choose
from dit_train.planning.record import Collective, Recorder
from dit_train.planning.steps import ModelTime, OptimizerCost, StepCost, model_time, step_times
from dit_train.preflight import check_batch, check_parallel
from dit_train.run import optimizer
from optimizers.engine.algorithm import ALGORITHMS

Say = Callable[[str], None]

ADAMW = AdamWConfig()
CHECKPOINTING = ("none", "full")
"""Forms of activation checkpointing that are set beside each other."""


def has_period(config: OptimizerConfig) -> bool:
    """Whether only some of its steps are refreshes."""
    return hasattr(config, "period")


@dataclass(frozen=True)
class ModelPlan:
    """A model on its ranks; the same for every optimizer."""

    config: Config
    ranks: int
    world: World
    parameters: int
    flops: ModelFlops
    steps: simulate.ModelSteps
    parameter_bytes: np.ndarray
    """By rank, and as many of gradients."""
    average_bytes: np.ndarray
    """By rank."""

    @property
    def images(self) -> int:
        """Images that a rank takes in a step."""
        return self.config.train.batch // self.world.data_size

    @property
    def tensor_ranks(self) -> tuple[int, ...]:
        """Ranks that share the matrices of rank 0's blocks."""
        return tuple(range(self.world.tensor_size)) if self.world.tensor_size > 1 else ()

    def time(self, machine: Machine) -> ModelTime:
        """Time of a step without its optimizer."""
        return model_time(self.steps, machine, self.tensor_ranks)

    def second_pass(self, config: OptimizerConfig, machine: Machine) -> float:
        """Seconds of the forwards and backwards that an optimizer asks for beside those of any."""
        one = self.time(machine)
        return (optimizer.batch_passes(config) - 1) * (one.forward + one.backward)

    def step_times(self, plan: OptimizerPlan, adamw: OptimizerPlan, machine: Machine) -> StepTimes:
        """What a period is chosen by."""
        second = self.second_pass(plan.config, machine)
        return step_times(self.time(machine), plan.cost, adamw.cost, machine, second)

    @property
    def flops_a_rank(self) -> float:
        """FLOPs of a step that the model's shapes ask for, a rank."""
        return self.flops.total * self.config.train.batch / self.ranks


@dataclass(frozen=True)
class OptimizerPlan:
    """An optimizer on the ranks of a model."""

    config: OptimizerConfig
    period: float
    """1: every step is a refresh. ∞: none is. Not a number: ``auto``, see `settled`."""
    cost: OptimizerCost
    state_bytes: np.ndarray
    """By rank."""

    @property
    def bytes_a_step(self) -> float:
        """Bytes that the busiest rank's optimizer sends, mean over a period."""
        refresh, between = (max(self.cost.kind(which).bytes_sent.values()) for which in (True, False))
        return between + (refresh - between) / self.period

    @property
    def peak(self) -> int:
        """Bytes of parameters, gradients, states and temporaries of a step of the optimizer, on rank 0."""
        return max(kind.simulated.peak for kind in (self.cost.kind(True), self.cost.kind(False)))


def with_checkpointing(config: Config, kept: str) -> Config:
    """The same settings with another form of activation checkpointing."""
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, activation_checkpointing=kept))


@contextmanager
def planned(config: Config, images: Summary, ranks: int, say: Say) -> Iterator[ModelPlan]:
    """The plan of a model; its fake ranks are there inside, for `plan_optimizer`.

    Raises:
        ConfigError: the settings do not fit each other or the ranks.
    """
    check_batch(config, ranks // check_parallel(config, ranks))
    check_model(config.model, images.image_size)
    with simulate.fake_world(config, ranks) as world:
        say("building the model on fake ranks")
        dit = simulate.build(config, images, world)
        count, work = sum(p.numel() for p in dit.parameters()), model_flops(dit)
        held = memory.parameters(dit, world), memory.averages(dit, world)
        kept = config.parallel.activation_checkpointing
        say(f"forward and backward of {count / 1e9:.3f}B parameters, activation checkpointing {kept}")
        yield ModelPlan(config, ranks, world, count, work, simulate.model_steps(config, dit, world), *held)


def plan_optimizer(config: OptimizerConfig, model: ModelPlan, say: Say) -> OptimizerPlan:
    """Build the optimizer over the model's shards, and take one step of each kind."""
    say(f"steps of {config.name}")
    dit, world = model.steps.dit, model.world
    steps = simulate.build_optimizer(config, dit, period=2)  # both kinds of step are wanted, whatever the period
    algorithm = ALGORITHMS[steps.param_groups[0]["algorithm"]]
    period = config.period if has_period(config) else algorithm.period or 1
    period = period[-1][1] if isinstance(period, tuple) else period  # a schedule's last, which holds for good
    period = math.nan if period == "auto" else period
    kinds = ["refresh"] * algorithm.can_refresh + ["other"] * (has_period(config) or not algorithm.can_refresh)
    found = {kind: _step_cost(steps, kind, model, simulate.products_dtype(config)) for kind in kinds}
    return OptimizerPlan(
        config, period, OptimizerCost(found.get("refresh"), found.get("other")), memory.states(steps, world)
    )


def _step_cost(steps: Any, kind: str, model: ModelPlan, products: str) -> StepCost:
    plan = steps.plan
    buckets = len(plan.buckets) if kind == "refresh" else 0
    # of rank 0's replica alone where replicas do the same
    flops_, sent = ({rank: by[rank] for rank in plan.ranks} for by in (plan.flops(kind), plan.bytes_sent(kind)))
    return StepCost(flops_, sent, products, buckets, simulate.optimizer_step(model.steps.dit, steps))


def settled(
    plan: OptimizerPlan, model: ModelPlan, adamw: OptimizerPlan, machine: Machine, budget: float
) -> OptimizerPlan:
    """The plan with a number where its period is ``auto``: chosen as a run chooses it, but by modelled times."""
    if not optimizer.is_auto(plan.config):
        return plan
    period, _ = choose(model.step_times(plan, adamw, machine), budget)
    return dataclasses.replace(plan, config=optimizer.with_period(plan.config, period), period=period)


def budget_of(config: OptimizerConfig, given: float | None) -> float:
    """The overhead to stay within: as given, else the optimizer's own."""
    return getattr(config, "period_budget", PERIOD_BUDGET) if given is None else given


def gathered(plan: OptimizerPlan, model: ModelPlan) -> OptimizerPlan:
    """The same optimizer where every rank gathers every matrix, the published form, by the plan alone.

    Its passes over memory are taken to grow as its products do. Those over 256 parts of each matrix are too many to
    simulate, so its peak of memory is not known.
    """
    if plan.cost.refresh is None:
        return plan
    owners = plan.cost.refresh
    steps = simulate.build_optimizer(plan.config, model.steps.dit, exchange="gather")
    flops_, sent, recorder = steps.plan.flops("refresh"), steps.plan.bytes_sent("refresh"), Recorder()
    for placed in steps.plan.buckets:
        recorder.links[Collective("_allgather_base_", placed.bucket.bytes_sent[0], placed.ranks)] += 1
        recorder.bytes_sent += placed.bucket.bytes_sent[0]
    for operator, count in owners.simulated.recorder.operators.items():
        walked = operator.bytes * flops_[0] // max(1, owners.flops[0])
        recorder.operators[operator._replace(bytes=operator.bytes if operator.flops else walked)] += count
    simulated, count = simulate.OptimizerStep(recorder, owners.simulated.peak), len(steps.plan.buckets)
    cost = StepCost(flops_, sent, owners.products, count, simulated)
    return dataclasses.replace(plan, cost=OptimizerCost(cost, plan.cost.between))
