"""MuonEq: Muon on an equilibrated momentum.

arXiv 2603.28254.

    W, G: m×n weight and gradient         state: M, m×n, fp32 (fp64 for fp64 weights), sharded as W

    M ← μ·M + (1−μ)·G                     engine/momentum.py
    U ← (1−μ)·G + μ·M                     Nesterov, else U = M
    X ← D_r^(−1/2) U D_c^(−1/2)           engine/equilibrate.py: D_r, D_c: diagonals of the sums of squares of rows, of
                                          columns; R: D_r alone, C: D_c alone, RC: both
    O ← NewtonSchulz(X)                   the whole matrix, gathered by sharding/exchange.py
    W ← (1 − η·λ)·W − η·a(m, n)·O
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

from torch import Tensor

from ..engine.algorithm import MATRIX_OPTIONS, Algorithm, register
from ..engine.driver import Driver
from ..engine.equilibrate import Equilibration
from ..engine.keywords import MatrixOptions

MUON_EQ = register(Algorithm(name="muon_eq", options={**MATRIX_OPTIONS, "equilibrate": "r"}, period=1))


class MuonEq(Driver):
    """MuonEq (arXiv 2603.28254): brings rows or columns to norm 1 before Newton–Schulz.

    Args:
        params: weights [m, n], stacks [e, m, n], convolutions [out, in, …]; or groups of them.
        lr: η ≥ 0, a float or a 0-d tensor.
        weight_decay: λ ≥ 0, decoupled.
        momentum: μ in [0, 1).
        nesterov: whether U looks one step ahead.
        equilibrate: ``r``, ``c`` or ``rc``.
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
        equilibrate: Equilibration = "r",
        **options: Unpack[MatrixOptions],
    ) -> None:
        own = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        super().__init__(params, MUON_EQ, {**own, "equilibrate": equilibrate, **options})
