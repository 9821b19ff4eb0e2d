"""Everything about a run that can be refused before a rank starts; nothing on disk is changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dit_train import overlays
from dit_train.config import Config, ConfigError
from dit_train.data import sources
from dit_train.model.sizes import check_model
from dit_train.run import checkpoint
from dit_train.run.checkpoint import Checkpoint

_FIXED = ("model", "data", "objective.timesteps", "train.seed", "train.batch", "optimizer.name")


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
        return self.resume is not None and self.resume.state.step >= self.config.train.steps


def check(config: Config, ranks: int) -> Plan:
    """A plan for `ranks` ranks.

    Raises:
        ConfigError: batch and ranks do not divide, data or weights are missing, the model's settings contradict each
            other, the run folder is somebody else's, its newest checkpoint is damaged or of another model.
    """
    _check_batch(config, ranks)
    images = sources.check(config.data)
    check_model(config.model, images.image_size)
    _check_score(config, images)
    _check_folder(Path(config.run.folder))
    fixed = _fixed_settings(config)
    latest = checkpoint.find_latest(config.run.folder)
    if latest is not None:
        _check_unchanged(latest, fixed)
    return Plan(config, fixed, latest)


def _check_batch(config: Config, ranks: int) -> None:
    batch, micro = config.train.batch, config.train.micro_batch
    if batch % ranks:
        near = [n for n in range(1, batch + 1) if batch % n == 0]
        below, above = max(n for n in near if n < ranks or n == 1), [n for n in near if n > ranks]
        fits = " or ".join(str(n) for n in [below, *above[:1]])
        fix = f"use {fits} ranks, or a batch of {batch // ranks * ranks or ranks} or {(batch // ranks + 1) * ranks}"
        raise ConfigError(f"train.batch: {batch} images do not divide over {ranks} ranks; {fix}")
    if micro is not None and (batch // ranks) % micro:
        divisors = [n for n in range(1, batch // ranks + 1) if (batch // ranks) % n == 0]
        nearest = min(divisors, key=lambda n: abs(n - micro))
        raise ConfigError(
            f"train.micro_batch: {micro} does not divide a rank's share of {batch // ranks} images; use {nearest}"
        )


def _check_score(config: Config, images: sources.Summary) -> None:
    settings = config.score
    if not settings.every:
        return
    held, trained = images.heldout_count, images.train_count
    if settings.count is not None and settings.count > min(held, trained):
        raise ConfigError(
            f"score.count: {settings.count}, but the data has {held} held-out and {trained} training images; "
            f"use {min(held, trained)} at most"
        )
    if settings.extractor is not None:
        from eval import extractors  # imports torch

        try:
            extractors.load(settings.extractor, settings.weights)
        except (ValueError, OSError) as error:
            raise ConfigError(f"score.extractor: {error}") from None


def _check_folder(folder: Path) -> None:
    if folder.is_file():
        raise ConfigError(f"run.folder: {folder} is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "config.yaml").is_file():
        raise ConfigError(f"run.folder: {folder} holds other files; name a new or empty folder")


def _fixed_settings(config: Config) -> dict[str, Any]:
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(f"{prefix}.{key}" if prefix else key, item)
        elif any(prefix == name or prefix.startswith(f"{name}.") for name in _FIXED):
            flat[prefix] = value

    walk("", overlays.to_dict(config))
    del flat["data.path"]  # the same images may have moved
    return flat


def _check_unchanged(latest: Checkpoint, fixed: dict[str, Any]) -> None:
    for name, value in fixed.items():
        before = latest.fixed.get(name, value)
        if before != value:
            raise ConfigError(
                f"{name}: {value!r}, but {latest.folder} was trained with {before!r}; "
                "keep that value or name another run.folder"
            )
