"""AdaGO: orthogonal directions with the step size of AdaGrad-Norm.

arXiv 2509.02981.

    W, G: m×n weight and gradient         state: M, m×n, and V, m×1, the sum so far in every row; as W, fp32

    M ← μ·M + (1−μ)·G                     engine/momentum.py; U = M
    O ← NewtonSchulz(U)                   the whole matrix, gathered by sharding/exchange.py
    V ← V + min(‖G‖_F², γ²)               from 0
    v ← √(v₀² + V)
    α ← max(ε, η·min(‖G‖_F, γ)/v)         engine/adaptive.py
    W ← (1 − η·λ)·W − α·O

‖G‖_F is that of the whole matrix, before ``mars_gamma`` corrects it: those of all matrices travel in one all-reduce. A
third-party port divides by v²; here it is v, as published. γ = ``max_norm``, ε = ``least_step``, v₀ = ``initial_norm``.
The paper is silent about weight decay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Unpack

from torch import Tensor

from ..engine.algorithm import MATRIX_OPTIONS, Algorithm, register
from ..engine.driver import Driver
from ..engine.forms import ELEMENTS, ROWS
from ..engine.keywords import MatrixOptions
from ..engine.scaling import rate_on


def step_size(square: Tensor, states: list[Tensor], group: Mapping[str, Any]) -> Tensor:
    """α of every row, [rows, 1], from ‖G‖_F² (0-d) and [V, [rows, 1]], which is updated."""
    (total,) = states
    norm = square.sqrt().clamp(max=group["max_norm"])
    total.add_(norm.square())
    v = (total.double() + group["initial_norm"] ** 2).sqrt()
    return (norm * rate_on(group["lr"], v.device) / v).clamp(min=group["least_step"])


_OPTIONS = {key: value for key, value in MATRIX_OPTIONS.items() if key != "adjust_lr_fn"}

ADAGO = register(
    Algorithm(
        name="adago",
        options={
            **_OPTIONS,
            "lr": 5e-2,
            "weight_decay": 0.0,
            "nesterov": False,
            "max_norm": 10.0,
            "least_step": 5e-4,
            "initial_norm": 1e-3,
        },
        period=1,
        step_sizes=step_size,
        state={"momentum_buffer": ELEMENTS, "norm_sum": ROWS},
    )
)


class AdaGO(Driver):
    """AdaGO (arXiv 2509.02981): Muon's direction, and a step size that falls with the norms of past gradients.

    Args:
        params: weights [m, n], stacks [e, m, n], convolutions [out, in, …]; or groups of them.
        lr: η ≥ 0, a float or a 0-d tensor.
        weight_decay: λ ≥ 0, decoupled.
        momentum: μ in [0, 1).
        max_norm: γ > 0, above which the norm of a gradient counts no more.
        least_step: ε ≥ 0, the smallest step.
        initial_norm: v₀ > 0.
        options: see ``engine/keywords.py``; ``adjust_lr_fn`` has no part in it.

    Raises:
        ValueError: for options out of range, parameters of fewer than two dimensions, unsupported placements.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 5e-2,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        *,
        max_norm: float = 10.0,
        least_step: float = 5e-4,
        initial_norm: float = 1e-3,
        **options: Unpack[MatrixOptions],
    ) -> None:
        own = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "max_norm": max_norm}
        super().__init__(params, ADAGO, {**own, "least_step": least_step, "initial_norm": initial_norm, **options})
