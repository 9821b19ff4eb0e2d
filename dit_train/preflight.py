"""Everything about a run that can be refused before a rank starts; nothing on disk is changed."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dit_train import overlays
from dit_train.checkpoint import listing
from dit_train.checkpoint.listing import Checkpoint
from dit_train.config import Config, ConfigError
from dit_train.data import sources
from dit_train.data.latents import NO_VAE
from dit_train.model.sizes import check_model, divisors_around, mlp_width
from dit_train.run import folder

_FIXED = (
    *("model", "data", "objective.timesteps", "train.seed", "train.batch"),
    *("optimizer.name", "optimizer.form", "optimizer.ball", "optimizer.momentum_dtype", "optimizer.mars_exact"),
)
_KEEP_STATE = {
    "optimizer.mars_gamma": (0.0, "whether it is above 0, and the last gradient kept"),
    "optimizer.neuron_beta2": (None, "whether it is set, and a mean of each row kept"),
}
"""Settings that may change, but not from or to a value without the state that the others have."""


@dataclass(frozen=True)
class Plan:
    """A run that may start."""

    config: Config
    fixed: dict[str, Any]
    """Settings that a later resume may not change, by dotted name."""
    resume: Checkpoint | None
    """Where it goes on from."""

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        state = self.resume.state if self.resume else None
        return state is not None and state.step >= self.config.train.steps and state.evaluated


def default_extractor(source: str) -> str:
    """The encoder that suits a data source: a classifier of the same images, or an ImageNet encoder."""
    return {"digits": "digits-cnn", "fashion_mnist": "fashion-mnist-cnn"}.get(source, "efficientnet-lite0")


def check(config: Config, ranks: int) -> Plan:
    """A plan for `ranks` ranks.

    Raises:
        ConfigError: batch and ranks do not divide, data or weights are missing, the model's settings contradict each
            other, the run folder is somebody else's, its newest checkpoint is damaged or of another model.
    """
    check_batch(config, ranks // check_parallel(config, ranks))
    try:
        images = sources.check(config.data)
    except MemoryError:
        raise ConfigError("data: too many images for the memory of this host; lower data.count") from None
    check_model(config.model, images.image_size)
    folder.check(config.run.folder)
    fixed = _fixed_settings(config, images)
    latest = listing.find_latest(config.run.folder)
    if latest is not None:
        _check_unchanged(latest, fixed)
    else:
        _check_history(config)
    plan = Plan(config, fixed, latest)
    if not plan.finished:  # a finished run answers at once: what follows imports torch
        _check_score(config, images)
        _check_devices(config, ranks)
        _check_optimizer(config, images)
    return plan


def check_parallel(config: Config, ranks: int) -> int:
    """How many ranks see the same images.

    Raises:
        ConfigError: `parallel` does not divide the ranks, or the model over them.
    """
    parallel, model = config.parallel, config.model
    for name, least in (("replicas", 1), ("tensor", 1), ("prefetch", 0)):
        if getattr(parallel, name) < least:
            raise ConfigError(f"parallel.{name}: must be at least {least}, not {getattr(parallel, name)}")
    if ranks % (parallel.replicas * parallel.tensor):
        raise ConfigError(
            f"parallel: {parallel.replicas} replicas x {parallel.tensor} tensor ranks do not divide {ranks} ranks; "
            "change parallel.replicas, parallel.tensor or the number of ranks"
        )
    hidden = mlp_width(model)
    for what, number in (("model.heads", model.heads), ("the hidden width of the MLP", hidden)):
        if number % parallel.tensor:
            raise ConfigError(f"parallel.tensor: {parallel.tensor} does not divide {what}, {number}")
    return parallel.tensor


def check_batch(config: Config, ranks: int) -> None:
    """Raise `ConfigError` where the batch does not divide over `ranks` ranks that see different images."""
    batch, micro = config.train.batch, config.train.micro_batch
    if batch % ranks:
        near = sorted(set(divisors_around(batch, ranks)))
        fits = " or ".join(str(n * config.parallel.tensor) for n in near)
        sharing = " that see different ones" if config.parallel.tensor > 1 else ""
        fix = f"use {fits} ranks, or a batch of {batch // ranks * ranks or ranks} or {(batch // ranks + 1) * ranks}"
        raise ConfigError(f"train.batch: {batch} images do not divide over {ranks} ranks{sharing}; {fix}")
    if micro is not None and (batch // ranks) % micro:
        nearest = min(divisors_around(batch // ranks, micro), key=lambda n: abs(n - micro))
        raise ConfigError(
            f"train.micro_batch: {micro} does not divide a rank's share of {batch // ranks} images; use {nearest}"
        )


def _check_score(config: Config, images: sources.Summary) -> None:
    settings = config.score
    if not settings.every:
        return
    held, trained = images.heldout_count, images.train_count
    count = settings.count or min(held, trained)
    if min(held, trained) < 4:
        raise ConfigError(
            f"score.every: a score needs 4 held-out images, but there are {held} (and {trained} to train on); add "
            "images or set it to 0"
        )
    if not 4 <= count <= min(held, trained):
        raise ConfigError(
            f"score.count: {count} images cannot be scored against {held} held-out and {trained} training ones; "
            f"use 4 to {min(held, trained)}, or score.every 0"
        )
    if images.encoding is not None and config.data.vae is None:
        raise ConfigError(f"{NO_VAE}, or set score.every 0")
    import torch

    from eval import extractors

    channels, side, _ = images.image_shape
    side = min(side, 1024)  # what fails for a larger one fails for this
    blank = torch.zeros((1, channels, side, side), dtype=torch.uint8)
    try:
        extractors.load(settings.extractor or default_extractor(config.data.source), settings.weights)(blank)
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(f"score.extractor: {str(error).replace('weights=', '--score.weights ')}") from None


def _check_devices(config: Config, ranks: int) -> None:
    import torch

    from dit_train.parallel.mesh import choose_device_type

    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if choose_device_type(config.parallel) == "cuda" and local > torch.cuda.device_count():
        raise ConfigError(f"{local} ranks on this host, but {torch.cuda.device_count()} GPUs; start one rank a GPU")


def _check_optimizer(config: Config, images: sources.Summary) -> None:
    """Build the optimizer for a model without memory, whose options it then checks itself."""
    import torch

    from dit_train.model.dit import DiT
    from dit_train.run import optimizer

    with torch.device("meta"):
        shape = {"channels": images.channels, "image_size": images.image_size, "num_classes": images.num_classes}
        try:
            model = DiT(config.model, **shape)
        except (TypeError, RuntimeError) as error:
            raise ConfigError(f"model: too large to be built ({str(error).splitlines()[0][:80]})") from None
        try:
            optimizer.build(optimizer.with_period(config.optimizer, 1), model)  # any: what is refused is not it
        except ValueError as error:
            raise ConfigError(f"optimizer: {error}") from None


def _check_history(config: Config) -> None:
    """Refuse to begin anew, which would drop the metrics, where checkpoints should be and are not.

    A run makes the folder before its first step: if that is gone, so are checkpoints. An empty one is another thing:
    the first saves failed or were cut off.
    """
    rows = _last_step(Path(config.run.folder) / "metrics.jsonl")
    if rows and not listing.folder_of(config.run.folder).is_dir():
        raise ConfigError(
            f"run.folder: metrics.jsonl reaches step {rows}, but {listing.folder_of(config.run.folder)} has no "
            "checkpoint; put it back, or name another run.folder"
        )


def _last_step(path: Path) -> int:
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    found = [int(step) for line in lines for step in re.findall(r'^{"step": (\d+),', line)]
    return max(found, default=0)


def _fixed_settings(config: Config, images: sources.Summary) -> dict[str, Any]:
    """What a resume may not change, and what it resolves to: the same folder may hold other images by then."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(f"{prefix}.{key}" if prefix else key, item)
        elif any(prefix == name or prefix.startswith(f"{name}.") for name in _FIXED):
            flat[prefix] = value
        elif prefix in _KEEP_STATE:
            flat[f"{prefix} ({_KEEP_STATE[prefix][1]})"] = value != _KEEP_STATE[prefix][0]

    walk("", overlays.to_dict(config))
    for name in ("path", "vae", "images"):
        del flat[f"data.{name}"]  # the same images may have moved
    del flat["data.unreadable"]  # what to do about them may be decided when the first is met
    found: dict[str, Any] = {key: getattr(images, key) for key in ("num_classes", "train_count", "heldout_count")}
    if images.encoding is not None:
        found["encoding"] = images.encoding.settings_sha256
    return flat | {f"data ({key})": value for key, value in found.items()}


def _check_unchanged(latest: Checkpoint, fixed: dict[str, Any]) -> None:
    for name, value in fixed.items():
        before = latest.fixed.get(name, value)
        if before != value:
            raise ConfigError(
                f"{name}: {value!r}, but {latest.folder} was trained with {before!r}; "
                "keep that value or name another run.folder"
            )
