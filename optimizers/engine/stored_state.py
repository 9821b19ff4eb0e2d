"""State tensors: made, moved with their parameter, checked and kept in their dtype when a checkpoint is loaded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .algorithm import ALGORITHMS, Algorithm
from .jobs import label


class Stored:
    """A tensor that passes through ``Optimizer.load_state_dict`` untouched, because it does not look like one.

    torch would cast it to the dtype of its parameter.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def wrap_tensors(state: Mapping[Any, Mapping[str, Any]]) -> dict[Any, dict[str, Any]]:
    """The state with every tensor as a ``Stored``."""
    return {
        key: {k: Stored(v) if isinstance(v, Tensor) else v for k, v in values.items()} for key, values in state.items()
    }


def unwrap_tensors(state: Mapping[Any, Mapping[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Copies of the stored tensors, in their own dtype, on the devices of their parameters."""
    result: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
    for p, values in state.items():
        for key, value in values.items():
            stored = isinstance(value, Stored)
            result[p][key] = value.tensor.detach().to(p.device, copy=True) if stored else value
    return result


def complete(state: dict[str, Tensor], p: Tensor, algorithm: Algorithm, started: bool, name: str) -> None:
    """Give a parameter zeros for what its state lacks; let what there is follow a parameter that was moved or cast.

    Raises:
        ValueError: if the parameter has been ``started`` and is now sharded differently.
    """
    wide = torch.float64 if p.dtype == torch.float64 else torch.float32
    for key in algorithm.state:
        buffer = state.get(key)
        wrong = None if buffer is None else difference(buffer, p)
        if wrong is not None and started:
            raise ValueError(f"{name}: state {key!r} {wrong}")
        if buffer is None or wrong is not None or buffer.is_meta:
            state[key] = torch.zeros_like(p.detach(), dtype=wide, memory_format=torch.contiguous_format)
        else:  # a loaded state may be of 16 bit, and stays so
            doubled = torch.float64 in (p.dtype, buffer.dtype)
            state[key] = buffer.to(p.device, wide if doubled else buffer.dtype)


def check_stored(groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]], state: Mapping) -> None:
    """Compare a checkpoint's state with the parameters of ``groups``; ``saved`` are its groups, with the same members.

    Raises:
        ValueError: naming the parameter whose state is missing or lies differently.
    """
    for number, (group, stored) in enumerate(zip(groups, saved, strict=True)):
        for i, (p, key) in enumerate(zip(group["params"], stored["params"], strict=True)):
            name = label(f"group {number}", group, i)
            found = state.get(key, {})
            for what in ALGORITHMS[group["algorithm"]].state:
                if what in found:
                    if (wrong := difference(found[what], p)) is not None:
                        raise ValueError(f"{name}: state {what!r} {wrong}")
                elif p.requires_grad and stored["step"] > 0:
                    raise ValueError(
                        f"{name}: the checkpoint is of step {stored['step']} but has no state {what!r} for it; load it "
                        "with this parameter frozen, as it was saved, or remove the parameter from the group"
                    )


def difference(value: Tensor, p: Tensor) -> str | None:
    """How the shape or placement of a state tensor differs from its parameter's, and what to do about it."""
    if value.shape != p.shape:
        return (
            f"of shape {tuple(value.shape)} cannot be used for a parameter of shape {tuple(p.shape)}; build the "
            "optimizer with the parameter order that was saved"
        )
    how = "load with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
    if isinstance(value, DTensor) != isinstance(p, DTensor):
        return f"of shape {tuple(p.shape)} is not sharded as its parameter is; {how}"
    if isinstance(p, DTensor) and value.placements != p.placements:
        return f"has placements {tuple(value.placements)}, its parameter {tuple(p.placements)}; {how}"
    if isinstance(p, DTensor) and value.device_mesh != p.device_mesh:
        return f"lies on {value.device_mesh}, its parameter on {p.device_mesh}; {how}"
    return None
