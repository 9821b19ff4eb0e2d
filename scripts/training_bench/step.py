"""A training step of our model on one process beside the same of the plain one, in turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import optimizers
from dit_train.config import ModelConfig
from dit_train.diffusion.objectives import velocity_loss
from dit_train.model.dit import DiT, parameter_count
from dit_train.model.init import initialize

from .clock import now
from .plain import like
from .ratios import ratio, spread

_WARM_UP = 2


@dataclass
class Contender:
    """A model with its optimizer, and the seconds of its steps."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Tensor, Tensor], Tensor]
    gradients: list[float] = field(default_factory=list)
    """Of forward and backward."""
    updates: list[float] = field(default_factory=list)
    """Of the optimizer's step."""

    def step(self, batch: tuple[Tensor, Tensor, Tensor, Tensor], dtype: torch.dtype) -> None:
        """One step, timed."""
        x, t, labels, target = batch
        start = now(x.device)
        with torch.autocast(x.device.type, dtype, enabled=dtype != torch.float32):
            prediction = self.model(x, t, labels)
        self.loss(prediction, target).backward()
        middle = now(x.device)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.gradients.append(middle - start)
        self.updates.append(now(x.device) - middle)

    def seconds(self) -> dict[str, list[float]]:
        """Of every step after the warm-up, and of its two parts."""
        whole = [a + b for a, b in zip(self.gradients, self.updates, strict=True)]
        parts = {"step": whole, "gradients": self.gradients, "update": self.updates}
        return {part: seconds[_WARM_UP:] for part, seconds in parts.items()}


def contenders(size: ModelConfig, image_size: int, device: torch.device) -> tuple[Contender, Contender]:
    """Ours and the plain one, with the same weights and AdamW, torch's fastest form of it for the plain one."""
    dit = DiT(size, channels=4, image_size=image_size, num_classes=1000)
    initialize(dit, 0)
    plain = like(dit).to(device)
    dit.to(device)
    settings: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.0}
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    return (
        Contender(dit, optimizers.AdamW(optimizers.param_groups(dit), **settings), _our_loss),
        Contender(plain, torch.optim.AdamW(trained, betas=(0.9, 0.95), fused=True, **settings), _plain_loss),
    )


def _our_loss(prediction: Tensor, target: Tensor) -> Tensor:
    return velocity_loss(prediction, target).mean()


def _plain_loss(prediction: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(prediction.float(), target)


def measure(
    size: ModelConfig, image_size: int, batch: int, rounds: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """What FILE holds of a step; the two take turns at who is first."""
    both = contenders(size, image_size, device)
    generator = torch.Generator().manual_seed(0)
    x, target = (torch.randn((batch, 4, image_size, image_size), generator=generator).to(device) for _ in range(2))
    t = torch.rand(batch, generator=generator).to(device)
    labels = torch.randint(1000, (batch,), generator=generator).to(device)
    for number in range(_WARM_UP + rounds):
        for contender in both if number % 2 else both[::-1]:
            contender.step((x, t, labels, target), dtype)
    ours, plain = both
    return {
        "parameters": parameter_count(ours.model),
        "ours": {part: 1e3 * spread(seconds)["median"] for part, seconds in ours.seconds().items()},
        "plain": {part: 1e3 * spread(seconds)["median"] for part, seconds in plain.seconds().items()},
        **{f"throughput_{part}": ratio(plain.seconds()[part], ours.seconds()[part]) for part in ours.seconds()},
    }
