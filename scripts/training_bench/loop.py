"""The whole training loop beside a bare one over the same ranks, in turns within one run."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from dit_train import exits, overlays, preflight
from dit_train.config import Config, ConfigError, ParallelConfig
from dit_train.data import sources
from dit_train.data.sources import Summary
from dit_train.model.dit import DiT
from dit_train.model.init import initialize
from dit_train.parallel.mesh import choose_device_type
from dit_train.parallel.precision import DTYPES
from dit_train.run import loop, setup
from dit_train.run.stop import StopRequest
from dit_train.run.tracking import Reporter

from .clock import now
from .ratios import ratio, spread

COUNTED = 10
"""Steps of a turn that count, as many as lie between two lines on the terminal."""
_FIRST = 1
"""Steps of a turn that do not: the caches hold the other's weights, and a batch has been drawn meanwhile."""


class Bare:
    """What one would write without this project: FSDP2, forward, backward, clip and torch's AdamW; one batch for ever.

    With `average` the weights are averaged as well.
    """

    def __init__(self, config: Config, data: Summary, device: torch.device) -> None:
        model = DiT(config.model, channels=data.channels, image_size=data.image_size, num_classes=data.num_classes)
        initialize(model, 0)
        self.model = model.to(device)
        dtype = DTYPES[config.train.compute_dtype]
        kept = {"reduce_dtype": torch.float32, "param_dtype": None if dtype == torch.float32 else dtype}
        for block in model.blocks:
            fully_shard(block, mp_policy=MixedPrecisionPolicy(**kept))
        fully_shard(model, mp_policy=MixedPrecisionPolicy(**kept, cast_forward_inputs=False))
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
        self.averages = [parameter.detach().clone() for parameter in model.parameters()]
        self.clip_norm = config.train.clip_norm
        generator = torch.Generator().manual_seed(dist.get_rank())
        count = config.train.batch // dist.get_world_size()
        shape = (count, data.channels, data.image_size, data.image_size)
        self.x, self.target = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
        self.t = torch.rand(count, generator=generator).to(device)
        self.labels = torch.randint(data.num_classes, (count,), generator=generator).to(device)

    def step(self, average: bool) -> None:
        """One step."""
        F.mse_loss(self.model(self.x, self.t, self.labels), self.target).backward()
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if average:
            torch._foreach_lerp_(self.averages, [parameter.detach() for parameter in self.model.parameters()], 1e-4)


class Turns:
    """Hands over to the bare loop after every turn of ours, and keeps the seconds of a step of either."""

    def __init__(self, config: Config, data: Summary) -> None:
        self._config, self._data = config, data
        self.device = torch.device(choose_device_type(config.parallel))
        self._bare: Bare | None = None
        self._done, self._since = 0, 0.0
        self.seconds: dict[str, list[float]] = {"ours": [], "bare": [], "bare_averaging": []}

    def after_step(self) -> None:
        """A step of ours has ended; all ranks call it."""
        self._done += 1
        if self._done == _FIRST:
            self._since = now(self.device)
        if self._done < _FIRST + COUNTED:
            return
        self.seconds["ours"].append((now(self.device) - self._since) / COUNTED)
        if self._bare is None:
            self._bare = Bare(self._config, self._data, self.device)
        kinds = ["bare", "bare_averaging"]
        for kind in kinds if len(self.seconds["ours"]) % 2 else kinds[::-1]:
            self.seconds[kind].append(self._turn(self._bare, kind == "bare_averaging"))
        self._done = 0

    def _turn(self, bare: Bare, average: bool) -> float:
        for _ in range(_FIRST):
            bare.step(average)
        start = now(self.device)
        for _ in range(COUNTED):
            bare.step(average)
        return (now(self.device) - start) / COUNTED

    def summary(self) -> dict[str, Any]:
        """Medians and ratios over all turns but the first."""
        kept = {kind: seconds[1:] for kind, seconds in self.seconds.items()}
        assert self._bare is not None
        return {
            "parameters": sum(parameter.numel() for parameter in self._bare.model.parameters()),
            **{f"{kind}_ms": 1e3 * spread(seconds)["median"] for kind, seconds in kept.items()},
            "throughput": ratio(kept["bare"], kept["ours"]),
            "throughput_averaging": ratio(kept["bare_averaging"], kept["ours"]),
        }


def settings(configs: Sequence[str], words: Sequence[str], rounds: int, folder: Path) -> Config:
    """The settings of a run that makes enough steps and stops for nothing between them; all else is as it was given.

    Raises:
        ConfigError: for settings that a bare loop does not have.
    """
    config = overlays.read(configs, words)
    if config.train.compute_dtype not in DTYPES:
        raise ConfigError("train.compute_dtype: name fp32 or bf16, which the bare loop shall have as well")
    if config.optimizer.name != "adamw":
        raise ConfigError(f"optimizer.name: the bare loop has adamw, not {config.optimizer.name}; name that")
    if config.train.micro_batch is not None:
        raise ConfigError("train.micro_batch: the bare loop takes its share of a batch at once; leave it out")
    for field in dataclasses.fields(ParallelConfig):
        if field.name != "device" and getattr(config.parallel, field.name) != field.default:
            raise ConfigError(f"parallel.{field.name}: the bare loop has {field.default}; name that")
    steps = (1 + rounds) * (_FIRST + COUNTED)
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, steps=steps),
        sample=dataclasses.replace(config.sample, grid=0),
        score=dataclasses.replace(config.score, every=0),
        run=dataclasses.replace(config.run, folder=str(folder), checkpoint_every=steps, validate_every=0),
    )


def measure(config: Config) -> tuple[dict[str, Any], torch.device]:
    """What FILE holds of a loop with these `settings`, by this rank's clock, and where it ran."""
    plan = preflight.check(config, int(os.environ.get("WORLD_SIZE", 1)))
    turns = Turns(config, sources.check(config.data))

    class Handing(Reporter):
        """Reports a step, and then lets the bare loop have its turn."""

        def step(self, row: dict[str, Any]) -> None:
            super().step(row)
            turns.after_step()

    with StopRequest() as stop, mock.patch.object(setup, "Reporter", Handing):
        code = loop.train(plan, stop)
    if code != exits.DONE:
        sys.exit(code)
    return turns.summary(), turns.device
