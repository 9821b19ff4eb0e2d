"""NorMuon: Muon whose directions are normalised neuron by neuron, by a running mean of their squares.

arXiv 2510.05491, and its code, zichongli5/NorMuon.

    W, G: m×n weight and gradient         state: M, m×n, and v, m×1, fp32 (fp64 for fp64 weights), sharded as W's rows

    M ← μ·M + (1−μ)·G                     engine/momentum.py
    U ← (1−μ)·G + μ·M                     Nesterov (code), else U = M (paper)
    O ← NewtonSchulz(U)                   the whole matrix, gathered by sharding/exchange.py
    v_i ← β₂·v_i + (1−β₂)·mean_j(O_ij²)   engine/neurons.py, for every row i
    Ô_i ← O_i / (√v_i + ε)
    W ← (1 − η·λ)·W − η·a(m, n)·c·Ô       c = √min(m, n)/‖Ô‖_F  neuron_norm="orthogonal": with match_rms_adamw the
                                          paper's 0.2·√(mn)/‖Ô‖_F
                                          c = ‖O‖_F/‖Ô‖_F  neuron_norm="direction": the code, with
                                          adjust_lr_fn="original"

‖Ô‖_F is that of the whole matrix: those of all matrices travel in one all-reduce. The authors' FSDP code takes each
shard's own instead. The result does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

from torch import Tensor

from ..engine.algorithm import MATRIX_OPTIONS, Algorithm, register
from ..engine.driver import Driver
from ..engine.keywords import MatrixOptions

NORMUON = register(Algorithm(name="normuon", options={**MATRIX_OPTIONS, "neuron_beta2": 0.95}, period=1))


class NorMuon(Driver):
    """NorMuon (arXiv 2510.05491): orthogonalises as Muon does, then evens out the rows.

    The defaults are the paper's rescaling with Nesterov momentum, as in the code. ``MuonBP``, ``PeriodicRowMuon`` and
    the others take the same ``neuron_beta2``.

    Args:
        params: weights [m, n], stacks [e, m, n], convolutions [out, in, …]; or groups of them.
        lr: η ≥ 0, a float or a 0-d tensor.
        weight_decay: λ ≥ 0, decoupled.
        momentum: μ in [0, 1).
        nesterov: whether U looks one step ahead.
        options: see ``engine/keywords.py``; ``neuron_beta2`` is 0.95 here.

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
        **options: Unpack[MatrixOptions],
    ) -> None:
        own = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        super().__init__(params, NORMUON, {**own, **options})
