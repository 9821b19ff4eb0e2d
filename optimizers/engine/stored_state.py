"""Keeps torch's ``Optimizer.load_state_dict`` from casting state tensors to the dtype of their parameter."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Stored:
    """A tensor that passes through ``Optimizer.load_state_dict`` untouched, because it does not look like one."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def wrap_tensors(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A load-state pre-hook: every state tensor becomes a ``Stored``."""
    state = {
        key: {k: Stored(v) if isinstance(v, Tensor) else v for k, v in values.items()}
        for key, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def unwrap_tensors(state: dict[Any, Any]) -> dict[Any, Any]:
    """Copies of the stored tensors, in their own dtype, on the devices of their parameters.

    Raises:
        ValueError: if a stored tensor has another shape than its parameter, or only one of them is a DTensor.
    """
    result: defaultdict[Any, Any] = defaultdict(dict)
    for p, values in state.items():
        for key, value in values.items():
            if isinstance(value, Stored):
                if value.tensor.shape != p.shape:
                    raise ValueError(
                        f"state {key!r} of shape {tuple(value.tensor.shape)} cannot be loaded for a parameter of shape "
                        f"{tuple(p.shape)}; build the optimizer with the parameter order that was saved"
                    )
                if isinstance(value.tensor, DTensor) != isinstance(p, DTensor):
                    raise ValueError(
                        f"state {key!r} of shape {tuple(p.shape)} is not sharded as its parameter is; load with "
                        "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
                    )
                value = value.tensor.detach().to(p.device, copy=True)
            result[p][key] = value
    return result
