"""The model of time: what has to be slower is, and a slower link never gives a smaller period."""

import dataclasses
import random

import pytest

from dit_train.planning.machine import MACHINES
from dit_train.planning.period import PERIODS, overhead, smallest_period
from dit_train.planning.record import Collective, Operator, Recorder
from dit_train.planning.simulate import ModelSteps, OptimizerStep, Pass
from dit_train.planning.steps import OptimizerCost, StepCost, model_time, step_times

H100 = MACHINES["h100"]
RANKS = tuple(range(256))


def recorded(operators=(), links=()):
    recorder = Recorder()
    for operator in operators:
        recorder.operators[operator] += 1
    for name, sent, ranks in links:
        recorder.links[Collective(name, sent, ranks)] += 1
        recorder.bytes_sent += sent
    return recorder


def steps_of(draw):
    """A model of some size on 256 ranks, and what AdamW and a periodic optimizer do there."""
    work, weights = 10 ** draw.uniform(12, 14), int(10 ** draw.uniform(8, 11))
    gather, scatter = ("_allgather_base_", weights, RANKS), ("_reduce_scatter_base_", 2 * weights, RANKS)
    one = Pass(
        recorded([Operator(int(work), weights, "bf16")], [gather, ("all_reduce", weights // 9, RANKS[:8])]),
        recorded([Operator(int(2 * work), weights, "bf16")], [gather, scatter]),
        0,
        {},
    )
    norm = recorded([Operator(0, weights // 64, "fp32")], [("allreduce_", 16, RANKS)])
    model = ModelSteps(None, [(draw.choice([1, 4]), one)], norm)
    walk = Operator(0, weights // 32, "fp32")
    plain = StepCost({0: 0}, {0: 0}, "bf16", 0, OptimizerStep(recorded([walk]), 0))
    exchange = [("alltoall_base_", int(weights * 10 ** draw.uniform(-3, 0)), RANKS)] * 4
    refresh = recorded([walk, walk], exchange)
    products = {0: int(work * draw.uniform(0.01, 2))}
    sent = {0: refresh.bytes_sent, 1: 2 * refresh.bytes_sent}
    cost = StepCost(products, sent, "bf16", 2, OptimizerStep(refresh, 0))
    between = StepCost({0: 0}, {0: 0}, "bf16", 0, OptimizerStep(recorded([walk]), 0))
    return model, OptimizerCost(cost, between), OptimizerCost(None, plain)


def slower(machine, draw):
    """One or all of the links slowed down."""
    by = draw.uniform(1, 4)
    network = dataclasses.replace(
        machine, network_gbs=machine.network_gbs / by, network_latency_us=machine.network_latency_us * by
    )
    everything = dataclasses.replace(network, node_gbs=machine.node_gbs / by, node_latency_us=3 * by)
    return draw.choice([network, everything, dataclasses.replace(machine, network_gbs=machine.network_gbs / by)])


def test_a_slower_link_never_gives_a_smaller_period():
    draw, found = random.Random(0), set()
    for _ in range(100):
        model, cost, adamw = steps_of(draw)
        budget, machine, before = draw.choice([0.01, 0.05, 0.2]), H100, 1
        for _ in range(8):
            times = step_times(model_time(model, machine, RANKS[:8]), cost, adamw, machine)
            rows = [overhead(times, period) for period in PERIODS]
            assert all(row.against_hidden >= row.against_adamw - 1e-12 for row in rows)
            assert [row.step_seconds for row in rows] == sorted((row.step_seconds for row in rows), reverse=True)
            period = smallest_period(times, budget) or 65
            assert period >= before
            found.add(period)
            machine, before = slower(machine, draw), period
    assert len(found) > 16  # the test has seen many


def test_a_share_of_what_a_slow_link_has_slowed_down_would_not_be_monotone():
    """Why the budget is taken of AdamW's step without waiting."""
    model, cost, adamw = steps_of(random.Random(3))
    shares = []
    for by in (1, 1000):
        machine = dataclasses.replace(H100, network_gbs=H100.network_gbs / by, node_gbs=H100.node_gbs / by)
        no_exchange = dataclasses.replace(
            cost.refresh, simulated=OptimizerStep(recorded([Operator(0, 10**9, "fp32")]), 0), bytes_sent={0: 0}
        )
        every_step = OptimizerCost(no_exchange, cost.between)
        row = overhead(step_times(model_time(model, machine, ()), every_step, adamw, machine), 1)
        shares.append((row.against_adamw, row.against_hidden))
    assert shares[1][0] < shares[0][0] and shares[1][1] == pytest.approx(shares[0][1])


def test_the_network_slows_down_what_leaves_a_node_and_nothing_else():
    slow = dataclasses.replace(H100, network_gbs=5)
    for name in ("_allgather_base_", "alltoall_base_"):
        assert slow.link_seconds(name, 10**9, RANKS[:8]) == H100.link_seconds(name, 10**9, RANKS[:8])
        assert slow.link_seconds(name, 10**9, RANKS) > 5 * H100.link_seconds(name, 10**9, RANKS)
    assert H100.link_seconds("allreduce_", 10**9, (7,)) == 0
    # rings leave a node by all of its cards, an all-to-all each rank by its own
    assert H100.link_seconds("alltoall_base_", 10**9, RANKS) > 6 * H100.link_seconds("_allgather_base_", 10**9, RANKS)


def test_an_operator_takes_the_longer_of_its_products_and_its_bytes():
    steps = [
        ModelSteps(None, [(1, Pass(recorded([operator]), recorded(), 0, {}))], recorded())
        for operator in (Operator(10**12, 0, "bf16"), Operator(0, 10**10, "bf16"), Operator(10**12, 10**10, "bf16"))
    ]
    products, walks, both = (model_time(one, H100, ()).total for one in steps)
    assert products == pytest.approx(1e12 / (989.4e12 * 0.7)) and walks == pytest.approx(1e10 / 3.35e12)
    assert both == max(products, walks)
