"""Fréchet distance between two Gaussians (Dowson and Landau 1982; Heusel et al. 2017 for generated images)."""

import torch
from torch import Tensor

from eval.statistics import GaussianStats


def frechet(a: GaussianStats, b: GaussianStats) -> float:
    """|μa - μb|² + Tr Σa + Tr Σb - 2 Tr (Σa^½ Σb Σa^½)^½, in fp64 and in squared feature units; at least 0.

    With Σ = R Rᵀ the last trace is the sum of the singular values of Raᵀ Rb. So no number is ever complex, and no
    square root of a rounding error is taken: pairs of deficient rank (fewer images than features) are as accurate as
    others. They are biased all the same: compare only distances at equal n.

    Raises:
        ValueError: different numbers of features, fewer than 2 of them on a side, or NaN.
    """
    if a.num_features != b.num_features:
        raise ValueError(f"cannot compare {a.num_features} features with {b.num_features}")
    device = a.sum.device
    mean_a, mean_b, cov_a, cov_b = (x.to(device) for x in (a.mean, b.mean, a.covariance, b.covariance))
    if not all(torch.isfinite(x).all() for x in (mean_a, mean_b, cov_a, cov_b)):
        raise ValueError("the statistics hold NaN or infinity")
    overlap = torch.linalg.svdvals(_root(cov_a).T @ _root(cov_b)).sum()
    distance = (mean_a - mean_b).square().sum() + cov_a.trace() + cov_b.trace() - 2 * overlap
    return max(distance.item(), 0.0)


def _root(covariance: Tensor) -> Tensor:
    """R [d, rank] with R Rᵀ = covariance; directions whose variance is mere rounding are left out."""
    values, vectors = torch.linalg.eigh(covariance)
    kept = values > values[-1] * len(values) * torch.finfo(values.dtype).eps
    return vectors[:, kept] * values[kept].sqrt()
