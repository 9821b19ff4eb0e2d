"""Fréchet distance between two Gaussians (Dowson and Landau 1982; Heusel et al. 2017 for generated images)."""

import torch

from eval.statistics import GaussianStats


def frechet(a: GaussianStats, b: GaussianStats) -> float:
    """|μa - μb|² + Tr Σa + Tr Σb - 2 Tr (Σa^½ Σb Σa^½)^½, in fp64 and in squared feature units; at least 0.

    With Σ = R Rᵀ the last trace is the sum of the singular values of Raᵀ Rb. So no number is ever complex, and no
    square root of a rounding error is taken: pairs of deficient rank (fewer images than features) are as accurate as
    others. They are biased all the same: compare only distances at equal n. Computed where the sums of ``a`` lie.

    Raises:
        ValueError: different numbers of features, fewer than 2 of them on a side, or NaN; or one side's spatial
            features are flattened in another order (``meta["layout"]``) than the other's.
    """
    if a.num_features != b.num_features:
        raise ValueError(f"cannot compare {a.num_features} features with {b.num_features}")
    layouts = {stats.meta["layout"] for stats in (a, b) if "layout" in stats.meta}
    if len(layouts) > 1:
        raise ValueError(f"spatial features are flattened in different orders: {' and '.join(sorted(layouts))}")
    device = a.sum.device
    (mean_a, cov_a, root_a), (mean_b, cov_b, root_b) = (
        [x.to(device) for x in (stats.mean, stats.covariance, stats.root)] for stats in (a, b)
    )
    overlap = torch.linalg.svdvals(root_a.T @ root_b).sum()
    distance = (mean_a - mean_b).square().sum() + cov_a.trace() + cov_b.trace() - 2 * overlap
    return max(distance.item(), 0.0)
