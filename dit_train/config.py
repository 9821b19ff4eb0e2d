"""Every setting of a run, its default and its meaning: one frozen dataclass a section (`overlays` reads them).

Those of the optimizers are in `optimizer_config`. This module imports nothing heavy, so that ``--help`` and a refused
config are instant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dit_train.optimizer_config import AdamWConfig, OptimizerConfig

MOST_PROFILED_STEPS = 20
"""A trace grows by megabytes a step."""


class ConfigError(ValueError):
    """A setting, or something that a setting names, is wrong; the message is one line that says what would be right."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))  # a name or a value in it may have line breaks


@dataclass(frozen=True)
class ModelConfig:
    """The Diffusion Transformer (Peebles & Xie, arXiv 2212.09748)."""

    width: int = 384
    """Size d of a token."""
    depth: int = 12
    """Number L of blocks."""
    heads: int = 6
    """Attention heads; must divide the width."""
    patch: int = 2
    """Side of a square patch in pixels (or latent cells)."""
    mlp_ratio: float = 4.0
    """Hidden size of the MLP over the width (SwiGLU takes two thirds of it, so that the count stays)."""
    qk_norm: bool = False
    """RMS-normalise queries and keys per head."""
    swiglu: bool = False
    """SwiGLU in place of GELU in the MLP."""
    adaln: Literal["zero", "noshift", "lora", "single"] = "zero"
    """How a block is modulated: by a matrix of its own (zero, as published), the same without shifts, or by one matrix
    for all blocks, to which each adds one of low rank (lora) or a table (single, arXiv 2310.00426)."""
    adaln_rank: int = 256
    """lora: rank of what a block adds."""
    position: Literal["sincos", "rope"] = "sincos"
    """Fixed 2-D sine-cosine table added to the tokens, or 2-D rotary embedding of queries and keys."""
    learn_sigma: bool = False
    """A second set of output channels, as in the original DiT; the rectified-flow loss leaves them out."""
    label_dropout: float = 0.1
    """Share of samples whose label is replaced by the null class, for classifier-free guidance."""


@dataclass(frozen=True)
class DataConfig:
    """The images."""

    source: Literal["digits", "fashion_mnist", "image_folder", "latents", "synthetic"] = "digits"
    """digits: 8x8 grey, inside the package. fashion_mnist: gzip IDX files under `path`. image_folder: `path` with one
    folder a class. latents: `path` as scripts/encode_latents.py wrote it. synthetic: coloured blobs, any size."""
    path: str | None = None
    """Folder of fashion_mnist (default /usr/share/datasets/fashion-mnist), image_folder or latents."""
    vae: str | None = None
    """latents: folder of the autoencoder (diffusers AutoencoderKL) that decodes them, for scores and grids."""
    images: str | None = None
    """latents: the image folder that was encoded, to score against its held-out images; null: against the decoded means
    of the held-out latents."""
    image_size: int | None = None
    """Side in pixels; image_folder crops and resizes to it, synthetic draws it, the others have their own."""
    heldout_every: int = 5
    """image_folder, latents and synthetic: of each class every n-th image (in name order) is held out for scoring."""
    classes: int = 10
    """synthetic: number of classes."""
    count: int = 2000
    """synthetic: number of images."""
    unreadable: Literal["stop", "replace"] = "stop"
    """image_folder: an image that cannot be decoded ends the run (code 2), or another of its class takes its place."""


@dataclass(frozen=True)
class ObjectiveConfig:
    """Rectified flow: x_t = (1 − t)·x0 + t·noise, the model predicts noise − x0 (arXiv 2209.03003)."""

    timesteps: Literal["logit_normal", "uniform"] = "logit_normal"
    """Law of t; both are stratified over the global batch."""
    logit_mean: float = 0.0
    """Mean of logit t."""
    logit_std: float = 1.0
    """Standard deviation of logit t."""


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over steps, as a factor of the optimizer's."""

    kind: Literal["cosine", "constant"] = "cosine"
    """Shape after the warm-up."""
    warmup_steps: int = 50
    """Linear warm-up."""
    final_fraction: float = 0.1
    """cosine: factor at the last step."""


@dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    steps: int = 500
    """Optimizer steps."""
    batch: int = 128
    """Global batch in images; must be divisible by the number of ranks (and by ranks x micro_batch)."""
    micro_batch: int | None = None
    """Images a rank takes at once; the rest of its share is accumulated. null: the whole share."""
    seed: int = 0
    """Fixes initial weights, data order, noise, timesteps and label dropout for any number of ranks."""
    compute_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of forward and backward; auto measures a few steps of each and takes the faster."""
    clip_norm: float | None = 1.0
    """Largest global gradient norm; null: no clipping."""
    ema_decay: float = 0.9999
    """Decay a step of the averaged weights that are sampled and scored."""
    ema_ramp: bool = True
    """Lower the decay of early steps t to (1 + t) / (10 + t), so that a short run is not scored on initial weights."""
    deterministic: bool = False
    """Repeat bit for bit on the same machine and number of ranks, with slower kernels where those are needed."""


@dataclass(frozen=True)
class FaultsConfig:
    """Steps that go wrong; updates whose loss or gradient is not finite are always left out."""

    spike_sigmas: float | None = 6.0
    """Leave out an update whose loss or gradient norm lies so many standard deviations above the mean; null: never."""
    window: int = 128
    """Last steps that mean and deviation are taken over; nothing is a spike before half of them."""
    stop_after: int = 25
    """Updates left out in a row after which the run saves and ends with code 1."""


@dataclass(frozen=True)
class ParallelConfig:
    """Devices."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA with NCCL where there is a GPU, else CPU with gloo."""
    replicas: int = 1
    """HSDP: copies of the model; each is sharded over ranks / replicas / tensor of them."""
    tensor: int = 1
    """Tensor parallelism: ranks that share the matrices of attention and MLP, and see the same images."""
    reshard_after_forward: bool = True
    """FSDP2: free a block's gathered weights after its forward (ZeRO-3) or keep them to the backward (ZeRO-2)."""
    prefetch: int = 1
    """Blocks whose weights are gathered ahead of the one that computes; 0: none, but FSDP2 does one in the backward."""
    sync_every_micro_batch: bool = True
    """Reduce gradients after each micro-batch; false saves communication and holds whole gradients."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute a block's activations in the backward: all, or all but those of matrix products and attention."""
    compile: bool = False
    """Compile each block by torch.compile; all blocks share one graph."""
    compile_backend: str = "inductor"
    """torch.compile backend; aot_eager checks graphs without the minute that inductor takes on a CPU."""


@dataclass(frozen=True)
class SampleConfig:
    """How images are generated, for grids and for the score."""

    sampler: Literal["euler", "heun"] = "heun"
    """Integrator of the probability-flow ODE from t=1 to t=0."""
    steps: int = 12
    """Intervals (heun evaluates the model twice in all but the last)."""
    guidance: float = 1.0
    """Classifier-free guidance scale; 1 is the conditional model alone."""
    batch: int = 128
    """Images generated at once by a rank."""
    grid: int = 8
    """Side of a sample grid in images; 0: no grids."""
    seed: int = 1
    """Fixes the noise of sample i, for any number of ranks."""


@dataclass(frozen=True)
class ScoreConfig:
    """Fréchet distance and KID of generated images against held-out ones, at equal n, beside a floor."""

    every: int = 0
    """Score every so many steps and at the last; 0: never."""
    count: int | None = None
    """Images generated; null: as many as are held out (10,000 at most)."""
    extractor: str | None = None
    """digits-cnn, fashion-mnist-cnn, efficientnet-lite0 or inception-2015-12-05; null: what suits the data."""
    weights: str | None = None
    """Weights file of an extractor that has none inside the package."""


@dataclass(frozen=True)
class RunConfig:
    """The run folder and what is written to it."""

    folder: str = "runs/dit"
    """Where everything goes; the same command goes on from its last checkpoint."""
    log_every: int = 10
    """Steps between lines on the terminal (metrics.jsonl has every step)."""
    norms_every: int = 10
    """Steps between norms of gradients, weights and updates, for which this rank's weights are copied; 0: never."""
    profile: tuple[int, int] | None = None
    """Record steps with torch.profiler: the first, and how many (20 at most); null: when a file RUN/profile asks."""
    validate_every: int = 100
    """Steps between held-out losses, and at the last; 0: never."""
    validate_count: int = 1000
    """Held-out images, a fixed draw, that the held-out loss is taken on (all if there are fewer)."""
    sample_every: int = 0
    """Steps between sample grids (there is always one at the end); 0: only at the end."""
    checkpoint_every: int = 500
    """Steps between checkpoints, and at the last."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept."""
    keep_every: int = 0
    """Keep, for good, those of steps that this divides as well; 0: none."""
    async_checkpoint: bool = True
    """Write checkpoints beside the steps, from a copy in host memory as large as this rank's share of weights, average
    and momentum; false: between the steps, without the copy."""
    verify_checkpoint: bool = True
    """Before going on, read the newest checkpoint's files once more to compare them with their SHA-256."""
    tensorboard: bool = True
    """Write tensorboard/ beside metrics.jsonl."""
    time_limit: float | None = None
    """Seconds, or H:MM:SS, from the start of the command to its end; it saves and stops in time (code 85)."""
    stall_seconds: float = 300.0
    """Seconds without a step, a batch of an evaluation or a save after which stacks go to stalls/; 0: never."""
    stall_ends_run: bool = False
    """End the run then, with code 1."""
    silence_seconds: float = 120.0
    """Seconds without a sign of life from a rank, as when its host is cut off, after which those that wait for it end,
    with code 1; 0: never. A link that is back sooner costs nothing but the time."""


@dataclass(frozen=True)
class Config:
    """A whole run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=AdamWConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)
    run: RunConfig = field(default_factory=RunConfig)
