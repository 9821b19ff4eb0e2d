"""A user's own ``torchmetrics`` metric beside the built-in scores: it sees the same batches and pools them itself.

The package computes nothing with torchmetrics; a metric plugged in here is guarded against what it is known to do
wrong: it leaves a custom network in training mode, draws from the global generator, takes uint8 for floats with
``normalize=True``, and fails or hangs where ranks received no or fewer batches.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
import torchmetrics
from torch import Tensor

from eval.extractors.precision import exact
from eval.ranks import world

_Seen = dict[bool, tuple[tuple[int, ...], int]]
"""Of real and of generated images: their shape [C, H, W] and how many batches came."""


class PluggedMetric:
    """Feeds uint8 images to a metric of ``update(images)`` or ``update(images, real)`` and reads its result.

    Inside, its networks are in evaluation mode and fp32, autocast, TF32 and gradients are off, and random numbers come
    from a seed of its own; the surroundings get their settings and random state back.

    Args:
        metric: without ``normalize=True``; its ``process_group`` are the ranks it pools over.
        device: where it computes; it is moved there.
        seed: of what it draws; ``compute`` draws the same on every rank and at every call.

    Raises:
        TypeError: not a torchmetrics.Metric.
        ValueError: it wants float images.
    """

    def __init__(self, metric: torchmetrics.Metric, device: str | torch.device = "cpu", seed: int = 0):
        if not isinstance(metric, torchmetrics.Metric):
            raise TypeError(f"a torchmetrics.Metric is wanted, not {type(metric).__name__}")
        name = type(metric).__name__
        if getattr(metric, "normalize", False):
            raise ValueError(f"{name} with normalize=True takes floats and would wrap uint8: build it without")
        self.name = name
        self.device = torch.device(device)
        self.metric = metric.to(self.device).eval()
        for module in metric.modules():
            if not isinstance(module, torchmetrics.Metric):  # whose states keep their dtype, fp64 for sums
                module.float().requires_grad_(False)
        self.takes_real = "real" in inspect.signature(metric.update).parameters
        self._seed = seed
        self._updates = 0
        self._seen: _Seen = {}

    def update(self, images: Tensor, real: bool = False) -> None:
        """Show uint8 images [N, C, H, W]; a metric that compares nothing is shown the generated ones alone.

        Raises:
            TypeError: images are not uint8.
            ValueError: another shape than before, or not four dimensions.
        """
        if images.dtype != torch.uint8:
            raise TypeError(f"images must be uint8, not {images.dtype}; see eval.generate.quantize")
        shape, updates = self._seen.get(real, (tuple(images.shape[1:]), 0))
        if len(shape) != 3 or images.shape[1:] != shape:
            wanted = list(shape) if updates else "[C, H, W]"
            raise ValueError(f"images {list(images.shape[1:])}, but {wanted} are wanted")
        if real and not self.takes_real:
            return
        self._seen[real] = shape, updates + 1
        self._updates += 1
        with self._guarded(self._seed + self._updates):
            self._update(images.to(self.device), real)

    def compute(self) -> Any:
        """The metric over all ranks as floats in JSON's containers; every rank calls it and gets the same.

        A metric that draws from what it gathered, such as KID, finds it in an order that depends on the number of
        ranks, so its number does too, within its error.

        Raises:
            ValueError: no rank showed any images.
            RuntimeError: ranks had unequal numbers of batches and the metric cannot do with empty ones; on every rank.
        """
        group = self.metric.process_group
        everyones = _told(self._seen, group)
        if not any(everyones):
            raise ValueError(f"{self.name} has seen no images")
        with self._guarded(self._seed):
            failures = [text for text in _told(self._catch_up(everyones), group) if text]
            if failures:
                raise RuntimeError(f"{self.name} fails on a rank with fewer batches: {failures[0]}")
            return _plain(self.metric.compute())

    def reset(self) -> None:
        """Forget all images."""
        self.metric.reset()
        self._seen = {}

    def _catch_up(self, everyones: list[_Seen]) -> str:
        """Show empty batches until this rank has had as many as any other.

        Without any, states have other shapes than elsewhere; and some metrics (KID) communicate once per batch.
        Returns what went wrong, or nothing: the other ranks are about to wait.
        """
        try:
            for real in (False, True):
                shape, most = max(
                    (seen[real] for seen in everyones if real in seen), key=itemgetter(1), default=((), 0)
                )
                for _ in range(most - self._seen.get(real, ((), 0))[1]):
                    self._update(torch.empty(0, *shape, dtype=torch.uint8, device=self.device), real)
                if most:
                    self._seen[real] = shape, most
        except Exception as error:  # whatever a metric makes of an empty batch
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return ""

    def _update(self, images: Tensor, real: bool) -> None:
        self.metric.update(images, real=real) if self.takes_real else self.metric.update(images)

    @contextmanager
    def _guarded(self, seed: int) -> Iterator[None]:
        devices = []
        if self.device.type == "cuda":
            devices = [torch.cuda.current_device() if self.device.index is None else self.device.index]
        with torch.random.fork_rng(devices=devices), exact(self.device):
            torch.random.default_generator.manual_seed(seed)  # torch.manual_seed would reseed every GPU
            for index in devices:
                torch.cuda.default_generators[index].manual_seed(seed)
            yield


def _told(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """What each rank says."""
    ranks = world(group)[1]
    if ranks == 1:
        return [mine]
    said: list[Any] = [None] * ranks
    dist.all_gather_object(said, mine, group=group)
    return said


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double().tolist()
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value
