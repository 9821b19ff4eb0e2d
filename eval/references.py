"""The real images that generated ones are held against, as features."""

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eval.extractors import FeatureExtractor
from eval.statistics import GaussianStats


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

    @classmethod
    def of(cls, images: Tensor, extractor: FeatureExtractor, batch_size: int, name: str) -> "Reference":
        """Reference of uint8 images [n, C, H, W]; every rank computes the whole, so no rank waits for another.

        ``name`` says which images they are, e.g. ``"digits held out"``.
        """
        features = torch.cat([extractor(batch).cpu() for batch in images.split(batch_size)])
        digest = hashlib.sha256(images.cpu().contiguous().numpy().tobytes()).hexdigest()
        return cls(name, features, extractor.name, extractor.weights_sha256, digest, tuple(images.shape[1:]))

    def __len__(self) -> int:
        return len(self.features)

    @property
    def stats(self) -> GaussianStats:
        """Mean and covariance of the features."""
        stats = GaussianStats(self.features.shape[1])
        stats.update(self.features)
        return stats
