"""Lion: the sign of a dual average.

arXiv 2302.06675.

    w, g: weight and gradient of any shape      state: m, as w, fp32 (fp64 for fp64 weights)

    u ← β₁·m + (1−β₁)·g
    m ← β₂·m + (1−β₂)·g
    w ← (1 − η·λ)·w − η·sign(u)

Elementwise: right under any sharding, without communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Unpack

import torch
from torch import Tensor

from ..engine.algorithm import Algorithm, register
from ..engine.driver import Driver
from ..engine.forms import ELEMENTS
from ..engine.keywords import DriverOptions
from ..engine.scaling import rate_on
from ..engine.update import decay_and_add


def lion_(weights: list[Tensor], state: dict[str, list[Tensor]], grads: list[Tensor], group: Mapping[str, Any]) -> None:
    """One step in place, of tensors of one dtype and device."""
    beta1, beta2 = group["betas"]
    m = state["momentum_buffer"]
    grads = [g.to(x.dtype) for g, x in zip(grads, m, strict=True)]
    steps = list(torch._foreach_lerp(grads, m, beta1))
    torch._foreach_sign_(steps)
    torch._foreach_mul_(steps, -rate_on(group["lr"], steps[0].device))
    torch._foreach_lerp_(m, grads, 1 - beta2)
    decay_and_add(weights, steps, group)


LION = register(
    Algorithm(
        name="lion",
        options={"lr": 1e-4, "weight_decay": 0.1, "betas": (0.9, 0.99)},
        elementwise=lion_,
        state={"momentum_buffer": ELEMENTS},
    )
)


class Lion(Driver):
    """Lion (arXiv 2302.06675) for parameters of any shape.

    Args:
        params: parameters of any shape and sharding, or groups of them.
        lr: η ≥ 0, a float or a 0-d tensor; three to ten times below AdamW's.
        betas: (β₁, β₂), each in [0, 1).
        weight_decay: λ ≥ 0, decoupled; three to ten times above AdamW's.
        options: ``DriverOptions`` of ``engine/keywords.py``.

    Raises:
        ValueError: for options out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.1,
        **options: Unpack[DriverOptions],
    ) -> None:
        super().__init__(params, LION, {"lr": lr, "betas": betas, "weight_decay": weight_decay, **options})
