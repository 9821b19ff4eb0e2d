"""Kernel Inception Distance: an unbiased estimate, hence the honest number for few images."""

import torch
from torch import Tensor


def kid(
    features_a: Tensor, features_b: Tensor, subset_size: int = 1000, subsets: int = 100, seed: int = 0
) -> tuple[float, float]:
    """Unbiased squared maximum mean discrepancy under the kernel (x·y / d + 1)³, after Bińkowski et al. (2018).

    The mean over random subsets, each drawn without repeats from either side. A subset takes at most half of the
    smaller side: the subsets of one that is taken whole would all be the same and their spread would say nothing.

    The standard error is that of the score as an estimate from these n images, by the delete-d jackknife (Shao and
    Wu 1989): √(s / (n - s)) times the standard deviation over subsets of size s. (Published tables often divide by
    √subsets instead, which measures no more than the draw of subsets.) For equal distributions it is up to twice too
    large.

    Args:
        features_a: [n_a, d], any float dtype; computed in fp64 on its device.
        features_b: [n_b, d].
        subset_size: largest size of a subset.
        subsets: how many to draw, at least 2.
        seed: of the draw, which has its own generator: equal calls give equal values and no other stream moves.

    Returns:
        (mean, standard error), neither scaled; tables usually print 1000 times these.

    Raises:
        ValueError: other shapes, fewer than 4 images on a side, or values that are not finite.
    """
    if features_a.ndim != 2 or features_b.ndim != 2 or features_a.shape[1] != features_b.shape[1]:
        raise ValueError(f"features must be [n, d] with one d, not {list(features_a.shape)}, {list(features_b.shape)}")
    n = min(len(features_a), len(features_b))
    size = min(subset_size, n // 2)
    if size < 2 or subsets < 2:
        raise ValueError(f"KID needs 4 images a side and 2 subsets of size 2, got n={n}, {subsets} subsets of {size}")
    a, b = features_a, features_b.to(features_a.device)
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise ValueError("features hold NaN or infinity")
    generator = torch.Generator().manual_seed(seed)
    draw = [[torch.randperm(len(x), generator=generator)[:size].to(x.device) for x in (a, b)] for _ in range(subsets)]
    values = torch.stack([mmd2(a[rows_a].double(), b[rows_b].double()) for rows_a, rows_b in draw])
    return values.mean().item(), values.std().item() * (size / (n - size)) ** 0.5


def mmd2(a: Tensor, b: Tensor) -> Tensor:
    """Unbiased MMD² of fp64 a [m, d] and b [n, d] under (x·y / d + 1)³: a scalar, below zero about half of the time
    when both come from one distribution (Gretton et al. 2012, eq. 3).
    """
    return _off_diagonal_mean(_kernel(a, a)) + _off_diagonal_mean(_kernel(b, b)) - 2 * _kernel(a, b).mean()


def _kernel(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y.T / x.shape[1] + 1) ** 3


def _off_diagonal_mean(k: Tensor) -> Tensor:
    return (k.sum() - k.diagonal().sum()) / (len(k) * (len(k) - 1))
