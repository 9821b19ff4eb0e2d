"""Kernel distances between two sets of features: KID, unbiased and so for few images, and CMMD of CLIP features."""

import torch
from torch import Tensor

from eval.distances import BLOCK, Cloud, check_features, squared_distances
from eval.statistics import fp64_device


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
    check_features(features_a, features_b)
    n = min(len(features_a), len(features_b))
    size = min(subset_size, n // 2)
    if size < 2 or subsets < 2:
        raise ValueError(f"KID needs 4 images a side and 2 subsets of size 2, got n={n}, {subsets} subsets of {size}")
    a, b = features_a, features_b.to(features_a.device)
    generator = torch.Generator().manual_seed(seed)
    draw = [[torch.randperm(len(x), generator=generator)[:size].to(x.device) for x in (a, b)] for _ in range(subsets)]
    values = torch.stack([mmd2(a[rows_a].double(), b[rows_b].double()) for rows_a, rows_b in draw])
    return values.mean().item(), values.std().item() * (size / (n - size)) ** 0.5


def mmd2(a: Tensor, b: Tensor) -> Tensor:
    """Unbiased MMD² of fp64 a [m, d] and b [n, d] under (x·y / d + 1)³: a scalar, below zero about half of the time
    when both come from one distribution (Gretton et al. 2012, eq. 3).
    """
    within = _off_diagonal_mean(cubic_kernel(a, a)) + _off_diagonal_mean(cubic_kernel(b, b))
    return within - 2 * cubic_kernel(a, b).mean()


def cubic_kernel(x: Tensor, y: Tensor) -> Tensor:
    """(x·y / d + 1)³ as [m, n], of fp64 x [m, d] and y [n, d]."""
    return (x @ y.T / x.shape[1] + 1) ** 3


def cmmd(
    embeddings_a: Tensor, embeddings_b: Tensor, sigma: float = 10.0, scale: float = 1000.0, block: int = BLOCK
) -> float:
    """CLIP maximum mean discrepancy (Jayasumana et al. 2024): ``scale`` times MMD² under exp(-|x - y|² / 2σ²).

    As in the authors' code, unlike the formula of their paper, the mean within a set counts each embedding with itself:
    a V-statistic, at least 0, biased by about 1/n. So compare only at equal n.

    Args:
        embeddings_a: [n, d], any float dtype; each is brought to length 1 and computed in fp64 where they lie.
        embeddings_b: [m, d].
        sigma: width of the kernel.
        scale: the published factor.
        block: rows held in fp64 at once; changes time and memory, not the result.

    Raises:
        ValueError: other shapes, values that are not finite, or an embedding of length 0.
    """
    check_features(embeddings_a, embeddings_b)
    zero = torch.zeros(embeddings_a.shape[1], dtype=torch.float64, device=fp64_device(embeddings_a.device))
    a, b = (Cloud(embeddings, zero, block) for embeddings in (embeddings_a, embeddings_b))
    within = _mean_rbf(a, a, sigma) + _mean_rbf(b, b, sigma)
    return scale * (within - 2 * _mean_rbf(a, b, sigma)).item()


def _mean_rbf(x: Cloud, y: Cloud, sigma: float) -> Tensor:
    """Mean over all pairs of the kernel less 1. The ones cancel in MMD², and with them most of the digits."""
    total = x.centre.new_zeros(())
    for _, rows in x.blocks():
        rows = _unit(rows)
        for _, columns in y.blocks():
            total += torch.expm1(squared_distances(rows, _unit(columns)) / (-2 * sigma**2)).sum()
    return total / (len(x) * len(y))


def _unit(x: Tensor) -> Tensor:
    lengths = x.norm(dim=1, keepdim=True)
    if not lengths.all():
        raise ValueError("an embedding has length 0")
    return x / lengths


def _off_diagonal_mean(k: Tensor) -> Tensor:
    return (k.sum() - k.diagonal().sum()) / (len(k) * (len(k) - 1))
