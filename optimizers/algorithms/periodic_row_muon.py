"""Periodic Row-wise Muon: whole matrices are orthogonalised every K-th step, rows are normalised in between.

"Scaling Muon for Diffusion Transformers", arXiv 2608.20818. Only its abstract could be read; scale and Nesterov of the
row step are choices made here.

    W, G: m×n weight and gradient         state: M, m×n, fp32 (fp64 for fp64 weights), sharded as W
    t: completed steps, kept in the group and in checkpoints

    M ← μ·M + (1−μ)·G                     engine/momentum.py   (heavy_ball: M ← μ·M + G)
    U ← (1−μ)·G + μ·M                     Nesterov, else U = M
    if (t − phase − o) mod K = 0:         engine/schedule.py; o = 0, or the matrix's own offset if staggered
        O ← NewtonSchulz(U)               the whole matrix, gathered by sharding/exchange.py
        W ← (1 − η·λ)·W − η·a(m, n)·O
    else:                                 engine/rows.py; silent where a shard holds whole rows, else
                                          engine/across.py: one all-reduce of all rows' ‖U_i‖₂²
        R_i ← U_i / ‖U_i‖₂                for every row i, that is every output neuron; a zero row stays zero
        W ← (1 − η·λ)·W − η·row_lr_ratio·a(m, n)·√(min(m, n)/m)·R

The square root makes both kinds of step equal in RMS; with ``match_rms_adamw`` the row factor is 0.2·√n.
The result does not depend on the number of ranks.
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
from ..engine.schedule import Schedule
from ..orthogonal.coefficients import NS5, AnyCoefficients
from ..sharding.plan import BucketBytes, Exchange

PERIODIC_ROW_MUON = register(
    Algorithm(
        name="periodic_row_muon",
        options={**MATRIX_OPTIONS, "period": 3, "phase": 0, "stagger": False, "row_lr_ratio": 1.0},
        unit="rows",
    )
)


class PeriodicRowMuon(Driver):
    """Periodic Row-wise Muon (arXiv 2608.20818): refreshes every ``period`` steps, takes unit rows in between.

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
        period: K ≥ 1, or ``math.inf`` to never refresh, or a schedule (engine/schedule.py).
        phase: step t ≥ 0 is a refresh if (t − phase) mod K = 0.
        stagger: whether matrices refresh in different steps of a period, dealt so that every step costs the same: step
            t refreshes those whose offset o, from shapes and their order alone, gives (t − phase − o) mod period = 0.
        row_lr_ratio: factor on row steps, or a schedule of it.
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
        compile: whether row steps, and the momentum on a refresh, of matrices of 1 MiB and more run in kernels that
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
        period: int | float | Schedule = 3,
        phase: int = 0,
        stagger: bool = False,
        row_lr_ratio: float | Schedule = 1.0,
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
            "period": period,
            "phase": phase,
            "stagger": stagger,
            "row_lr_ratio": row_lr_ratio,
            **features,
        }
        super().__init__(params, PERIODIC_ROW_MUON, options, bucket_bytes, max_in_flight, process_group, compile)
