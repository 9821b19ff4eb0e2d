"""Periodic sign steps: whole matrices are orthogonalised every P-th step, signs of a dual average are taken in between.

LionMuon and SignMuon, arXiv 2605.19811, and their code, brain-lab-research/lion-muon.

    W, G: m×n weight and gradient         state: M, m×n, fp32 (fp64 for fp64 weights), sharded as W
    t: completed steps, kept in the group and in checkpoints

    U ← β₁·M + (1−β₁)·G                   engine/momentum.py; β₁ = input_momentum; SignMuon: β₁ = β₂
    M ← β₂·M + (1−β₂)·G                   β₂ = momentum
    if (t − phase − o) mod P = 0:         engine/schedule.py; o = 0, or the matrix's own offset if staggered
        O ← NewtonSchulz(U)               the whole matrix, gathered by sharding/exchange.py
        W ← (1 − η·λ)·W − η·a(m, n)·O
    else:                                 no communication under any sharding
        c ← sign_lr_ratio·a(m, n)/√max(m, n)
        W ← (1 − η·c·λ)·W − η·c·sign(U)

The authors have two learning rates, η for refreshes and η·c for signs, and decay by that of the step. With ratio 1 both
kinds of step have one RMS; their tuned pair, 1e-3 and 5e-5, is a ratio of 1/4 at P = 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Unpack

from torch import Tensor

from ..engine.algorithm import MATRIX_OPTIONS, Algorithm, register
from ..engine.directions import signs
from ..engine.driver import Driver
from ..engine.keywords import MatrixOptions
from ..engine.scaling import spectral_scale
from ..engine.schedule import Schedule, interpolated


def _scale(group: Any, m: int, n: int) -> float:
    ratio = interpolated(group["sign_lr_ratio"], group["step"])
    return ratio * spectral_scale(group["adjust_lr_fn"], m, n) / math.sqrt(max(m, n))


_OPTIONS = {key: value for key, value in MATRIX_OPTIONS.items() if key not in ("nesterov", "momentum_form")}

PERIODIC_SIGN_MUON = register(
    Algorithm(
        name="periodic_sign_muon",
        options={
            **_OPTIONS,
            "momentum": 0.99,
            "input_momentum": 0.9,
            "period": 2,
            "phase": 0,
            "stagger": False,
            "sign_lr_ratio": 0.25,
        },
        between=signs(_scale, decay_by_step=True),
    )
)


class PeriodicSignMuon(Driver):
    """Periodic sign steps (LionMuon, arXiv 2605.19811): refreshes every ``period`` steps, takes signs in between.

    Args:
        params: weights [m, n], stacks [e, m, n], convolutions [out, in, …]; or groups of them.
        lr: η ≥ 0, a float or a 0-d tensor.
        weight_decay: λ ≥ 0, decoupled.
        momentum: β₂ in [0, 1).
        input_momentum: β₁ in [0, β₂].
        period: P ≥ 1, or ``math.inf``: Lion's direction at every step; or a schedule (engine/schedule.py).
        phase: the step after t completed ones is a refresh if (t − phase) mod period = 0.
        stagger: deal the matrices over the period, so that every step costs the same.
        sign_lr_ratio: ≥ 0, multiplies sign steps, whose RMS otherwise equals that of a refresh; or a schedule.
        options: see ``engine/keywords.py``.

    Raises:
        ValueError: for options out of range, parameters of fewer than two dimensions, unsupported placements.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.99,
        *,
        input_momentum: float = 0.9,
        period: int | float | Schedule = 2,
        phase: int = 0,
        stagger: bool = False,
        sign_lr_ratio: float | Schedule = 0.25,
        **options: Unpack[MatrixOptions],
    ) -> None:
        own = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "input_momentum": input_momentum}
        steps = {"period": period, "phase": phase, "stagger": stagger, "sign_lr_ratio": sign_lr_ratio}
        super().__init__(params, PERIODIC_SIGN_MUON, {**own, **steps, **options})
