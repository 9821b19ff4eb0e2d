"""AuON: the whole momentum, scaled to a norm; no orthogonalisation.

arXiv 2509.24320, and its code, ryyzn9/AuON.

    W, G: m×n weight and gradient         state: M, m×n, fp32 (fp64 for fp64 weights), sharded as W

    M ← μ·M + (1−μ)·G                     engine/momentum.py
    U ← (1−μ)·G + μ·M                     Nesterov, else U = M
    X ← U / (‖U‖_F + 1e-7)                engine/norms.py
    D ← X / (rms(cosh X) + 1e-8)          form="paper"
    D ← U / (rms(cosh(1.5·X)) + 1e-8)     form="repo": it divides the momentum itself
    D ← NewtonSchulz(X), one iteration    form="hybrid"; five in the code: ns_steps=5
    W ← (1 − η·λ)·W − η·D                 hybrid: −η·a(m, n)·D

Since ‖X‖_F = 1, rms(cosh X) is 1 to one part in 2mn: the first is the momentum over its Frobenius norm, the second the
momentum. Newton–Schulz starts with X anyway, so the hybrid is Muon of few iterations.
The norms of all matrices travel in two small all-reduces.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Unpack

from torch import Tensor

from ..engine.algorithm import MATRIX_OPTIONS, MOMENTUM_OPTIONS, Algorithm, register
from ..engine.driver import Driver
from ..engine.keywords import MatrixOptions
from ..engine.options import one_of

_OPTIONS = {key: value for key, value in MOMENTUM_OPTIONS.items() if key != "adjust_lr_fn"}
_PAPER = {**_OPTIONS, "lr": 0.24, "gamma": 1.0, "normalised": True}


def _one(group: Any, m: int, n: int) -> float:
    return 1.0


AUON = {
    "paper": Algorithm(name="auon", options=_PAPER, unit="matrix", unit_scale=_one, period=float("inf")),
    "repo": Algorithm(
        name="auon_repo",
        options={**_PAPER, "gamma": 1.5, "normalised": False},
        unit="matrix",
        unit_scale=_one,
        period=float("inf"),
    ),
    "hybrid": Algorithm(name="auon_hybrid", options={**MATRIX_OPTIONS, "ns_steps": 1}, period=1),
}
for _algorithm in AUON.values():
    register(_algorithm)

_UNSET: Any = object()


class AuON(Driver):
    """AuON (arXiv 2509.24320): momentum of Frobenius norm 1, in three forms.

    Args:
        params: weights [m, n], stacks [e, m, n], convolutions [out, in, …]; or groups of them.
        lr: η ≥ 0, a float or a 0-d tensor; 0.24, hybrid 1e-3.
        weight_decay: λ ≥ 0, decoupled.
        momentum: μ in [0, 1).
        nesterov: whether U looks one step ahead.
        form: ``paper``, ``repo`` or ``hybrid``; group names ``auon``, ``auon_repo``, ``auon_hybrid``.
        options: see ``engine/keywords.py``; those of Newton–Schulz for the hybrid only.

    Raises:
        ValueError: for options out of range, parameters of fewer than two dimensions, unsupported placements.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = _UNSET,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        *,
        form: Literal["paper", "repo", "hybrid"] = "paper",
        **options: Unpack[MatrixOptions],
    ) -> None:
        algorithm, problem = one_of(AUON, "form", form)
        own = {"weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        if lr is not _UNSET:
            own["lr"] = lr
        super().__init__(params, algorithm, {**own, **options}, problem=problem)
