"""MuonBP: block-periodic orthogonalisation. Whole matrices every P-th step, blocks in between.

Khaled, Ozkara, Yu, Hong, Park: arXiv 2510.16981.

    W, G: m×n weight and gradient, cut into blocks of p×q     state: M, m×n, fp32 (fp64 for fp64 weights), sharded as W
    t: completed steps, kept in the group and in checkpoints

    M ← μ·M + G                           engine/momentum.py   (ema: M ← μ·M + (1−μ)·G)
    U ← G + μ·M                           Nesterov, else U = M
    if (t − phase − o) mod P = 0:         engine/schedule.py; o = 0, or the matrix's own offset if staggered
        O ← NewtonSchulz(U)               the whole matrix, gathered by sharding/exchange.py
        W ← (1 − η·λ)·W − η·a(m, n)·O
    else, for every block b of this rank: engine/directions.py, block; no communication
        O_b ← NewtonSchulz(U_b)
        W_b ← (1 − η·λ)·W_b − η·block_lr_ratio·a(p, q)·O_b

Two step sizes are what the theory asks for (η_block/η_full = L_op/L_B); with ``match_rms_adamw`` both kinds of step
have the RMS 0.2·η, as in the paper's experiments, and ``block_lr_ratio`` multiplies the block steps on top.
P = 1 is Muon, P = ∞ BlockMuon. Without ``block_grid`` a block is the local shard: the result then depends on the ranks.
The paper is silent about Nesterov and about which step comes first; here the first step is a refresh (phase 0).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..engine.algorithm import MATRIX_OPTIONS, MAX_IN_FLIGHT, Algorithm, register
from ..engine.directions import block
from ..engine.driver import Driver
from ..engine.keywords import Features
from ..engine.momentum import MomentumForm
from ..engine.scaling import AdjustLr
from ..engine.schedule import Schedule
from ..orthogonal.coefficients import NS5, AnyCoefficients
from ..sharding.plan import BucketBytes, Exchange

MUON_BP = register(
    Algorithm(
        name="muon_bp",
        options={
            **MATRIX_OPTIONS,
            "momentum_form": "heavy_ball",
            "period": 5,
            "phase": 0,
            "stagger": False,
            "block_lr_ratio": 1.0,
            "block_grid": None,
        },
        between=block,
    )
)


class MuonBP(Driver):
    """MuonBP (arXiv 2510.16981): refreshes every ``period`` steps, orthogonalises local blocks in between.

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
        period: P ≥ 1, or ``math.inf`` to never refresh, or a schedule (engine/schedule.py).
        phase: step t ≥ 0 is a refresh if (t − phase) mod P = 0.
        stagger: whether matrices refresh in different steps of a period, dealt so that every step costs the same: step
            t refreshes those whose offset o, from shapes and their order alone, gives (t − phase − o) mod period = 0.
        block_lr_ratio: factor on block steps, or a schedule of it.
        block_grid: R row blocks or (R, C) blocks a logical matrix, cut as ``torch.chunk`` does, for any number of
            ranks; shards may not cut through a block. None: the local shard is the block.
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
        ValueError: for options out of range, parameters of fewer than two dimensions, unsupported placements,
            or shards that cut through a block.
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
        period: int | float | Schedule = 5,
        phase: int = 0,
        stagger: bool = False,
        block_lr_ratio: float | Schedule = 1.0,
        block_grid: int | tuple[int, int] | None = None,
        momentum_form: MomentumForm = "heavy_ball",
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
            "block_lr_ratio": block_lr_ratio,
            "block_grid": block_grid,
            **features,
        }
        super().__init__(params, MUON_BP, options, bucket_bytes, max_in_flight, process_group, compile)
