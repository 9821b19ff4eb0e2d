"""FLOPs by formula against torch's own counter; memory and traffic that have to follow from the settings."""

import dataclasses
import typing
from collections import Counter
from fractions import Fraction

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dit_train.config import Config, ModelConfig, TrainConfig
from dit_train.data.sources import Summary
from dit_train.model.dit import DiT
from dit_train.model.flops import model_flops
from dit_train.model.sizes import SIZES, sized
from dit_train.optimizer_config import (
    AdamWConfig,
    DionConfig,
    MuonBPConfig,
    MuonConfig,
    OptimizerConfig,
    PeriodicRowMuonConfig,
)
from dit_train.planning import machine, memory, simulate
from dit_train.planning.plan import ADAMW, plan_optimizer, planned
from dit_train.planning.record import Recorder
from dit_train.planning.report import figures

LATENTS = Summary(channels=4, image_size=32, num_classes=1000, train_count=0, heldout_count=0)
SMALL = ModelConfig(width=64, depth=3, heads=4)


LARGEST = [pytest.param(size, marks=pytest.mark.long) for size in ("9B", "15B")]


def quiet(_text):
    pass


def forward_backward(dit, images):
    x = torch.randn(images, 4, 8, 8)
    dit(x, torch.rand(images), torch.zeros(images, dtype=torch.int64)).square().mean().backward()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"adaln": "noshift", "learn_sigma": True, "qk_norm": True},
        {"adaln": "lora", "adaln_rank": 8, "swiglu": True, "position": "rope"},
        {"adaln": "single", "mlp_ratio": 3.0},
        {"adaln": "single", "swiglu": True, "qk_norm": True},
        {"adaln": "noshift", "patch": 4, "position": "rope"},
        {"adaln": "zero", "swiglu": True, "learn_sigma": True},
    ],
)
def test_flops_are_those_that_torch_counts(settings):
    dit = DiT(dataclasses.replace(SMALL, **settings), channels=4, image_size=8, num_classes=10)
    work = model_flops(dit)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as written_out:
        forward_backward(dit, 5)
    assert written_out.get_total_flops() == 5 * work.total
    with Recorder() as seen:  # the backward of fused attention computes the scores again
        forward_backward(dit, 5)
    assert seen.flops == 5 * (work.total + work.attention // 6)


def test_a_gpu_that_is_not_known_whole_has_no_peak():
    assert machine.peak_tflops("NVIDIA H200", "bf16") == machine.MACHINES["h200"].bf16_tflops
    assert machine.peak_tflops("NVIDIA H100 PCIe", "fp32") < machine.peak_tflops("NVIDIA H100 80GB HBM3", "fp32")
    for name in ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce GTX 1080", "CPU"):
        assert machine.peak_tflops(name, "bf16") is None


def test_what_sees_one_vector_an_image_is_not_counted_for_each_token():
    with torch.device("meta"):
        dit = DiT(sized("XL", learn_sigma=True), channels=4, image_size=32, num_classes=1000)
    work = model_flops(dit)
    assert work.total / 1e9 == pytest.approx(712, abs=0.5)  # 6 x 118.6 GMAC, as published
    assert work.per_image < 0.003 * work.total


def test_checkpointing_keeps_less_and_multiplies_more():
    found = {}
    for kept in ("none", "selective", "full"):
        config = Config(model=SMALL, train=TrainConfig(batch=64))
        config = dataclasses.replace(
            config, parallel=dataclasses.replace(config.parallel, activation_checkpointing=kept)
        )
        with planned(config, LATENTS, 8, quiet) as model:
            ((_, one),) = model.steps.passes
            found[kept] = (one.kept, one.peak["Total"], one.forward.flops + one.backward.flops, model.flops.total)
    kept, peak, multiplied, asked = zip(*found.values(), strict=True)
    assert kept[0] > kept[1] > kept[2] and peak[0] > peak[1] > peak[2]
    assert multiplied[0] <= multiplied[1] < multiplied[2] and len(set(asked)) == 1


def test_accumulated_micro_batches_send_more_and_keep_less():
    found = []
    for micro_batch in (None, 2):
        config = Config(model=SMALL, train=TrainConfig(batch=64, micro_batch=micro_batch))
        with planned(config, LATENTS, 8, quiet) as model:
            calls = Counter()
            for count, one in model.steps.passes:
                calls.update({name: count * number for name, number in one.backward.calls.items()})
            found.append((calls, max(one.kept for _, one in model.steps.passes)))
    (whole, much), (parts, little) = found
    assert parts == Counter({name: 4 * count for name, count in whole.items()}) and little < much / 3


@pytest.mark.parametrize("size", ["1.3B", "2.3B", "4B", *LARGEST])
def test_a_period_of_three_sends_two_thirds_less_and_of_five_four_fifths(size):
    config = Config(model=ModelConfig(**SIZES[size]))
    sent = {}
    with simulate.fake_world(config, 256) as world:
        dit = simulate.build(config, LATENTS, world)
        for settings, period in ((MuonConfig(), 1), (PeriodicRowMuonConfig(), 3), (MuonBPConfig(), 5)):
            plan = simulate.build_optimizer(settings, dit).plan
            between = plan.bytes_sent("other")
            sent[period] = {r: plan.bytes_sent("refresh")[r] + (period - 1) * between[r] for r in range(256)}
        states = memory.states(simulate.build_optimizer(AdamWConfig(), dit), world)
    assert min(sent[1].values()) > 0
    for period in (3, 5):
        assert all(Fraction(sent[period][r], period * sent[1][r]) == Fraction(1, period) for r in range(256))
    assert sum(states) == pytest.approx(8 * sum(p.numel() for p in dit.parameters()), rel=1e-5)


@pytest.mark.parametrize("tensor", [2, pytest.param(1, marks=pytest.mark.long)])
def test_a_simulated_step_of_every_optimizer_sends_what_its_plan_says(tensor):
    """As `test_planning` has it of real ranks, but of all of them."""
    config = Config(model=SMALL, train=TrainConfig(batch=64))
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, tensor=tensor))
    with planned(config, LATENTS, 8, quiet) as model:
        adamw = plan_optimizer(ADAMW, model, quiet)
        for member in typing.get_args(OptimizerConfig):
            plan = plan_optimizer(member(), model, quiet)
            kinds = [kind for kind in (plan.cost.refresh, plan.cost.between) if kind is not None]
            assert len(kinds) == 1 + hasattr(member, "period"), member
            for kind in kinds:
                assert kind.simulated.recorder.bytes_sent == kind.bytes_sent.get(0, 0), member
                assert kind.seconds(machine.MACHINES["h100"]) > 0, member
            numbers = figures(model, plan, adamw, machine.MACHINES["h100"], 0.05)
            assert (numbers["period"] is None) == ("refresh" not in numbers["optimizer"] and plan.period != 1), member
            assert (plan.state_bytes.sum() < adamw.state_bytes.sum()) == (member.name not in LARGE_STATE), member


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        (MuonConfig(), "bf16"),
        (MuonConfig(ns_dtype="fp32"), "fp32"),
        (MuonConfig(ns_coefficients="cans"), "fp32"),  # refuses 16 bits
        (MuonConfig(ns_coefficients="gram_ns5"), "bf16"),  # fp16 on a GPU, refused on the CPU that plans
        (DionConfig(), "fp32"),
    ],
)
def test_an_optimizers_products_take_the_time_of_the_dtype_that_a_gpu_multiplies_in(settings, dtype):
    with planned(Config(model=SMALL, train=TrainConfig(batch=8)), LATENTS, 1, quiet) as model:
        cost = plan_optimizer(settings, model, quiet).cost.kind(True)
    products_alone = dataclasses.replace(machine.MACHINES["h100"], memory_gbs=1e30)
    peak = {"bf16": products_alone.bf16_tflops, "fp32": products_alone.fp32_tflops}[dtype]
    expected = max(cost.flops.values()) / (peak * 1e12 * products_alone.efficiency)
    assert cost.seconds(products_alone) == pytest.approx(expected) and expected > 0


LARGE_STATE = ("adamw", "mars_adamw", "mars_muon", "dion")
"""Of at least two numbers in fp32 for each parameter."""
