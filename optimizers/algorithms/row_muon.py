"""RowMuon: every row of the momentum, normalised, at every step. Never orthogonalises.

RMNP, arXiv 2603.20527, and its code, Dominator-Index/RMNP.

    W, G: m×n weight and gradient         state: M, m×n, fp32 (fp64 for fp64 weights), sharded as W

    M ← μ·M + (1−μ)·G                     engine/momentum.py   (heavy_ball: M ← μ·M + G)
    U ← (1−μ)·G + μ·M                     Nesterov, else U = M
    R_i ← U_i / (‖U_i‖₂ + row_eps)        engine/rows.py, for every row i; a zero row stays zero
    W ← (1 − η·λ)·W − η·c(m, n)·R

    c = a(m, n)·√(min(m, n)/m)            row_norm="matched": the RMS of an orthogonal direction scaled by a(m, n)
    c = a(m, n)                           row_norm="plain": as the authors' code with adjust_lr_fn="original",
                                          √max(1, m/n); their README has c = 1

The case K = ∞ of Periodic Row-wise Muon. Silent where a shard holds whole rows, else one small all-reduce of all rows'
‖U_i‖₂² (engine/across.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

from torch import Tensor

from ..engine.algorithm import MOMENTUM_OPTIONS, Algorithm, register
from ..engine.driver import Driver
from ..engine.keywords import MomentumOptions
from ..engine.scaling import RowNorm, row_scale, spectral_scale


def _scale(group: Any, m: int, n: int) -> float:
    return (row_scale if group["row_norm"] == "matched" else spectral_scale)(group["adjust_lr_fn"], m, n)


ROW_MUON = register(
    Algorithm(
        name="row_muon",
        options={**MOMENTUM_OPTIONS, "row_norm": "matched", "row_eps": 0.0},
        unit="rows",
        unit_scale=_scale,
        period=float("inf"),
    )
)


class RowMuon(Driver):
    """RowMuon (RMNP, arXiv 2603.20527): unit rows at every step.

    Args:
        params: weights [m, n], stacks [e, m, n], convolutions [out, in, …]; or groups of them.
        lr: η ≥ 0, a float or a 0-d tensor.
        weight_decay: λ ≥ 0, decoupled.
        momentum: μ in [0, 1).
        nesterov: whether U looks one step ahead.
        row_norm: ``matched`` or ``plain``, see above.
        row_eps: ≥ 0, added to the norms; the authors take 1e-8. 0 makes the step independent of the gradient's scale.
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
        nesterov: bool = True,
        *,
        row_norm: RowNorm = "matched",
        row_eps: float = 0.0,
        **options: Unpack[MomentumOptions],
    ) -> None:
        own = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        super().__init__(params, ROW_MUON, {**own, "row_norm": row_norm, "row_eps": row_eps, **options})
