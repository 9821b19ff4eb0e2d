"""Runs the real training step on one of many fake ranks, with tensors that have shapes and no memory."""

from __future__ import annotations

import dataclasses
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, _FSDPRefType
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from dit_train.config import Config, ConfigError
from dit_train.data.sources import Summary
from dit_train.diffusion.objectives import velocity_loss
from dit_train.model.dit import DiT
from dit_train.optimizer_config import OptimizerConfig
from dit_train.parallel import shard
from dit_train.parallel.mesh import World, joined
from dit_train.parallel.precision import DTYPES
from dit_train.planning.record import Recorder
from dit_train.run import faults, optimizer
from optimizers.orthogonal.coefficients import is_gram, needs_full_precision


@dataclass(frozen=True)
class Pass:
    """Forward and backward of one micro-batch."""

    forward: Recorder
    backward: Recorder
    kept: int
    """Bytes of activations between the two."""
    peak: dict[str, int]
    """Bytes by category of `FSDPMemTracker` at the moment that needs most."""


@dataclass(frozen=True)
class ModelSteps:
    """What every step does whatever the optimizer."""

    dit: DiT
    passes: list[tuple[int, Pass]]
    """Kinds of micro-batches, and how many a step has of each."""
    rest: Recorder
    """Gradient norm, agreement, clipping and averaging of weights."""


@dataclass(frozen=True)
class OptimizerStep:
    """One kind of step of an optimizer."""

    recorder: Recorder
    peak: int
    """Bytes of parameters, gradients, states and temporaries at the moment that needs most."""


@contextmanager
def fake_world(config: Config, ranks: int) -> Iterator[World]:
    """Rank 0 of `ranks` that are not there; what it sends, goes nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with joined(dataclasses.replace(config.parallel, device="cpu")) as world, _quiet():
            yield world
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it would send what DTensors of a later world send through groups of this one


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of a CPU that plays a GPU."""
    logger = logging.getLogger("torch.distributed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logger.setLevel(level)


def compute_dtype(config: Config) -> str:
    """``bf16`` or ``fp32``; GPUs that are planned for are faster in bf16."""
    return "fp32" if config.train.compute_dtype == "fp32" else "bf16"


def products_dtype(config: OptimizerConfig) -> str:
    """``bf16``, which stands for all of 16 bits, or ``fp32``: what GPUs multiply an optimizer's matrices in."""
    asked = getattr(config, "ns_dtype", "fp32")  # products without Newton–Schulz are those of low-rank steps
    if asked == "auto":
        return "fp32" if needs_full_precision(config.ns_coefficients) else "bf16"
    return asked


def build(config: Config, images: Summary, world: World) -> DiT:
    """The sharded model on the meta device: placements, but no memory, not even fake.

    Raises:
        ConfigError: it is too large.
    """
    with torch.device("meta"):
        shape = {"channels": images.channels, "image_size": images.image_size, "num_classes": images.num_classes}
        try:
            dit = DiT(config.model, **shape)
        except (TypeError, RuntimeError) as error:  # positions have memory, and sizes a limit
            raise ConfigError(f"model: too large to be built ({str(error).splitlines()[0][:80]})") from None
    # compiled blocks would be compiled here; they have the same matrices, collectives and parameters
    parallel = dataclasses.replace(config.parallel, compile=False)
    shard.shard(dit, parallel, world, DTYPES[compute_dtype(config)])
    return dit


def build_optimizer(config: OptimizerConfig, dit: DiT, **settings: Any) -> Any:
    """The real optimizer, with Newton–Schulz in the dtype of GPUs, and matrices not staggered.

    Staggered ones cost the same over a period. Gram sets, which take fp16 on GPUs alone, are in fp32 here, so that
    their peak of memory is one from above.

    Raises:
        ConfigError: for options that do not fit the shards.
    """
    names = {field.name for field in dataclasses.fields(config)}
    fixed = {"stagger": False, "phase": 0, "compile": False, **settings}
    try:
        if getattr(config, "ns_dtype", None) == "auto":
            fixed["ns_dtype"] = "fp32" if is_gram(config.ns_coefficients) else products_dtype(config)
        config = dataclasses.replace(config, **{key: value for key, value in fixed.items() if key in names})
        return optimizer.build(config, dit)
    except ValueError as error:
        raise ConfigError(f"optimizer: {error}") from None


def model_steps(config: Config, dit: DiT, world: World) -> ModelSteps:
    """Give the model fake memory, and run the micro-batches of a step, with gradients left behind."""
    share = config.train.batch // world.data_size
    size = config.train.micro_batch or share
    count = share // size
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        dit.to_empty(device="cpu")
        dit.train()
        kinds = [(count - 1, False)] * (count > 1) + [(1, True)]
        if world.tensor_mesh is not None:  # see Recorder
            _one_pass(config, dit, FSDPMemTracker(dit), size, last=True)
            dit.zero_grad()
        tracker = FSDPMemTracker(dit)  # one for all, or it would not know what a pass leaves to the next
        passes = [(times, _one_pass(config, dit, tracker, size, last)) for times, last in kinds]
        averages = [shard.local(p.detach()).clone() for p in dit.parameters()]
        with Recorder() as rest:
            faults.gradient_squares(dit)
            dist.all_reduce(torch.zeros(4, dtype=torch.float64))  # faults.agree, whose answer is no number here
            faults.clip(dit, config.train.clip_norm, math.inf)
            torch._foreach_lerp_(averages, [shard.local(p.detach()) for p in dit.parameters()], 0.1)
    return ModelSteps(dit, passes, rest)


def _one_pass(config: Config, dit: DiT, tracker: FSDPMemTracker, size: int, last: bool) -> Pass:
    x = torch.randn(size, dit.channels, dit.image_size, dit.image_size)
    t, labels, target = torch.rand(size), torch.zeros(size, dtype=torch.int64), torch.empty_like(x)
    dit.set_requires_gradient_sync(last or config.parallel.sync_every_micro_batch)
    dit.set_requires_all_reduce(last)
    tracker.reset_mod_stats()
    tracker.track_inputs((x, t, labels, target))
    with tracker:
        with Recorder() as forward:
            loss = velocity_loss(dit(x, t, labels), target).sum() / size
        kept = _snapshot(tracker, "current")["Activation"]
        with Recorder() as backward:
            loss.backward()
    peak = _snapshot(tracker, "peak")
    for gradient in _whole_gradients(dit):
        tracker._update_and_maybe_create_winfos(gradient, _FSDPRefType.UNSHARDED_GRAD)  # else "Temp"
    return Pass(forward, backward, kept, peak)


def _whole_gradients(dit: DiT) -> Iterator[torch.Tensor]:
    """Gradients of another dtype than the weights that wait to be reduced, which FSDP2 keeps to itself."""
    for module in dit.modules():
        if isinstance(module, FSDPModule):
            for parameter in module._get_fsdp_state()._fsdp_param_group.fsdp_params:
                if parameter.unsharded_accumulated_grad is not None:
                    yield parameter.unsharded_accumulated_grad


def optimizer_step(dit: DiT, steps: Any) -> OptimizerStep:
    """The next step of an optimizer on the gradients that a backward has left."""
    fake = next(shard.local(p.detach()) for p in dit.parameters()).fake_mode
    tracker = FSDPMemTracker(dit, steps)
    with fake, tracker, Recorder() as recorder:
        if steps.takes_previous:
            with steps.at_previous_weights():
                pass  # the passes of the model have that backward
        steps.step()
    return OptimizerStep(recorder, _snapshot(tracker, "peak")["Total"])


def _snapshot(tracker: FSDPMemTracker, when: str) -> dict[str, int]:
    (snapshot,) = tracker.get_tracker_snapshot(when).values()
    return {str(getattr(key, "value", key)): int(value) for key, value in snapshot.items()}
