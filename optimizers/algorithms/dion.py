"""Dion: low-rank orthogonal steps, with what they leave out kept in the momentum.

arXiv 2504.05295, microsoft/dion.

    W, G: m×n weight and gradient         state: M, m×n, sharded as W, and Q, n×r, sharded as W's columns
                                          (engine/column_state.py); fp32, fp64 for fp64 weights

    M ← M + G
    P ← orth(M·Q)                         m×r; engine/low_rank.py
    R ← Mᵀ·P                              n×r
    M ← M − (1−μ)·P·Rᵀ                    error feedback: only what is used decays
    Q_j ← R_j/‖R_j‖₂                      for every column j
    W ← (1 − η·λ)·W − η·a(m, n)·P·Qᵀ      a = √(m/n), adjust_lr_fn="spectral_unclamped"

r = ⌈rank_fraction·min(m, n)⌉. Neither M nor G is ever gathered: a step sends O((m + n)·r) numbers a matrix, those of
all matrices together, and the result does not depend on the number of ranks N. For m = n, r = ρ·n and rows over ranks
these are 8·ρ·(1 + 2·ρ)·n²·(N−1)/N bytes, which do not fall with N as those of Muon by owner exchange do, 4·n²·(N−1)/N².

In the authors' code Q starts with Gaussian numbers, 1e-8 is added to ‖R_j‖₂, so that columns of Q vanish if there is no
gradient, and columns of M·Q that depend on others enter as noise of norm 1. Here Q starts orthonormal; a column that is
zero or depends on others is left out of the step, and its Q_j kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

from torch import Tensor

from ..engine.algorithm import MOMENTUM_OPTIONS, Algorithm, Together, register
from ..engine.driver import Driver
from ..engine.forms import COLUMNS, ELEMENTS
from ..engine.keywords import LowRankOptions
from ..engine.low_rank import BASIS, low_rank_flops, low_rank_steps, low_rank_sums

_OPTIONS = {key: value for key, value in MOMENTUM_OPTIONS.items() if key not in ("nesterov", "momentum_form")}

DION = register(
    Algorithm(
        name="dion",
        options={
            **_OPTIONS,
            "lr": 1e-2,
            "weight_decay": 0.01,
            "adjust_lr_fn": "spectral_unclamped",
            "rank_fraction": 1.0,
            "rank_multiple": 1,
        },
        period=float("inf"),
        together=Together("low-rank steps", low_rank_steps, low_rank_flops, low_rank_sums),
        state={"momentum_buffer": ELEMENTS, BASIS: COLUMNS},
    )
)


class Dion(Driver):
    """Dion (arXiv 2504.05295): steps of rank r, of one power iteration each, with error feedback.

    Args:
        params: weights [m, n], stacks [e, m, n], convolutions [out, in, …]; or groups of them.
        lr: η ≥ 0, a float or a 0-d tensor.
        weight_decay: λ ≥ 0, decoupled.
        momentum: μ in [0, 1): what is left in the momentum of directions that were used.
        rank_fraction: of min(m, n), in (0, 1]; the authors' runs have 1/4 and 1/2.
        rank_multiple: to which r is rounded up, if min(m, n) allows.
        options: see ``engine/keywords.py``.

    Raises:
        ValueError: for options out of range, parameters of fewer than two dimensions, unsupported placements.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        *,
        rank_fraction: float = 1.0,
        rank_multiple: int = 1,
        **options: Unpack[LowRankOptions],
    ) -> None:
        own = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "rank_fraction": rank_fraction}
        super().__init__(params, DION, {**own, "rank_multiple": rank_multiple, **options})
