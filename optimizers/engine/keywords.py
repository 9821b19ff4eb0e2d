"""Keyword arguments that the classes of matrix optimizers share. Their defaults are in ``algorithm.py``."""

from __future__ import annotations

from typing import Literal, TypedDict

import torch
from torch.distributed import ProcessGroup

from ..orthogonal.coefficients import AnyCoefficients
from ..sharding.plan import BucketBytes, Exchange
from .equilibrate import Equilibration
from .momentum import MomentumForm
from .scaling import AdjustLr, NeuronNorm

MomentumDtype = torch.dtype | Literal["int8", "dynamic8"] | None


class DriverOptions(TypedDict, total=False):
    """Of the optimizer as a whole.

    bucket_bytes: how much travels or is updated at a time: the shards of all ranks together, in the wire dtype.
        ``auto`` gives each rank a share of at most 64 MiB, so it grows with the number of ranks, and less to have
        four buckets on their way, but room for a matrix a rank.
    max_in_flight: buckets in flight on a refresh.
    process_group: ranks that each hold the same plain (not DTensor) parameters and gradients, as under DDP: they deal
        the matrices of a refresh among them instead of all doing the same work. All of them have to pass it.
    compile: whether passes over matrices of 1 MiB and more run in kernels that ``torch.compile`` writes at the first of
        them; eagerly, after a warning, if it cannot.
    """

    bucket_bytes: BucketBytes
    max_in_flight: int
    process_group: ProcessGroup | None
    compile: bool


class MomentumFeatures(TypedDict, total=False):
    """What any matrix algorithm can do besides.

    momentum_dtype: in which the momentum is kept. None is fp32 (fp64 for fp64 weights); ``int8`` and ``dynamic8`` take
        8 bits an element and a scale for each block of a row (quantized_state.py), for weights of 4096 elements and
        more.
    mars_gamma: γ ≥ 0 of MARS variance reduction (variance.py); 0 is none. It keeps the last gradient, 4 bytes an
        element.
    mars_clip: largest ‖C‖_F of a parameter's corrected gradient; None: no clipping.
    mars_exact: whether the gradient before is taken anew, at the last weights and this step's batch, inside
        ``optimizer.at_previous_weights()``; those weights are kept, 4 bytes an element.
    """

    momentum_dtype: MomentumDtype
    mars_gamma: float
    mars_clip: float | None
    mars_exact: bool


class Features(MomentumFeatures, total=False):
    """What any algorithm that orthogonalises can do besides.

    equilibrate: ``r``, ``c`` or ``rc``: rows, columns or both come to norm 1 before each Newton–Schulz
        (equilibrate.py).
    neuron_beta2: β₂ of NorMuon's normalisation of each row of an orthogonal direction (neurons.py), None for none; row
        steps need none. neuron_eps: ε there. neuron_norm: ``orthogonal`` (paper) or ``direction`` (code).
    """

    equilibrate: Equilibration | None
    neuron_beta2: float | None
    neuron_eps: float
    neuron_norm: NeuronNorm


class MomentumOptions(MomentumFeatures, DriverOptions, total=False):
    """Of every matrix algorithm.

    momentum_form: ``ema`` or ``heavy_ball`` (momentum.py). adjust_lr_fn: a(m, n): ``original`` √max(1, m/n),
        ``match_rms_adamw`` 0.2·√max(m, n), ``spectral_unclamped`` √(m/n).
    """

    momentum_form: MomentumForm
    adjust_lr_fn: AdjustLr


class LowRankOptions(MomentumFeatures, DriverOptions, total=False):
    """Of every algorithm that takes low-rank steps.

    adjust_lr_fn: a(m, n), as above.
    """

    adjust_lr_fn: AdjustLr


class MatrixOptions(Features, MomentumOptions, total=False):
    """Of every algorithm that orthogonalises.

    ns_coefficients: of the Newton–Schulz iteration: a triple, a sequence of triples, or a name of
        ``orthogonal/coefficients.py``. ns_steps: iterations; None is the set's own length (5 for a triple).
    eps: added to the Frobenius norm, relative to the largest entry.
    ns_dtype: of the iterations; None is fp64 for fp64 weights, else bf16 where the device is natively fast at it, else
        fp32.
    wire_dtype: in which whole matrices travel on a refresh; None is bf16 (fp64 for fp64 weights). Matrices that stay at
        home are rounded to it as well, so the result does not depend on the number of ranks.
    exchange: ``owner``: each matrix travels to one rank, which orthogonalises it, and back. ``gather``: every rank
        gathers every matrix and orthogonalises its own copy, the published form.
    """

    ns_coefficients: AnyCoefficients
    ns_steps: int | None
    eps: float
    ns_dtype: torch.dtype | None
    wire_dtype: torch.dtype | None
    exchange: Exchange
