"""Muon: momentum, orthogonalised by Newton–Schulz.

Keller Jordan (2024), https://kellerjordan.github.io/posts/muon/; scale and weight decay as in "Muon is Scalable for LLM
Training", arXiv 2502.16982.

    W, G: m×n weight and gradient         state: M, m×n, fp32 (fp64 for fp64 weights), sharded as W

    M ← μ·M + (1−μ)·G                     engine/momentum.py   (heavy_ball: M ← μ·M + G)
    U ← (1−μ)·G + μ·M                     Nesterov, else U = M
    O ← NewtonSchulz(U)                   orthogonal/newton_schulz.py, on the whole matrix
    W ← (1 − η·λ)·W − η·a(m, n)·O         engine/scaling.py

Every step is a refresh: a matrix cut over ranks travels to an owner and back (sharding/exchange.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..engine.algorithm import MATRIX_OPTIONS, MAX_IN_FLIGHT, Algorithm, register
from ..engine.driver import Driver
from ..engine.keywords import Features
from ..engine.momentum import MomentumForm
from ..engine.scaling import AdjustLr
from ..orthogonal.coefficients import NS5, AnyCoefficients
from ..sharding.plan import BucketBytes, Exchange

MUON = register(Algorithm(name="muon", options=MATRIX_OPTIONS, period=1))


class Muon(Driver):
    """Muon (arXiv 2502.16982): every step orthogonalises the momentum of whole matrices.

    Args:
        params: weights [m, n], stacks [e, m, n], convolutions [out, in, …]; or groups of them.
        lr: η ≥ 0, a float or a 0-d tensor (which is read on its device without a synchronisation).
        weight_decay: λ ≥ 0, decoupled, multiplied by the lr before ``adjust_lr_fn``.
        momentum: μ in [0, 1).
        nesterov: whether U looks one step ahead.
        ns_coefficients: of the Newton–Schulz iteration: a triple, a sequence of triples, or a name of
            ``orthogonal/coefficients.py``. ns_steps: iterations; None is the set's own length (5 for a triple).
        eps: added to the Frobenius norm, relative to the largest entry.
        adjust_lr_fn: a(m, n): ``original`` √max(1, m/n), ``match_rms_adamw`` 0.2·√max(m, n),
            ``spectral_unclamped`` √(m/n).
        momentum_form: ``ema`` or ``heavy_ball``.
        ns_dtype: of the iterations; None is fp64 for fp64 weights, else bf16 where the device is natively fast at
            it, else fp32.
        wire_dtype: in which whole matrices travel on a refresh; None is bf16 (fp64 for fp64 weights). Matrices that
            stay at home are rounded to it as well, so the result does not depend on the number of ranks.
        exchange: ``owner``: each matrix travels to one rank, which orthogonalises it, and back. ``gather``: every rank
            gathers every matrix and orthogonalises its own copy, the published form.
        bucket_bytes: how much travels or is updated at a time: the shards of all ranks together, in the wire dtype.
            ``auto`` gives each rank a share of at most 64 MiB, so it grows with the number of ranks, and less to have
            four buckets on their way, but room for a matrix a rank.
        max_in_flight: buckets in flight on a refresh.
        process_group: ranks that each hold the same plain (not DTensor) parameters and gradients, as under DDP: they
            deal the matrices of a refresh among them instead of all doing the same work. None: each works alone.
            All of them have to pass it. DTensors bring their own.
        compile: whether the momentum of matrices of 1 MiB and more advances, on a refresh, in a kernel that
            ``torch.compile`` writes at the first of them; eagerly, after a warning, if it cannot.
        features: of ``engine/keywords.py``: 8-bit momentum, MARS, equilibration, normalised neurons.

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
        ns_coefficients: AnyCoefficients = NS5,
        eps: float = 1e-7,
        ns_steps: int | None = None,
        adjust_lr_fn: AdjustLr = "match_rms_adamw",
        *,
        momentum_form: MomentumForm = "ema",
        ns_dtype: torch.dtype | None = None,
        wire_dtype: torch.dtype | None = None,
        exchange: Exchange = "owner",
        bucket_bytes: BucketBytes = "auto",
        max_in_flight: int = MAX_IN_FLIGHT,
        process_group: ProcessGroup | None = None,
        compile: bool = False,
        **features: Unpack[Features],
    ) -> None:
        options = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "momentum_form": momentum_form,
            "ns_dtype": ns_dtype,
            "wire_dtype": wire_dtype,
            "exchange": exchange,
            **features,
        }
        super().__init__(params, MUON, options, bucket_bytes, max_in_flight, process_group, compile)
