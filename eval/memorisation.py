"""Do generated images repeat training images? Nearest neighbours in feature space, and exact copies."""

import hashlib
import math
from typing import NamedTuple

import torch
from torch import Tensor

from eval.distances import BLOCK, Cloud, clouds, nearest


class Memorisation(NamedTuple):
    """How near generated images come to training images, beside how near fresh real images come."""

    share_near: float  # of generated images within ``threshold`` of a training image; ``quantile`` is usual
    threshold: float  # within which that share of the held-out images lies
    auth_pct: float  # 0..100
    generated: list[int]  # rows of the most suspicious images, worst first
    training: list[int]  # their nearest training images
    distances: list[float]  # between the two
    ratios: list[float]  # that over the training image's distance to its own nearest neighbour


def memorisation(
    generated: Tensor, training: Tensor, held_out: Tensor, quantile: float = 0.05, worst: int = 20, block: int = BLOCK
) -> Memorisation:
    """Compare each generated image's distance to its nearest training image with what is usual among real images.

    * ``share_near``: against held-out real images, of which the share ``quantile`` is as near by definition. More
      than that is memorising, or a model that makes only simple images, which lie close together.
    * ``auth_pct``: per cent of generated images that are *authentic* (Alaa et al. 2022): farther from their nearest
      training image than that one is from its own nearest in the training set. Fresh real images have about 50.

    The most suspicious pairs are those of smallest ratio of these two distances, since among simple images small
    distances are no wonder.

    Args:
        generated: [g, d], any float dtype; computed in fp64 where they lie.
        training: [n, d], n at least 2: the images that the model was trained on.
        held_out: [h, d]: real images of the same distribution that it was not.
        quantile: between 0 and 1.
        worst: how many pairs to return.
        block: rows held in fp64 at once; changes time and memory, not the result.

    Raises:
        ValueError: ``quantile`` out of range, fewer than 2 training images, other shapes, or values not finite.
    """
    if not 0 < quantile < 1:
        raise ValueError(f"quantile must lie between 0 and 1, not {quantile}")
    (made, trained, fresh), margin = clouds(generated, training, held_out, block=block)
    if len(trained) < 2:
        raise ValueError("the training set has 1 image, which has no neighbour")
    squared, rows = (found[:, 0] for found in nearest(made, trained))
    usual = _distances_of_neighbours(trained, rows)
    threshold = nearest(fresh, trained)[0][:, 0].sort().values[math.ceil(quantile * len(fresh)) - 1]
    ratios = torch.where(
        squared <= margin, 0.0, (squared / usual.clamp(min=margin)).sqrt()
    )  # a copy of a duplicate: 0/0 is 0
    order = ratios.argsort(stable=True)[:worst]
    return Memorisation(
        share_near=(squared <= threshold + margin).double().mean().item(),
        threshold=threshold.sqrt().item(),
        auth_pct=100 * (squared > usual + margin).double().mean().item(),
        generated=order.tolist(),
        training=rows[order].tolist(),
        distances=squared[order].sqrt().tolist(),
        ratios=ratios[order].tolist(),
    )


def _distances_of_neighbours(cloud: Cloud, rows: Tensor) -> Tensor:
    """Squared distance [m] of each vector ``rows`` int64 [m] of the cloud to its nearest other; each is sought once."""
    chosen, back = rows.unique(return_inverse=True)
    return nearest(cloud.rows(chosen.to(cloud.features.device)), cloud, own=chosen)[0][:, 0][back]


def pixel_hashes(images: Tensor) -> list[bytes]:
    """SHA-256 of the pixels and shape of each of uint8 images [N, C, H, W]; 32 bytes an image, for sets of any size.

    Raises:
        TypeError: the images are not uint8.
        ValueError: they are no batch.
    """
    if images.dtype != torch.uint8:
        raise TypeError(f"images must be uint8, not {images.dtype}; see eval.generate.quantize")
    if images.ndim != 4:
        raise ValueError(f"images must be [N, C, H, W], not {list(images.shape)}")
    shape = str(tuple(images.shape[1:])).encode()
    return [hashlib.sha256(shape + image.numpy().tobytes()).digest() for image in images.cpu().contiguous()]


def exact_copies(generated: list[bytes], training: list[bytes]) -> list[tuple[int, int]]:
    """(generated image, first training image with the same hash), for each generated image that is a copy."""
    first: dict[bytes, int] = {}
    for row, digest in enumerate(training):
        first.setdefault(digest, row)
    return [(row, first[digest]) for row, digest in enumerate(generated) if digest in first]
