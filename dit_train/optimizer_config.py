"""The settings of every optimizer: one frozen dataclass each, by the name that parameter groups use.

A class has the settings that do something for it, with the defaults of its class in `optimizers`; what several share
stands once, in the classes without a name. This module imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

PERIOD_BUDGET = 0.05
"""Overhead over AdamW that a period is chosen for where nothing else is said."""

# --- elementwise -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdamWConfig:
    """AdamW for every parameter (arXiv 1711.05101)."""

    name: Literal["adamw"] = "adamw"
    """AdamW for everything."""
    lr: float = 1e-3
    """Peak learning rate."""
    weight_decay: float = 0.1
    """Decoupled weight decay; vectors have none."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the two moments."""
    eps: float = 1e-8
    """Added to the root of the second moment."""


@dataclass(frozen=True)
class AdamW8bitConfig(AdamWConfig):
    """AdamW whose moments take a byte an element each (arXiv 2110.02861)."""

    name: Literal["adamw_8bit"] = "adamw_8bit"
    """AdamW for everything; vectors and tensors of fewer than 4096 elements keep fp32 moments."""


@dataclass(frozen=True)
class MarsAdamWConfig(AdamWConfig):
    """MARS-AdamW: AdamW on variance-reduced gradients (arXiv 2411.10438)."""

    name: Literal["mars_adamw"] = "mars_adamw"
    """MARS-AdamW for everything but vectors, which AdamW takes."""
    lr: float = 3e-3
    betas: tuple[float, float] = (0.95, 0.99)
    mars_gamma: float = 0.025
    """γ of the correction by the last gradient, which is kept; 0: none."""
    mars_clip: float | None = 1.0
    """Largest norm of a parameter's corrected gradient; null: no clipping."""
    mars_exact: bool = False
    """Take the last gradient anew, of this batch at the last weights: a second pass, and those weights are kept."""


@dataclass(frozen=True)
class LionConfig:
    """Lion: the sign of a dual average (arXiv 2302.06675)."""

    name: Literal["lion"] = "lion"
    """Lion for everything."""
    lr: float = 1e-4
    """Peak learning rate; three to ten times below AdamW's."""
    weight_decay: float = 0.1
    """Decoupled weight decay, three to ten times above AdamW's; vectors have none."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Weight of the average in the step, and its decay."""


@dataclass(frozen=True)
class SGDConfig:
    """SGD with momentum and decoupled weight decay."""

    name: Literal["sgd"] = "sgd"
    """SGD for everything."""
    lr: float = 1e-2
    """Peak learning rate."""
    weight_decay: float = 0.0
    """Decoupled weight decay; vectors have none."""
    momentum: float = 0.9
    """Momentum μ."""
    nesterov: bool = False
    """Step along the Nesterov look-ahead instead of the buffer."""
    momentum_form: Literal["ema", "heavy_ball"] = "heavy_ball"
    """M ← μM + (1−μ)G, or M ← μM + G."""


# --- what algorithms of matrices share -------------------------------------------------------------------------------
# A dataclass has the settings of its last base first.


@dataclass(frozen=True)
class AuxiliaryAdamW:
    """AdamW for what a matrix optimizer does not take: embeddings, modulation, final layer, biases."""

    lr: float | None = None
    """Learning rate; null takes the matrices' (whose updates match AdamW's in RMS by default)."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the two moments."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float | None = None
    """Decoupled weight decay of matrices in this group (vectors have none); null takes the matrices'."""


Ratios = float | tuple[tuple[int, float], ...]
"""A number, or a schedule of [step, value]: linear from step to step, then the last."""

Periods = int | Literal["auto"] | tuple[tuple[int, int], ...]
"""A number, auto, or a schedule of [step, period], each of which holds until the next step."""


def _own_adamw() -> AuxiliaryAdamW:
    """For algorithms whose learning rate and weight decay mean something else than AdamW's."""
    return AuxiliaryAdamW(lr=1e-3, weight_decay=0.1)


@dataclass(frozen=True)
class _Momentum:
    """A momentum, and what can be done to any."""

    name: str = ""
    lr: float = 1e-3
    """Peak learning rate."""
    weight_decay: float = 0.1
    """Decoupled weight decay, by the raw learning rate."""
    momentum: float = 0.95
    """Momentum μ."""
    momentum_dtype: Literal["fp32", "bf16", "int8", "dynamic8"] = "fp32"
    """In which the momentum is kept; int8 (linear) and dynamic8 (finer near zero) take a byte an element."""
    mars_gamma: float = 0.0
    """γ of MARS, which corrects gradients by the last ones (arXiv 2411.10438) and keeps those; 0: none."""
    mars_clip: float | None = 1.0
    """Beside mars_gamma: largest norm of a parameter's corrected gradient; null: no clipping."""
    mars_exact: bool = False
    """Beside mars_gamma: take the last gradient anew, of this batch at the last weights: a second pass each step."""


@dataclass(frozen=True)
class _Nesterov:
    nesterov: bool = True
    """Take the direction of the Nesterov look-ahead instead of the buffer."""


@dataclass(frozen=True)
class _MomentumForm:
    momentum_form: Literal["ema", "heavy_ball"] = "ema"
    """M ← μM + (1−μ)G, or M ← μM + G."""


@dataclass(frozen=True)
class _Scale:
    adjust_lr_fn: Literal["original", "match_rms_adamw", "spectral_unclamped"] = "match_rms_adamw"
    """How the step scales with the shape, as in torch.optim.Muon."""


@dataclass(frozen=True)
class _NewtonSchulz:
    """Orthogonalisation of whole matrices."""

    ns_coefficients: str = "ns5"
    """Newton–Schulz polynomials by name: ns5, quintic, polar_express, cans, cubic5, exact, turbo, gram_ns5, …"""
    ns_steps: int | None = None
    """Newton–Schulz iterations; null: as many as the named set has."""
    ns_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of Newton–Schulz; auto: bf16 where the device multiplies it natively."""
    wire_dtype: Literal["fp32", "bf16"] = "bf16"
    """Precision of a refresh on the wire."""
    exchange: Literal["owner", "gather"] = "owner"
    """Refreshes by all-to-all to one owner a matrix, or (as published) by all-gather, every rank orthogonalising."""
    compile: bool = False
    """Compile row steps, and the momentum on a refresh, at their first use; not bit-equal for all rank counts."""
    equilibrate: Literal["r", "c", "rc"] | None = None
    """Bring rows, columns or both to norm 1 before Newton–Schulz (arXiv 2603.28254); null: neither."""


@dataclass(frozen=True)
class _Neurons:
    """Rows of orthogonal directions, normalised by a running mean of their squares (arXiv 2510.05491)."""

    neuron_beta2: float | None = None
    """β₂ of that mean; null: no such normalisation."""
    neuron_eps: float = 1e-8
    """Beside neuron_beta2: added to the root of the mean."""
    neuron_norm: Literal["orthogonal", "direction"] = "orthogonal"
    """Beside neuron_beta2: rescale to the norm of an orthogonal matrix (paper), or of the direction before (code)."""


@dataclass(frozen=True)
class _Periodic:
    """A full refresh now and then."""

    period: Periods = 1
    period_budget: float = PERIOD_BUDGET
    """auto: by how much the mean step may be longer than AdamW's, as a share of it."""
    phase: int = 0
    """Step t (completed steps before it) refreshes when (t − phase) mod period = 0."""
    stagger: bool = False
    """Deal the matrices over the period by cost, so that every step refreshes some and costs the same."""


@dataclass(frozen=True)
class _Rest:
    bucket_mib: float | None = None
    """Largest bucket that travels or is updated at once, shards of all ranks together, in MiB; null: at most 64 for
    each rank."""
    adamw: AuxiliaryAdamW = field(default_factory=AuxiliaryAdamW)


@dataclass(frozen=True)
class _RowStep:
    compile: bool = False
    """Compile row steps at their first use; not bit-equal for all rank counts."""


# --- orthogonal at every step ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MuonConfig(_Rest, _Neurons, _NewtonSchulz, _Scale, _MomentumForm, _Nesterov, _Momentum):
    """Muon: momentum orthogonalised by Newton–Schulz at every step."""

    name: Literal["muon"] = "muon"
    """Orthogonalised at every step."""


@dataclass(frozen=True)
class MuonEqConfig(MuonConfig):
    """MuonEq: rows or columns come to norm 1 before Newton–Schulz (arXiv 2603.28254)."""

    name: Literal["muon_eq"] = "muon_eq"
    """Equilibrated, and orthogonalised at every step."""
    equilibrate: Literal["r", "c", "rc"] = "r"
    """Bring rows, columns or both to norm 1 before Newton–Schulz."""


@dataclass(frozen=True)
class NorMuonConfig(MuonConfig):
    """NorMuon: rows of the orthogonal direction normalised by a running mean of their squares (arXiv 2510.05491)."""

    name: Literal["normuon"] = "normuon"
    """Orthogonalised at every step, then evened out by rows."""
    neuron_beta2: float = 0.95
    """β₂ of the running mean."""


@dataclass(frozen=True)
class Muon8bitConfig(MuonConfig):
    """8-bit Muon: a momentum of a byte an element (arXiv 2509.23106)."""

    name: Literal["muon_8bit"] = "muon_8bit"
    """Orthogonalised at every step, with momentum in 8 bits."""
    momentum_dtype: Literal["int8", "dynamic8"] = "int8"
    """Linear, or with finer values near zero."""


@dataclass(frozen=True)
class MarsMuonConfig(_Rest, _Neurons, _NewtonSchulz, _Scale, _MomentumForm, _Momentum):
    """MARS-M: Muon on variance-reduced gradients, without Nesterov (arXiv 2510.21800)."""

    name: Literal["mars_muon"] = "mars_muon"
    """Orthogonalised at every step, of corrected gradients."""
    mars_gamma: float = 0.025


@dataclass(frozen=True)
class AdaGOConfig(_Rest, _NewtonSchulz, _MomentumForm, _Momentum):
    """AdaGO: orthogonal directions, and steps that fall with the norms of past gradients (arXiv 2509.02981)."""

    name: Literal["adago"] = "adago"
    """Orthogonalised at every step, with the step size of AdaGrad-Norm."""
    lr: float = 5e-2
    """Peak η: a step has a spectral norm of at most that."""
    weight_decay: float = 0.0
    max_norm: float = 10.0
    """γ, above which the norm of a gradient counts no more."""
    least_step: float = 5e-4
    """ε: no step is smaller, whatever the learning rate's schedule."""
    initial_norm: float = 1e-3
    """v₀, of which the norms go on."""
    adamw: AuxiliaryAdamW = field(default_factory=_own_adamw)


@dataclass(frozen=True)
class ScionConfig(_Rest, _Neurons, _NewtonSchulz, _Scale, _MomentumForm, _Momentum):
    """Scion in the spectral ball: steps to the minimiser of the linearised loss (arXiv 2502.07529)."""

    name: Literal["scion"] = "scion"
    """Orthogonalised at every step, in a ball of fixed radius."""
    ball: Literal["spectral"] = "spectral"
    """spectral; or row, column and sign, which orthogonalise nothing and have fewer settings."""
    lr: float = 2**-12
    """Peak γ."""
    weight_decay: float = 1.0
    """1: constrained to the ball. 0: unconstrained."""
    momentum: float = 0.9
    radius: float = 50.0
    """ρ of the ball."""
    adjust_lr_fn: Literal["original", "match_rms_adamw", "spectral_unclamped"] = "spectral_unclamped"
    adamw: AuxiliaryAdamW = field(default_factory=_own_adamw)


@dataclass(frozen=True)
class Dion2Config(_Rest, _NewtonSchulz, _Scale, _Momentum):
    """Dion2: some rows of the momentum orthogonalised at a time; what was not used stays in it (arXiv 2512.16928)."""

    name: Literal["dion2"] = "dion2"
    """The rows with the largest momentum, orthogonalised at every step."""
    lr: float = 1e-2
    weight_decay: float = 0.01
    """Decoupled weight decay, by the raw learning rate."""
    momentum: float = 0.95
    """μ, what is left in the momentum of rows that were used."""
    adjust_lr_fn: Literal["original", "match_rms_adamw", "spectral_unclamped"] = "spectral_unclamped"
    fraction: float = 0.25
    """Share of the rows that is used at a time."""
    selection: Literal["global", "local"] = "global"
    """Of the rows of whole matrices, by one all-reduce of their norms, or of those that a rank has."""
    adamw: AuxiliaryAdamW = field(default_factory=_own_adamw)


@dataclass(frozen=True)
class DionConfig(_Rest, _Scale, _Momentum):
    """Dion: orthogonal steps of low rank, and what they leave out kept in the momentum (arXiv 2504.05295)."""

    name: Literal["dion"] = "dion"
    """Low-rank orthogonal at every step; the momentum is never gathered."""
    lr: float = 1e-2
    weight_decay: float = 0.01
    """Decoupled weight decay, by the raw learning rate."""
    momentum: float = 0.95
    """μ, what is left in the momentum of directions that were used."""
    adjust_lr_fn: Literal["original", "match_rms_adamw", "spectral_unclamped"] = "spectral_unclamped"
    rank_fraction: float = 1.0
    """Rank of a step as a share of the shorter side; the authors run 0.25 and 0.5."""
    rank_multiple: int = 1
    """What the rank is rounded up to a multiple of."""
    adamw: AuxiliaryAdamW = field(default_factory=_own_adamw)


# --- never orthogonal, and now and then -------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowMuonConfig(_Rest, _RowStep, _Scale, _MomentumForm, _Nesterov, _Momentum):
    """RowMuon: unit rows of the momentum, never orthogonalised (RMNP, arXiv 2603.20527)."""

    name: Literal["row_muon"] = "row_muon"
    """Unit rows at every step."""
    row_norm: Literal["matched", "plain"] = "matched"
    """matched: the RMS of an orthogonal step. plain: as the authors' code, with adjust_lr_fn original."""
    row_eps: float = 0.0
    """Added to the norms of rows."""


@dataclass(frozen=True)
class ScionOtherConfig(_Rest, _RowStep, _MomentumForm, _Momentum):
    """Scion in the ball of another norm: of rows, columns or entries (arXiv 2502.07529)."""

    name: Literal["scion"] = "scion"
    """A step in a ball of fixed radius."""
    ball: Literal["row", "column", "sign"] = "row"
    """Unit rows, unit columns or signs."""
    lr: float = 2**-12
    """Peak γ."""
    weight_decay: float = 1.0
    """1: constrained to the ball. 0: unconstrained."""
    momentum: float = 0.9
    radius: float = 50.0
    """ρ of the ball."""
    adamw: AuxiliaryAdamW = field(default_factory=_own_adamw)


@dataclass(frozen=True)
class AuONConfig(_Rest, _MomentumForm, _Nesterov, _Momentum):
    """AuON: momentum scaled to a norm, not orthogonalised (arXiv 2509.24320)."""

    name: Literal["auon"] = "auon"
    """Momentum over its norm."""
    form: Literal["paper", "repo"] = "paper"
    """paper: momentum of Frobenius norm 1. repo: the momentum itself, divided by rms(cosh(1.5·X)). Or hybrid."""
    lr: float = 0.24
    adamw: AuxiliaryAdamW = field(default_factory=_own_adamw)


@dataclass(frozen=True)
class AuONHybridConfig(MuonConfig):
    """AuON's hybrid: Muon of one Newton–Schulz iteration (arXiv 2509.24320)."""

    name: Literal["auon"] = "auon"
    """Momentum over its norm, then Newton–Schulz."""
    form: Literal["hybrid"] = "hybrid"
    """hybrid; the others orthogonalise nothing and have fewer settings."""
    ns_steps: int | None = 1
    """Newton–Schulz iterations; the authors' code takes five."""


@dataclass(frozen=True)
class BlockMuonConfig(MuonConfig):
    """BlockMuon: each device orthogonalises its own shard; never communicates (MuonBP with period ∞)."""

    name: Literal["block_muon"] = "block_muon"
    """Shards orthogonalised, never the whole matrix."""
    block_grid: int | tuple[int, int] | None = None
    """Blocks as a grid of rows (and columns) independent of the rank count; null takes the shards."""


@dataclass(frozen=True)
class MuonBPConfig(_Periodic, BlockMuonConfig):
    """MuonBP: block steps, and the whole matrix every `period`-th step (arXiv 2510.16981)."""

    name: Literal["muon_bp"] = "muon_bp"
    """Shards, and the whole matrix every `period`-th step."""
    momentum_form: Literal["ema", "heavy_ball"] = "heavy_ball"
    period: Periods = 5
    """P: a full step every P-th. auto: the smallest within `period_budget`, measured once when the run begins.
    Or a schedule, [[0, 1], [1000, 3]]: each holds until the next step."""
    block_lr_ratio: Ratios = 1.0
    """Multiplies block steps, on top of RMS matching."""


@dataclass(frozen=True)
class PeriodicRowMuonConfig(_Periodic, MuonConfig):
    """Periodic Row-wise Muon: unit-row steps, a full refresh every `period`-th step (arXiv 2608.20818)."""

    name: Literal["periodic_row_muon"] = "periodic_row_muon"
    """Unit rows, and the whole matrix every `period`-th step."""
    period: Periods = 3
    """K: a full refresh every K-th. auto: the smallest within `period_budget`, measured once when the run begins.
    Or a schedule, [[0, 1], [1000, 3]]: each holds until the next step."""
    row_lr_ratio: Ratios = 1.0
    """Multiplies row steps, whose RMS otherwise equals that of a refresh."""


@dataclass(frozen=True)
class PeriodicSignMuonConfig(_Rest, _Periodic, _Neurons, _NewtonSchulz, _Scale, _Momentum):
    """Periodic sign steps (LionMuon): signs of a dual average, a refresh every `period`-th step (arXiv 2605.19811)."""

    name: Literal["periodic_sign_muon"] = "periodic_sign_muon"
    """Signs, and the whole matrix every `period`-th step."""
    momentum: float = 0.99
    """β₂, decay of the average."""
    input_momentum: float = 0.9
    """β₁, weight of the average in the step; not above momentum."""
    period: Periods = 2
    """P: a full refresh every P-th. auto: the smallest within `period_budget`, measured once when the run begins.
    Or a schedule, [[0, 1], [1000, 3]]: each holds until the next step."""
    sign_lr_ratio: Ratios = 0.25
    """Multiplies sign steps, whose RMS otherwise equals that of a refresh."""


OptimizerConfig = (
    AdamWConfig
    | MuonConfig
    | BlockMuonConfig
    | MuonBPConfig
    | PeriodicRowMuonConfig
    | PeriodicSignMuonConfig
    | RowMuonConfig
    | NorMuonConfig
    | MuonEqConfig
    | MarsMuonConfig
    | Muon8bitConfig
    | AdaGOConfig
    | DionConfig
    | Dion2Config
    | AuONConfig
    | AuONHybridConfig
    | ScionConfig
    | ScionOtherConfig
    | AdamW8bitConfig
    | MarsAdamWConfig
    | LionConfig
    | SGDConfig
)
"""The first is the default. Of those that share a name, `form` or `ball` tells."""
