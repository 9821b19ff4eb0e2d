"""The tensors that a checkpoint of a run holds, by name."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from dit_train.run.ema import EMA


def tensors(model: nn.Module, ema: EMA, optimizer: Optimizer) -> dict[str, Tensor]:
    """Every tensor of a run under a flat name, sharing its memory; nothing else, which would be stored as a pickle."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        found[f"model.{name}"] = parameter.detach()
        found[f"ema.{name}"] = ema.weights[name]
        for key, value in optimizer.state[parameter].items():
            found[f"optimizer.{name}.{key}"] = value
    return found


def weights(model: nn.Module, kind: str) -> dict[str, Tensor]:
    """A model's parameters under the names of the ``ema`` or the ``model`` in a checkpoint."""
    return {f"{kind}.{name}": parameter.detach() for name, parameter in model.named_parameters()}
