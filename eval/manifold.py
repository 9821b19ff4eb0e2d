"""Precision, recall, density and coverage: what a single distance mixes up, fidelity and variety, told apart."""

from typing import NamedTuple

import torch
from torch import Tensor

from eval.distances import BLOCK, Cloud, clouds, nearest, squared_distances


class PRDC(NamedTuple):
    """Shares in 0..1; density may exceed 1."""

    precision: float
    recall: float
    density: float
    coverage: float


def prdc(
    real: Tensor, generated: Tensor, k: int = 3, density_k: int = 5, allow_unequal: bool = False, block: int = BLOCK
) -> PRDC:
    """Compare two sets of features by the balls around each vector that reach to its k-th neighbour in its own set.

    * precision: share of generated vectors inside some real ball (Kynkäänniemi et al. 2019).
    * recall: share of real vectors inside some generated ball.
    * density: number of real balls around a generated vector, on average, over ``density_k`` (Naeem et al. 2020).
    * coverage: share of real balls of ``density_k`` with a generated vector inside.

    A vector is no neighbour of itself, but its duplicate is. A vector on the border of a ball is inside (Kynkäänniemi;
    Naeem's code leaves it out, which differs only in ties).

    All four depend on both counts, so these have to be equal. ADM's published numbers are 10,000 real against 50,000
    generated images and compare only with each other.

    Args:
        real: [n, d], any float dtype; computed in fp64 where they lie.
        generated: [m, d].
        k: of precision and recall.
        density_k: of density and coverage.
        allow_unequal: whether n and m may differ.
        block: rows held in fp64 at once; changes time and memory, not the result.

    Raises:
        ValueError: unequal counts, k not in 1 … count - 1, other shapes, or values that are not finite.
    """
    if len(real) != len(generated) and not allow_unequal:
        raise ValueError(
            f"{len(real)} real but {len(generated)} generated vectors: precision and recall depend on both counts, "
            "use equal ones or allow_unequal=True"
        )
    largest, fewest = max(k, density_k), min(len(real), len(generated))
    if not 1 <= min(k, density_k) <= largest < fewest:
        raise ValueError(f"k = {k} and density_k = {density_k} must be 1 or more and less than the {fewest} vectors")
    (real_cloud, generated_cloud), margin = clouds(real, generated, block=block)
    real_radii = _radii(real_cloud, largest) + margin
    generated_radii = _radii(generated_cloud, k)[:, k - 1] + margin
    return _counted(
        real_cloud, generated_cloud, real_radii[:, k - 1], real_radii[:, density_k - 1], generated_radii, density_k
    )


def _radii(cloud: Cloud, k: int) -> Tensor:
    """Squared distances [n, k] to the first k neighbours in the cloud itself."""
    return nearest(cloud, cloud, k, own=torch.arange(len(cloud)))[0]


def _counted(
    real: Cloud, generated: Cloud, real_radii: Tensor, density_radii: Tensor, generated_radii: Tensor, density_k: int
) -> PRDC:
    """The four numbers from squared radii [n], [n] and [m]; one pass over all pairs."""
    precise = torch.zeros(len(generated), dtype=torch.bool, device=real_radii.device)
    recalled, covered = (torch.zeros(len(real), dtype=torch.bool, device=real_radii.device) for _ in range(2))
    inside = torch.zeros((), dtype=torch.int64, device=real_radii.device)
    for columns, y in generated.blocks():
        for rows, x in real.blocks():
            distances = squared_distances(x, y)
            precise[columns] |= (distances <= real_radii[rows, None]).any(0)
            recalled[rows] |= (distances <= generated_radii[columns]).any(1)
            within = distances <= density_radii[rows, None]
            covered[rows] |= within.any(1)
            inside += within.sum()
    precision, recall, coverage = (hit.double().mean().item() for hit in (precise, recalled, covered))
    return PRDC(precision, recall, inside.item() / (density_k * len(generated)), coverage)
