"""An exponential moving average of the weights, sharded like them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from dit_train.parallel.shard import local, reshard


class EMA:
    """Averages ``ema ← decay·ema + (1 − decay)·weights`` in fp32, shard by shard, without communication.

    With `ramp` the decay of step t is min(decay, (1 + t) / (10 + t)), so that early and in short runs the average
    spans about the last tenth of the steps and not the initial weights.
    """

    def __init__(self, model: nn.Module, decay: float, *, ramp: bool = False) -> None:
        self._decay, self._ramp = decay, ramp
        self.model = model
        self.weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def decay(self, step: int) -> float:
        """The decay of a step (0-based)."""
        return min(self._decay, (1 + step) / (10 + step)) if self._ramp else self._decay

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move towards the model's present weights, those after step `step` (0-based)."""
        averages = [local(average) for average in self.weights.values()]
        torch._foreach_lerp_(averages, self._present(), 1 - self.decay(step))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model with averaged weights in eval mode; the trained ones and the mode come back whatever happens."""
        training = self.model.training
        reshard(self.model)
        self._swap()
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            reshard(self.model)
            self._swap()
            self.model.train(training)

    @torch.no_grad()
    def _swap(self) -> None:
        for average, present in zip(self.weights.values(), self._present(), strict=True):
            kept = present.clone()
            present.copy_(local(average))
            local(average).copy_(kept)

    def _present(self) -> list[torch.Tensor]:
        # no gradients are recorded here, so that a detach, which DTensors make dear, is not needed
        return [local(parameter) for parameter in self.model.parameters()]
