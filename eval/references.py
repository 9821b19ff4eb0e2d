"""The real images that generated ones are held against, as features."""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from eval.extractors import FeatureExtractor
from eval.statistics import GaussianStats, fp64_device


@dataclass(frozen=True)
class Reference:
    """Features of n real held-out images and the extractor that made them.

    Held out, because a model that memorises comes closer to its training images than fresh real images do.
    """

    name: str
    features: Tensor = field(repr=False)  # fp32 [n, d] on the CPU
    extractor: str
    weights_sha256: str
    images_sha256: str
    image_shape: tuple[int, int, int]  # C, H, W
    device: str | torch.device = "cpu"  # where ``stats`` lie

    @classmethod
    def of(cls, images: Tensor, extractor: FeatureExtractor, batch_size: int, name: str) -> "Reference":
        """Reference of uint8 images [n, C, H, W]; every rank computes the whole, so no rank waits for another.

        ``name`` says which images they are, e.g. ``"digits held out"``.

        Raises:
            TypeError: images are not uint8.
            ValueError: images have not the shape that the extractor takes, or hold 0..1 instead of 0..255.
        """
        check_range(images, name)
        features = torch.cat([extractor(batch).cpu() for batch in images.split(batch_size)])
        digest = hashlib.sha256(images.cpu().contiguous().numpy().tobytes()).hexdigest()
        shape, device = tuple(images.shape[1:]), fp64_device(extractor.device)
        return cls(name, features, extractor.name, extractor.weights_sha256, digest, shape, device)

    def __len__(self) -> int:
        return len(self.features)

    @cached_property
    def stats(self) -> GaussianStats:
        """Mean and covariance of the features, summed once on ``device``; not to be added to."""
        stats = GaussianStats(self.features.shape[1], self.device)
        stats.update(self.features)
        return stats


def check_range(images: Tensor, name: str) -> None:
    """Raise ValueError where a whole set of real uint8 images holds nothing brighter than 1: it was cast from 0..1.

    For images that a user supplies, not for generated ones: those of a collapsed model can be as dark.
    """
    if images.dtype == torch.uint8 and images.numel() and images.max() == 1:
        raise ValueError(f"{name}: the brightest pixel is 1, but uint8 images must span 0..255, not 0..1")
