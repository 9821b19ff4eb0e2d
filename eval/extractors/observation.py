"""What one look at a batch of images gives."""

from typing import NamedTuple

from torch import Tensor


class Observation(NamedTuple):
    """All that one forward pass gives, fp32 on the extractor's device; ``None`` where the network has no such thing.

    Attributes:
        features: [N, d], for Fréchet distance, KID, precision and recall.
        spatial: [N, 2023], features that keep their place in the image, for sFID; the FID network alone has them.
        logits: [N, C], class scores, for the Inception Score. Those of the FID network leave out the bias, as every
            published Inception Score does; other classifiers give theirs with the bias they were trained with, and a
            score made of them lies on a scale of its own: call it ``IS-<extractor>``, never Inception Score.
    """

    features: Tensor
    spatial: Tensor | None = None
    logits: Tensor | None = None
