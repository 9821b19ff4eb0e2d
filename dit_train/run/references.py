"""The real images that a run's samples are held against: held-out ones of its own data, with a floor."""

from __future__ import annotations

import statistics

import numpy as np
import torch

import eval.score
from dit_train import rng
from dit_train.config import ConfigError
from dit_train.data.sources import Dataset, Source
from eval.extractors import FeatureExtractor
from eval.features import Features, of_images
from eval.generate import generate
from eval.ranks import gather, raise_together

LARGEST_DEFAULT_COUNT = 10_000
"""Images compared where no count is given and more are held out."""
_AT_ONCE = 16
"""Images that a rank reads at once: those of latents are decoded together, alike for any number of ranks."""
FLOOR_DRAWS = 5
"""Draws of training images that the floor is the mean of, where they are few."""


def held_out(data: Dataset, extractor: FeatureExtractor, batch: int, count: int | None = None) -> Features:
    """Features of ``count`` held-out images, always the same, with their classes and the floor in ``meta``.

    The floor is what a perfect model would get: the mean score of several draws of training images, since one draw of
    few hundred is off by a third. Every rank calls it; ranks share the work.

    Raises:
        ValueError: as `eval.score.score`, for example for fewer than 4 images.
    """
    count = count or min(len(data.heldout), len(data.train), LARGEST_DEFAULT_COUNT)
    real = _draw(data.heldout, count, "score-heldout")
    images, labels = read_together(data.heldout, real), data.heldout.labels(real)
    reference = of_images(images, extractor, batch, f"{data.image_name} held out", labels)
    reference.meta |= _floor(data, reference, extractor, batch)
    return reference


def _floor(data: Dataset, reference: Features, extractor: FeatureExtractor, batch: int) -> dict[str, float]:
    """Classes are those of the reference, as the samples' are: else class counts alone would set them apart."""
    draws = FLOOR_DRAWS if len(reference) <= 1000 else 1
    records = []
    for draw in range(draws):
        images = read_together(data.train, draw_like(reference.labels, data.train, f"score-floor-{draw}"))
        records.append(eval.score.floor(images, reference, extractor, batch))
    return {
        "floor": statistics.fmean(record["value"] for record in records),
        "floor_kid": statistics.fmean(record["kid"] for record in records),
        "floor_draws": draws,
    }


def read_together(source: Source, indices: np.ndarray) -> torch.Tensor:
    """Images of ``indices``, uint8 [N, C, H, W] on every rank, of which each reads or decodes a share.

    Raises:
        ConfigError: one cannot be read; on every rank.
    """
    shape = source.images(indices[:1]).shape[1:]
    pixels, where, error = [torch.empty((0, *shape), dtype=torch.uint8)], [torch.empty(0, dtype=torch.int64)], None
    try:
        for chosen, images in generate(
            lambda i: source.images(indices[i.numpy()]), torch.arange(len(indices)), _AT_ONCE
        ):
            pixels.append(images)
            where.append(chosen)
    except ConfigError as problem:
        error = problem
    try:
        raise_together(error)
    except ValueError as problem:
        raise ConfigError(str(problem)) from None
    return gather(torch.cat(pixels).flatten(1), torch.cat(where))[0].view(-1, *shape)


def _draw(source: Source, count: int, purpose: str) -> np.ndarray:
    """`count` indices of a source, always the same, in rising order."""
    return np.sort(rng.stream(0, purpose).permutation(len(source))[:count])


def draw_like(labels: torch.Tensor, source: Source, purpose: str) -> np.ndarray:
    """As many indices of a source, with the same classes as far as it has them, always the same, in rising order.

    Args:
        labels: int64 [n], the classes to meet.
        source: at least n images.
        purpose: names the draw.
    """
    order = rng.stream(0, purpose).permutation(len(source))
    classes = source.labels(order).numpy()
    wanted = np.bincount(labels.numpy(), minlength=classes.max() + 1)
    chosen = [order[classes == label][:count] for label, count in enumerate(wanted)]
    picked = np.concatenate(chosen)
    spare = order[~np.isin(order, picked)]  # for classes of which there are too few
    return np.sort(np.concatenate([picked, spare[: len(labels) - len(picked)]]))
