"""What plans say against what real gloo ranks do: collectives, bytes sent and held, FLOPs of the optimizer."""

import dataclasses
from collections import Counter
from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from dit_train.checkpoint.manifest import RunState
from dit_train.config import Config, ModelConfig, ParallelConfig, TrainConfig
from dit_train.data.sources import Summary
from dit_train.optimizer_config import (
    AdaGOConfig,
    AdamWConfig,
    AuONConfig,
    Dion2Config,
    DionConfig,
    MarsAdamWConfig,
    MuonBPConfig,
    NorMuonConfig,
    PeriodicRowMuonConfig,
    ScionOtherConfig,
)
from dit_train.parallel import shard
from dit_train.parallel.mesh import joined
from dit_train.parallel.shard import local
from dit_train.planning.machine import MACHINES
from dit_train.planning.plan import ADAMW, plan_optimizer, planned
from dit_train.planning.report import figures, memory_figures
from dit_train.preflight import Plan
from dit_train.run import loop, optimizer
from dit_train.run.batch import Batch
from dit_train.run.ema import EMA
from dit_train.run.setup import Run
from dit_train.run.stop import StopRequest
from optimizers import census
from tests.distributed.ranks import run

IMAGES = Summary(channels=1, image_size=8, num_classes=10, train_count=0, heldout_count=0)
MODEL = ModelConfig(width=64, depth=2, heads=4, qk_norm=True)


def case(steps, *, parallel=None, micro_batch=None, batch=24, **model):
    train = TrainConfig(batch=batch, micro_batch=micro_batch, compute_dtype="bf16")
    parallel = ParallelConfig(device="cpu", **(parallel or {}))
    return Config(model=dataclasses.replace(MODEL, **model), optimizer=steps, train=train, parallel=parallel)


BP, ROWS = MuonBPConfig(period=2, ns_dtype="bf16"), PeriodicRowMuonConfig(period=2, ns_dtype="bf16")
CASES = {
    2: [
        case(BP, parallel={"activation_checkpointing": "full"}),
        case(dataclasses.replace(ROWS, exchange="gather", wire_dtype="fp32"), micro_batch=4),
        case(NorMuonConfig(momentum_dtype="int8", mars_gamma=0.025, ns_dtype="bf16")),
        case(AdamWConfig(), micro_batch=3, parallel={"sync_every_micro_batch": False, "reshard_after_forward": False}),
    ],
    3: [
        case(ROWS, adaln="lora", adaln_rank=8, swiglu=True, position="rope"),
        case(AdaGOConfig(ns_dtype="bf16")),
        case(AuONConfig()),
        case(Dion2Config(ns_dtype="bf16", selection="local")),  # global: what a rank sends depends on its rows
        case(DionConfig(rank_fraction=0.5)),
        case(MarsAdamWConfig(mars_exact=True), micro_batch=4),
    ],
    4: [
        case(BP, parallel={"replicas": 2}, micro_batch=6),
        case(ROWS, parallel={"tensor": 2}),
        case(ScionOtherConfig(ball="column"), parallel={"tensor": 2}),
        case(ROWS, parallel={"replicas": 2, "tensor": 2, "activation_checkpointing": "selective"}),
    ],
}


def predicted(config, ranks):
    with planned(config, IMAGES, ranks, lambda text: None) as model:
        own = plan_optimizer(config.optimizer, model, lambda text: None)
        adamw = plan_optimizer(ADAMW, model, lambda text: None)
        held = {"parameters": model.parameter_bytes, "states": own.state_bytes, "average": model.average_bytes}
        return figures(model, own, adamw, MACHINES["h100"], 0.05), own.cost, held


def bytes_of(tensors):
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def real_steps(configs):
    return [_real_steps(config) for config in configs]


def begun(config, world):
    """A run on these ranks, and its batch."""
    model = shard.build(config.model, config.parallel, IMAGES, world, torch.bfloat16, seed=0)
    steps = optimizer.build(config.optimizer, model)
    ema = EMA(model, 0.9)
    one = Run(Plan(config, {}, None), world, None, model, ema, steps, [1e-3], RunState(), None, None)
    share = config.train.batch // world.data_size
    x = torch.randn(share, 1, 8, 8)
    return one, Batch(x, torch.rand(share), torch.zeros(share, dtype=torch.int64), x)


def held_by(one):
    """This rank's parts of what stays between steps."""
    states = [local(value) for state in one.optimizer.state.values() for value in state.values()]
    return {
        "parameters": [local(p.detach()) for p in one.model.parameters()],
        "states": states,
        "average": [local(average) for average in one.ema.weights.values()],
    }


def _real_steps(config):
    with joined(config.parallel) as world:
        one, batch = begun(config, world)
        steps, kinds = one.optimizer, []
        for _ in range(2):
            with census() as of_model:
                loop._forward_backward(one, batch, StopRequest())  # twice where the optimizer asks for it
            with census() as of_optimizer:
                steps.step()
            kinds.append((of_optimizer.calls, of_optimizer.bytes_sent, of_optimizer.flops))
            steps.zero_grad()
        sizes = {name: bytes_of(tensors) for name, tensors in held_by(one).items()}
        return (of_model.calls, of_model.bytes_sent), kinds, sizes


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (3, 4))])
def test_a_real_step_sends_multiplies_and_holds_what_its_plan_says(ranks):
    by_rank = run(real_steps, ranks, CASES[ranks], timeout=240)
    for number, config in enumerate(CASES[ranks]):
        numbers, cost, held = predicted(config, ranks)
        traffic = numbers["model_traffic"].values()
        calls = sum((Counter(part["collectives"]) for part in traffic), Counter())
        for rank, results in enumerate(by_rank):
            where = f"{ranks} ranks, case {number}, rank {rank}"
            of_model, kinds, sizes = results[number]
            assert of_model == (calls, sum(part["bytes_sent"] for part in traffic)), where
            for refresh, (seen, sent, flops) in zip((True, False), kinds, strict=True):
                kind = cost.kind(refresh)
                assert seen == kind.simulated.recorder.calls, where
                assert sent == kind.bytes_sent.get(rank, 0), where
                if kind.buckets or config.optimizer.name in ("muon_bp", "block_muon", "dion"):  # else no products
                    assert flops == kind.flops.get(rank, 0), where
            for name, size in sizes.items():
                assert size == pytest.approx(held[name][rank], rel=0.01), (where, name)


HEAVY = {"width": 128, "depth": 3}
PEAKS = [
    *(case(BP, parallel={"activation_checkpointing": kept}, batch=192, **HEAVY) for kept in ("none", "full")),
    case(AdamWConfig(), parallel={"sync_every_micro_batch": False}, micro_batch=24, batch=192, **HEAVY),
]


def real_peaks(configs):
    """The most bytes that the passes and the optimizer have at once, in each of four steps."""
    return [_real_peaks(config) for config in configs]


def _real_peaks(config):
    with joined(config.parallel) as world:
        one, batch = begun(config, world)
        found = []
        for _ in range(4):
            one.optimizer.zero_grad()
            kept = sum(map(bytes_of, held_by(one).values()))
            training = kept + _most(lambda: loop._forward_backward(one, batch, StopRequest()))
            kept = sum(map(bytes_of, held_by(one).values())) + bytes_of(local(p.grad) for p in one.model.parameters())
            found.append((training, kept + _most(one.optimizer.step)))
        return found


def _most(action):
    """Most bytes that torch has asked for and not given back since the beginning of an action."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        action()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@pytest.mark.long
def test_memory_at_its_peak_is_that_of_real_steps_with_checkpointing_and_with_gradients_that_wait():
    by_rank = run(real_peaks, 2, PEAKS, timeout=240)
    for number, config in enumerate(PEAKS):
        with planned(config, IMAGES, 2, lambda text: None) as model:
            own = plan_optimizer(config.optimizer, model, lambda text: None)
            planned_peak, average = memory_figures(model, own)["peak"]["max"], int(model.average_bytes[0])
            updating_peak = own.peak + average
        # of the ranks and steps the least that either met: gloo gives buffers back when it comes to it
        training = min(found[0] for rank in by_rank for found in rank[number][1:])  # states are there from then on
        updating = max(found[1] for found in by_rank[0][number])
        assert updating_peak == pytest.approx(updating, rel=0.05), number
        assert planned_peak == pytest.approx(max(training, updating), rel=0.04), number
