"""MARS: variance-reduced gradients, for AdamW and for Muon.

arXiv 2411.10438, AGI-Arena/MARS; MARS-M: arXiv 2510.21800.

    W, G: weight and gradient             state: that of AdamW or Muon, and G', as W, fp32

    C ← G + γ·μ/(1−μ)·(G − G')           engine/variance.py; μ = β₁ for AdamW
    C ← C / max(1, ‖C‖_F / mars_clip)     of a whole parameter; those of all travel in one all-reduce
    G' ← G                                the approximate form; 0 at the start
    G' ← the gradient at the last W       mars_exact=True: of this step's batch, by ``at_previous_weights``; weights of
                                          other groups, as vectors' of AdamW, are the present ones
    AdamW:   as adamw.py, of C
    Muon:    M ← μ·M + (1−μ)·C,  W ← (1 − η·λ)·W − η·a(m, n)·NewtonSchulz(M)

``mars_gamma`` adds the same to every matrix algorithm of this package.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

from torch import Tensor

from ..engine.algorithm import MATRIX_OPTIONS, Algorithm, register
from ..engine.driver import Driver
from ..engine.forms import ELEMENTS
from ..engine.keywords import DriverOptions, MatrixOptions
from .adamw import adamw_

MARS_ADAMW = register(
    Algorithm(
        name="mars_adamw",
        options={
            "lr": 3e-3,
            "weight_decay": 0.1,
            "betas": (0.95, 0.99),
            "eps": 1e-8,
            "mars_gamma": 0.025,
            "mars_clip": 1.0,
            "mars_exact": False,
        },
        elementwise=adamw_,
        state={"exp_avg": ELEMENTS, "exp_avg_sq": ELEMENTS},
    )
)
MARS_MUON = register(
    Algorithm(name="mars_muon", options={**MATRIX_OPTIONS, "nesterov": False, "mars_gamma": 0.025}, period=1)
)


class MarsAdamW(Driver):
    """MARS-AdamW (arXiv 2411.10438) for parameters of any shape; the authors take AdamW for vectors.

    Args:
        params: parameters of any shape and sharding, or groups of them.
        lr: η ≥ 0, a float or a 0-d tensor.
        betas: (β₁, β₂), each in [0, 1).
        eps: ε ≥ 0, added to the square root.
        weight_decay: λ ≥ 0, decoupled.
        mars_gamma: γ ≥ 0.
        mars_clip: largest ‖C‖_F of a parameter; None: no clipping.
        mars_exact: whether G' is taken anew at the last weights, which are kept: 4 bytes an element more.
        options: ``DriverOptions`` of ``engine/keywords.py``.

    Raises:
        ValueError: for options out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        mars_gamma: float = 0.025,
        mars_clip: float | None = 1.0,
        mars_exact: bool = False,
        **options: Unpack[DriverOptions],
    ) -> None:
        own = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        mars = {"mars_gamma": mars_gamma, "mars_clip": mars_clip, "mars_exact": mars_exact}
        super().__init__(params, MARS_ADAMW, {**own, **mars, **options})


class MarsMuon(Driver):
    """MARS-M (arXiv 2510.21800): Muon on variance-reduced gradients, without Nesterov.

    Args:
        params: weights [m, n], stacks [e, m, n], convolutions [out, in, …]; or groups of them.
        lr: η ≥ 0, a float or a 0-d tensor.
        weight_decay: λ ≥ 0, decoupled.
        momentum: μ in [0, 1).
        mars_gamma: γ ≥ 0.
        mars_clip: largest ‖C‖_F of a parameter; None: no clipping.
        mars_exact: whether G' is taken anew at the last weights, which are kept: 4 bytes an element more.
        options: see ``engine/keywords.py``.

    Raises:
        ValueError: for options out of range, parameters of fewer than two dimensions, unsupported placements.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        *,
        mars_gamma: float = 0.025,
        mars_clip: float | None = 1.0,
        mars_exact: bool = False,
        **options: Unpack[MatrixOptions],
    ) -> None:
        own = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        mars = {"mars_gamma": mars_gamma, "mars_clip": mars_clip, "mars_exact": mars_exact}
        super().__init__(params, MARS_MUON, {**own, **mars, **options})
