"""Scion: steps to the minimiser of the linearised loss in a ball, of a norm for each layer.

arXiv 2502.07529, and its code, LIONS-EPFL/scion.

    W, G: m×n weight and gradient         state: M, m×n, fp32 (fp64 for fp64 weights), sharded as W

    M ← (1−α)·M + α·G                     engine/momentum.py; α = 1 − momentum
    W ← (1 − γ)·W − γ·ρ·D                 constrained; γ = lr, ρ = radius
    W ← W − γ·ρ·D                         unconstrained: weight_decay=0

    D = √(m/n)·NewtonSchulz(M)            ball="spectral": the whole matrix, gathered by sharding/exchange.py
    D_i = M_i/‖M_i‖₂ / √n                 ball="row", for every row i: engine/rows.py
    D_j = √m·M_j/‖M_j‖₂                   ball="column", for every column j: engine/norms.py, one all-reduce of all
                                          columns' squares under sharded rows
    D = sign(M)/n                         ball="sign"

weight_decay=1, the default, is the constraint. Groups are named ``scion``, ``scion_row``, ``scion_column`` and
``scion_sign``.
The authors take ρ = 50 for hidden matrices and 3000 for the head, γ = 2^−12.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, Unpack

from torch import Tensor

from ..engine.algorithm import MATRIX_OPTIONS, MOMENTUM_OPTIONS, Algorithm, register
from ..engine.directions import signs
from ..engine.driver import Driver
from ..engine.keywords import MatrixOptions
from ..engine.options import one_of

_OWN = {"lr": 2**-12, "weight_decay": 1.0, "momentum": 0.9, "nesterov": False, "radius": 50.0}
_SPECTRAL = {**MATRIX_OPTIONS, **_OWN, "adjust_lr_fn": "spectral_unclamped"}
_OTHER = {key: value for key, value in {**MOMENTUM_OPTIONS, **_OWN}.items() if key != "adjust_lr_fn"}


def _rows(group: Any, m: int, n: int) -> float:
    return group["radius"] / math.sqrt(n)


def _columns(group: Any, m: int, n: int) -> float:
    return group["radius"] * math.sqrt(m)


def _signs(group: Any, m: int, n: int) -> float:
    return group["radius"] / n


NEVER = float("inf")
SCION = {
    "spectral": Algorithm(name="scion", options=_SPECTRAL, period=1),
    "row": Algorithm(name="scion_row", options=_OTHER, unit="rows", unit_scale=_rows, period=NEVER),
    "column": Algorithm(name="scion_column", options=_OTHER, unit="columns", unit_scale=_columns, period=NEVER),
    "sign": Algorithm(name="scion_sign", options=_OTHER, between=signs(_signs), period=NEVER),
}
for _algorithm in SCION.values():
    register(_algorithm)


class Scion(Driver):
    """Scion (arXiv 2502.07529): constrained (weight_decay=1) or unconstrained (0) steps in the ball of a norm.

    Args:
        params: weights [m, n], stacks [e, m, n], convolutions [out, in, …]; or groups of them.
        lr: γ ≥ 0, a float or a 0-d tensor.
        weight_decay: 1 constrained, 0 unconstrained; any λ ≥ 0 between or beyond.
        momentum: 1 − α, in [0, 1).
        radius: ρ ≥ 0.
        ball: ``spectral``, ``row``, ``column`` or ``sign``.
        options: see ``engine/keywords.py``; those of Newton–Schulz, and ``adjust_lr_fn``, for the spectral ball only.

    Raises:
        ValueError: for options out of range, parameters of fewer than two dimensions, unsupported placements.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 2**-12,
        weight_decay: float = 1.0,
        momentum: float = 0.9,
        *,
        radius: float = 50.0,
        ball: Literal["spectral", "row", "column", "sign"] = "spectral",
        **options: Unpack[MatrixOptions],
    ) -> None:
        algorithm, problem = one_of(SCION, "ball", ball)
        own = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "radius": radius}
        super().__init__(params, algorithm, {**own, **options}, problem=problem)
