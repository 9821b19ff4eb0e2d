"""Parameters in the forms in which ``torch.optim.Optimizer`` takes them: tensors, (name, tensor) pairs, groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def listed(params: Any) -> Any:
    """Parameters or groups with every iterator made a list, since they are read twice."""
    if isinstance(params, Tensor):
        return params  # torch has an error for it
    params = list(params)
    return [
        {**p, "params": list(p["params"])} if isinstance(p, dict) and isinstance(p.get("params"), Iterator) else p
        for p in params
    ]


def tensors_of(params: Any) -> Iterator[Tensor]:
    """Every tensor among parameters, (name, parameter) pairs and groups."""
    if isinstance(params, Tensor):
        yield params
    elif isinstance(params, dict):
        yield from tensors_of(params.get("params"))
    elif isinstance(params, (list, tuple)):
        for p in params:
            yield from tensors_of(p)
