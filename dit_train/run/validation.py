"""The loss on held-out images, always with the same noise and times, so that runs and steps can be compared."""

from __future__ import annotations

from collections.abc import Callable

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
        self._batches = [(self._draw(config, data, images, times, s), torch.from_numpy(s < self.count)) for s in slots]

    def _draw(self, config: Config, data: Dataset, images: np.ndarray, times: np.ndarray, slots: np.ndarray) -> Batch:
        slots = np.where(slots < self.count, slots, 0)
        return heldout(config.train.seed, data, images[slots], times[slots]).to(self._world.device)

    def loss(self, model: torch.nn.Module, beat: Callable[[], None] = lambda: None) -> float:
        """Mean velocity loss over the draw; every rank calls it and gets the same number. `beat` is called a batch."""
        training = model.training
        model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        with torch.no_grad():
            for batch, real in self._batches:
                losses = velocity_loss(model(batch.x_t, batch.t, batch.labels), batch.target)
                total += losses.double()[real.to(losses.device)].sum()
                beat()
        reshard(model)
        model.train(training)
        dist.all_reduce(total, group=self._world.data_group)
        return total.item() / self.count
