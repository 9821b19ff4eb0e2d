"""The loss on held-out images, always with the same noise and times, so that runs and steps can be compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from dit_train import rng
from dit_train.config import Config
from dit_train.data.sources import Dataset
from dit_train.diffusion.objectives import velocity_loss
from dit_train.diffusion.timesteps import evenly_spaced
from dit_train.parallel.mesh import World
from dit_train.parallel.shard import reshard
from dit_train.run.batch import Batch, heldout

BUCKETS = 10
"""Equal parts of the times from 0 to 1."""


class Loss(NamedTuple):
    """A held-out loss."""

    mean: float
    """Over all images."""
    by_time: dict[str, float]
    """Means over the images of one tenth of the times each, ``t_0.3-0.4``, without those of which there are none."""


class HeldOut:
    """A fixed draw of held-out images with fixed noise and evenly spaced times, dealt over ranks."""

    def __init__(self, config: Config, data: Dataset, world: World) -> None:
        self.count = min(config.run.validate_count, len(data.heldout))
        self._world = world
        draw = rng.stream(config.train.seed, "heldout-order")
        images = draw.permutation(len(data.heldout))[: self.count]
        times = draw.permutation(evenly_spaced(config.objective, self.count).numpy())
        size = min(config.sample.batch, -(-self.count // world.data_size))
        rounds = -(-self.count // (size * world.data_size))
        # FSDP2 communicates in each forward: every rank makes `rounds` of them, the last ones on filler
        slots = [np.arange(size) + size * (i * world.data_size + world.data_rank) for i in range(rounds)]
        self._batches = [(self._draw(config, data, images, times, s), self._members(times, s)) for s in slots]
        self.counts = _bucket(torch.from_numpy(times)).bincount(minlength=BUCKETS).tolist()
        """Images of each bucket."""

    def _draw(self, config: Config, data: Dataset, images: np.ndarray, times: np.ndarray, slots: np.ndarray) -> Batch:
        slots = np.where(slots < self.count, slots, 0)
        return heldout(config.train.seed, data, images[slots], times[slots]).to(self._world.device)

    def _members(self, times: np.ndarray, slots: np.ndarray) -> torch.Tensor:
        """Which bucket each of the slots counts in, one-hot fp64 [n, BUCKETS]; filler counts in none."""
        real = torch.from_numpy(slots < self.count)
        buckets = _bucket(torch.from_numpy(times[np.where(slots < self.count, slots, 0)]))
        members = torch.nn.functional.one_hot(buckets, BUCKETS) * real[:, None]
        return members.double().to(self._world.device)

    def loss(self, model: torch.nn.Module, beat: Callable[[], None] = lambda: None) -> Loss:
        """Mean velocity loss over the draw; every rank calls it and gets the same numbers. `beat` is called a batch."""
        training = model.training
        model.eval()
        totals = torch.zeros(BUCKETS, dtype=torch.float64, device=self._world.device)
        with torch.no_grad():
            for batch, members in self._batches:
                losses = velocity_loss(model(batch.x_t, batch.t, batch.labels), batch.target)
                totals += losses.double() @ members
                beat()
        reshard(model)
        model.train(training)
        dist.all_reduce(totals, group=self._world.data_group)
        sums = totals.tolist()
        means = {i: total / count for i, (total, count) in enumerate(zip(sums, self.counts, strict=True)) if count}
        return Loss(sum(sums) / self.count, {_name(i): mean for i, mean in means.items()})


def _bucket(times: torch.Tensor) -> torch.Tensor:
    """t [n] in (0, 1) -> the number of its bucket, int64 [n]."""
    return (times * BUCKETS).long().clamp(max=BUCKETS - 1)


def _name(bucket: int) -> str:
    return f"t_{bucket / BUCKETS:.1f}-{(bucket + 1) / BUCKETS:.1f}"
