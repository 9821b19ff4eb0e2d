"""Dion2: some rows of the momentum are orthogonalised at a time, and what was not used stays in it.

arXiv 2512.16928, microsoft/dion.

    W, G: m×n weight and gradient         state: M, m×n, fp32 (fp64 for fp64 weights), sharded as W

    M ← M + G
    I ← the k = ⌈fraction·m⌉ rows of M with the largest L1 norm        engine/selection.py
    S ← M_I;  M_I ← μ·M_I                 error feedback: only what is used decays
    O ← NewtonSchulz(S)                   the k×n matrix, gathered by sharding/exchange.py
    W ← (1 − η·λ)·W
    W_I ← W_I − η·a(m, n)·O               a = √(m/n), adjust_lr_fn="spectral_unclamped"

selection="global": of the whole matrix, by one all-reduce of all rows' norms, so that the result does not depend on the
number of ranks. "local": ⌈fraction·m'⌉ of the m' rows that a rank has, as in the authors' code, with no all-reduce.
They also select columns; here it is always rows, which are what FSDP2 divides. It sends about ``fraction`` times as
many bytes as Muon.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

from torch import Tensor

from ..engine.algorithm import MATRIX_OPTIONS, Algorithm, register
from ..engine.driver import Driver
from ..engine.keywords import MatrixOptions
from ..engine.narrow import Selection

_NOT_USED = ("nesterov", "momentum_form", "neuron_beta2", "neuron_eps", "neuron_norm")
_OPTIONS = {key: value for key, value in MATRIX_OPTIONS.items() if key not in _NOT_USED}

DION2 = register(
    Algorithm(
        name="dion2",
        options={
            **_OPTIONS,
            "lr": 1e-2,
            "weight_decay": 0.01,
            "adjust_lr_fn": "spectral_unclamped",
            "fraction": 0.25,
            "selection": "global",
        },
        period=1,
        selects=True,
    )
)


class Dion2(Driver):
    """Dion2 (arXiv 2512.16928): orthogonalises the rows with the largest momentum.

    Args:
        params: weights [m, n], stacks [e, m, n], convolutions [out, in, …]; or groups of them.
        lr: η ≥ 0, a float or a 0-d tensor.
        weight_decay: λ ≥ 0, decoupled.
        momentum: μ in [0, 1): what is left in the momentum of rows that were used.
        fraction: of the rows, in (0, 1].
        selection: ``global`` or ``local``.
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
        fraction: float = 0.25,
        selection: Selection = "global",
        **options: Unpack[MatrixOptions],
    ) -> None:
        own = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(params, DION2, {**own, "fraction": fraction, "selection": selection, **options})
