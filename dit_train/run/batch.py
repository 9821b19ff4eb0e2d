"""What a rank trains on in a step: a pure function of (seed, step, global sample index)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from dit_train import rng
from dit_train.config import Config
from dit_train.data import order
from dit_train.data.sources import Dataset
from dit_train.diffusion.objectives import interpolate, velocity
from dit_train.diffusion.timesteps import draw_timesteps


@dataclass(frozen=True)
class Batch:
    """One rank's share of a step, on the CPU until `to`."""

    x_t: torch.Tensor
    """Noised images, fp32 [n, C, H, W]."""
    t: torch.Tensor
    """Times, fp32 [n] in (0, 1)."""
    labels: torch.Tensor
    """Classes with some replaced by the null class, int64 [n]."""
    target: torch.Tensor
    """Velocity noise − x0, fp32 [n, C, H, W]."""
    replaced: int = 0
    """How many of the images stand in for unreadable ones."""

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        parts = (self.x_t, self.t, self.labels, self.target)
        if device.type == "cuda":
            parts = tuple(part.pin_memory() for part in parts)
        return Batch(*(part.to(device, non_blocking=True) for part in parts), self.replaced)

    def split(self, size: int) -> Iterator[Batch]:
        """Micro-batches of `size`."""
        parts = (self.x_t, self.t, self.labels, self.target)
        for pieces in zip(*(part.split(size) for part in parts), strict=True):
            yield Batch(*pieces)


def share(total: int, rank: int, size: int) -> range:
    """The contiguous slots of a global batch that a rank computes; `size` divides `total`."""
    each = total // size
    return range(rank * each, (rank + 1) * each)


def draw(config: Config, data: Dataset, step: int, slots: range) -> Batch:
    """The samples in `slots` of global batch `step` (0-based)."""
    seed, batch = config.train.seed, config.train.batch
    positions = order.positions(seed, step * batch + slots.start, len(slots), len(data.train))
    x0 = data.train.inputs(positions, seed, step, samples=slots)
    noise = rng.normal(tuple(x0.shape[1:]), seed, "noise", step, samples=slots)
    t = draw_timesteps(config.objective, seed, step, batch)[slots.start : slots.stop]
    dropped = rng.uniform(seed, "label", step, samples=slots) < config.model.label_dropout
    labels = torch.where(dropped, data.num_classes, data.train.labels(positions))
    replaced = data.train.count_replaced(positions)
    return Batch(interpolate(x0, noise, t), t, labels, velocity(x0, noise), replaced)


class Prefetcher:
    """Draws the next step's batch in a thread while the current one is computed."""

    def __init__(self, config: Config, data: Dataset, slots: range) -> None:
        self._arguments = (config, data)
        self._slots = slots
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._next: tuple[int, Future[Batch]] | None = None

    def take(self, step: int) -> Batch:
        """The batch of `step`; the one after it starts to be drawn."""
        ahead = self._next
        future = ahead[1] if ahead is not None and ahead[0] == step else self._submit(step)
        batch = future.result()
        self._next = (step + 1, self._submit(step + 1))
        return batch

    def close(self) -> None:
        """Stop the thread; not waited for, since it may hang on a disk while this rank has an error to tell."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, step: int) -> Future[Batch]:
        return self._pool.submit(draw, *self._arguments, step, self._slots)


def heldout(seed: int, data: Dataset, indices: np.ndarray, times: np.ndarray) -> Batch:
    """Held-out images `indices` [n] at `times` fp32 [n], with noise that belongs to the image."""
    x0 = data.heldout.inputs(indices, seed, "heldout", samples=indices)
    noise = rng.normal(tuple(x0.shape[1:]), seed, "heldout", samples=indices)
    t = torch.from_numpy(times)
    return Batch(interpolate(x0, noise, t), t, data.heldout.labels(indices), velocity(x0, noise))
