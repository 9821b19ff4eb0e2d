"""BlockMuon: every block of a matrix is orthogonalised by itself; nothing is communicated.

The case P = ∞ of MuonBP, arXiv 2510.16981.

    W, G: m×n weight and gradient, cut into blocks of p×q     state: M, m×n, fp32 (fp64 for fp64 weights), sharded as W

    M ← μ·M + (1−μ)·G                     engine/momentum.py   (heavy_ball: M ← μ·M + G)
    U ← (1−μ)·G + μ·M                     Nesterov, else U = M
    for every block b of this rank:       engine/directions.py, block
        O_b ← NewtonSchulz(U_b)
        W_b ← (1 − η·λ)·W_b − η·a(p, q)·O_b

Without ``block_grid`` a block is the local shard, and the result depends on how many ranks share the matrix.
"""

from __future__ import annotations

import math
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
from ..orthogonal.coefficients import NS5, AnyCoefficients
from ..sharding.plan import BucketBytes, Exchange

BLOCK_MUON = register(
    Algorithm(name="block_muon", options={**MATRIX_OPTIONS, "block_grid": None}, between=block, period=math.inf)
)


class BlockMuon(Driver):
    """BlockMuon (arXiv 2510.16981, P = ∞): orthogonalises blocks where they lie, without communication.

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
        process_group: accepted as by the other classes, for groups of another algorithm; blocks are never dealt.
        compile: for groups of another algorithm; block steps have nothing to compile.
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
        block_grid: int | tuple[int, int] | None = None,
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
            "block_grid": block_grid,
            **features,
        }
        super().__init__(params, BLOCK_MUON, options, bucket_bytes, max_in_flight, process_group, compile)
