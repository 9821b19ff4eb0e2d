"""Inception Score (Salimans et al. 2016): are images of clear classes, and are the classes many?"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from eval.ranks import communication_device, world
from eval.statistics import fp64_device

ROWS = 4096  # rows in fp64 at once


class InceptionScore(NamedTuple):
    """Mean and standard deviation (divisor: number of splits) over the splits."""

    mean: float
    std: float


def inception_score(
    logits: Tensor, splits: int = 10, split_size: int | None = None, seed: int | None = None
) -> InceptionScore:
    """exp of the mutual information of image and class, between 1 and the number of classes, per split of the images.

    ADM takes splits of 5000 in the order of the file (``split_size=5000``), torch-fidelity and others 10 splits, some
    after a shuffle. The score grows with the number of images in a split, so the split belongs to the number's name.

    Args:
        logits: [n, C] class scores before the softmax; of the FID network those without its bias, C = 1008.
        splits: how many, in the order of the rows; they differ by at most one row.
        split_size: rows of a split instead; the last one may have fewer.
        seed: None leaves the order as it is; a number shuffles it first, with a generator of its own.

    Raises:
        ValueError: fewer images than splits, another shape, values that are not finite, or probabilities.
    """
    _check(logits)
    n = len(logits)
    if (split_size is None and not 1 <= splits <= n) or (split_size is not None and split_size < 1):
        raise ValueError(f"{n} images cannot be divided into {splits} splits (split_size={split_size})")
    order = torch.arange(n) if seed is None else torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    sums = InceptionSums(logits.shape[1], n, splits, split_size, logits.device)
    for rows, positions in zip(order.split(ROWS), torch.arange(n).split(ROWS), strict=True):
        sums.update(positions, logits[rows.to(logits.device)])
    return sums.score()


class InceptionSums:
    """The same from sums that do not grow with the number of images and can be pooled over ranks.

    With P the sum of the class probabilities of a split's n images and H that of Σ p log p, the split scores
    exp(H / n - Σ (P/n) log (P/n)).

    Args:
        num_classes: C.
        count: all images.
        splits: split k takes the images at positions ⌊k · count / splits⌋ … ⌊(k + 1) · count / splits⌋ - 1.
        split_size: images of a split instead.
        device: where the fp64 sums lie, or the CPU where it has no fp64.

    Raises:
        ValueError: fewer images than splits.
    """

    def __init__(
        self,
        num_classes: int,
        count: int,
        splits: int,
        split_size: int | None = None,
        device: str | torch.device = "cpu",
    ):
        if split_size is None and not 1 <= splits <= count:
            raise ValueError(f"{count} images cannot be divided into {splits} splits")
        even = [i * count // splits for i in range(1, splits)]
        bounds = even if split_size is None else [*range(split_size, count, split_size)]
        self._bounds = torch.tensor(bounds, dtype=torch.int64)
        self.splits = len(self._bounds) + 1
        device = fp64_device(device)
        self._sums = torch.zeros(self.splits, num_classes + 2, dtype=torch.float64, device=device)  # P, H, n

    def update(self, positions: Tensor, logits: Tensor) -> None:
        """Add images at ``positions`` int64 [N] of the whole list with ``logits`` [N, C] of any float dtype."""
        log_p = logits.to(self._sums.device).double().log_softmax(1)
        p = log_p.exp()
        rows = torch.cat((p, (p * log_p).sum(1, keepdim=True), torch.ones_like(p[:, :1])), 1)
        split = torch.bucketize(positions.cpu(), self._bounds, right=True)
        self._sums.index_add_(0, split.to(self._sums.device), rows)

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> None:
        """Replace the sums by those over all ranks of ``group``; once, on every rank."""
        if world(group)[1] > 1:
            packed = self._sums.to(communication_device(group))
            dist.all_reduce(packed, group=group)
            self._sums = packed.to(self._sums.device)

    def score(self) -> InceptionScore:
        """Mean and standard deviation over the splits, once all images were added."""
        total, negative_entropy, n = self._sums[:, :-2], self._sums[:, -2], self._sums[:, -1]
        marginal = total / n[:, None]
        scores = (negative_entropy / n - torch.xlogy(marginal, marginal).sum(1)).exp()
        return InceptionScore(scores.mean().item(), scores.std(correction=0).item())


def _check(logits: Tensor) -> None:
    if logits.ndim != 2 or not len(logits) or logits.shape[1] < 2:
        raise ValueError(f"logits must be [n, classes], not {list(logits.shape)}")
    if not torch.isfinite(logits).all():
        raise ValueError("logits hold NaN or infinity")
    if (logits >= 0).all() and ((logits.sum(1) - 1).abs() < 1e-2).all():
        raise ValueError("every row is at least 0 and sums to 1: these are probabilities, give logits")
