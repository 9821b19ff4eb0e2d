"""FID-infinity: the Fréchet distance that infinitely many generated images would have."""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from eval.frechet import frechet
from eval.statistics import GaussianStats

POINTS = 15
"""Sizes that the line goes through, as in the paper."""


class Extrapolation(NamedTuple):
    """A line in 1/N through Fréchet distances at several N."""

    value: float  # its intercept
    standard_error: float  # of the intercept, as least squares tell it
    slope: float
    sizes: list[int]
    distances: list[float]


def fid_infinity(
    features: Tensor, reference: GaussianStats, points: int = POINTS, smallest: int | None = None, seed: int = 0
) -> Extrapolation:
    """Fréchet distances at ``points`` sizes, a least-squares line in 1/N, and its value at 1/N = 0.

    After Chong and Forsyth (2020): the bias of the distance is a slope over N in first order. Sizes are evenly spaced
    from ``smallest`` to n, and each set is the beginning of one random order, so it contains the smaller ones. What
    remains is the bias of the reference's own count.

    The standard error says how well the points lie on the line. It knows nothing of other images that might have been
    generated, which all sizes share: for that see ``eval.bootstrap``.

    Args:
        features: [n, d] of the generated images.
        reference: of the real ones.
        points: how many sizes, at least 5.
        smallest: the smallest size; None is a tenth of n (5,000 of 50,000, as in the paper) but more than d.
        seed: of the order, which has its own generator.

    Raises:
        ValueError: fewer than 5 sizes, or too few images for them: up to d the distance is no line in 1/N.
    """
    if features.ndim != 2:
        raise ValueError(f"features must be [n, d], not {list(features.shape)}")
    n, d = features.shape
    smallest = max(n // 10, d + 1) if smallest is None else smallest
    if points < 5:
        raise ValueError(f"a line needs at least 5 sizes, not {points}")
    if not d < smallest <= n - points + 1:
        raise ValueError(f"{points} sizes from {smallest} to {n} images: need more than {d} features and room between")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).to(features.device)
    sizes = [round(smallest + (n - smallest) * i / (points - 1)) for i in range(points)]
    stats, distances = GaussianStats(d, reference.sum.device), []
    for start, end in itertools.pairwise([0, *sizes]):
        stats.update(features[order[start:end]])
        distances.append(frechet(stats, reference))
    return Extrapolation(*_line(sizes, distances), sizes, distances)


def _line(sizes: list[int], distances: list[float]) -> tuple[float, float, float]:
    """Intercept, its standard error and slope of the least-squares line of ``distances`` over 1 / ``sizes``."""
    x = 1 / torch.tensor(sizes, dtype=torch.float64)
    y = torch.tensor(distances, dtype=torch.float64)
    spread = (x - x.mean()).square().sum()
    slope = ((x - x.mean()) * y).sum() / spread
    intercept = y.mean() - slope * x.mean()
    variance = (y - intercept - slope * x).square().sum() / (len(x) - 2)
    error = (variance * (1 / len(x) + x.mean().square() / spread)).sqrt()
    return intercept.item(), error.item(), slope.item()
