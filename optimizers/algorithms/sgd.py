"""SGD with momentum and decoupled weight decay.

As ``torch.optim.SGD`` without dampening, but for the weight decay, which here does not enter the momentum.

    w, g: weight and gradient of any shape      state: m, as w, fp32 (fp64 for fp64 weights)

    m ← μ·m + g                                 engine/momentum.py   (ema: m ← μ·m + (1−μ)·g)
    u ← g + μ·m                                 Nesterov, else u = m
    w ← (1 − η·λ)·w − η·u

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
from ..engine.momentum import MomentumForm, ahead_of, update_momentum
from ..engine.scaling import rate_on
from ..engine.update import decay_and_add


def sgd_(weights: list[Tensor], state: dict[str, list[Tensor]], grads: list[Tensor], group: Mapping[str, Any]) -> None:
    """One step in place, of tensors of one dtype and device."""
    u = update_momentum(state["momentum_buffer"], grads, group["momentum"], ahead_of(group), group["momentum_form"])
    decay_and_add(weights, list(torch._foreach_mul(u, -rate_on(group["lr"], u[0].device))), group)


SGD_MOMENTUM = register(
    Algorithm(
        name="sgd",
        options={"lr": 1e-2, "weight_decay": 0.0, "momentum": 0.9, "nesterov": False, "momentum_form": "heavy_ball"},
        elementwise=sgd_,
        state={"momentum_buffer": ELEMENTS},
    )
)


class SGD(Driver):
    """SGD with momentum for parameters of any shape.

    Args:
        params: parameters of any shape and sharding, or groups of them.
        lr: η ≥ 0, a float or a 0-d tensor.
        momentum: μ in [0, 1).
        weight_decay: λ ≥ 0, decoupled.
        nesterov: whether u looks one step ahead.
        momentum_form: ``heavy_ball`` or ``ema``.
        options: ``DriverOptions`` of ``engine/keywords.py``.

    Raises:
        ValueError: for options out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        momentum_form: MomentumForm = "heavy_ball",
        **options: Unpack[DriverOptions],
    ) -> None:
        own = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, SGD_MOMENTUM, {**own, "momentum_form": momentum_form, **options})
