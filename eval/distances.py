"""Distances between sets of feature vectors, block by block: 50,000 against 10,000 never lie in memory at once."""

from collections.abc import Iterator

import torch
from torch import Tensor

from eval.statistics import fp64_device

BLOCK = 2048
"""Rows of either set that are held in fp64 at once; a block of distances takes 8·BLOCK² bytes."""

ROUNDING = 1e-12
"""Squared distances that differ by less than this part of the longest squared vector count as equal.

They come from x² + y² - 2xy, which rounds differently in different places of a matrix product: without the margin the
distance of a copy to its neighbour would now and then exceed the original's.
"""


class Cloud:
    """Features [n, d] about a common centre, handed out in fp64 blocks."""

    def __init__(self, features: Tensor, centre: Tensor, block: int = BLOCK):
        self.features, self.centre, self.block = features, centre, block

    def __len__(self) -> int:
        return len(self.features)

    def rows(self, chosen: Tensor) -> "Cloud":
        """The cloud of the rows int64 [m] alone."""
        return Cloud(self.features[chosen], self.centre, self.block)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """(which rows, fp64 [b, d]) from first to last."""
        for start in range(0, len(self), self.block):
            rows = slice(start, min(start + self.block, len(self)))
            yield rows, self.features[rows].to(self.centre.device).double() - self.centre

    def longest(self) -> float:
        """The largest squared length."""
        return max(x.square().sum(1).max().item() for _, x in self.blocks())


def clouds(*sets: Tensor, block: int = BLOCK) -> tuple[list[Cloud], float]:
    """Feature sets [n, d] of one d as clouds about the mean of the first, and the margin of their squared distances.

    All computation is where the first set lies; ``mps`` has no fp64 and leaves it to the CPU.

    Raises:
        ValueError: other shapes, an empty set, values that are not finite, or a block of no rows.
    """
    check_features(*sets)
    if block < 1:
        raise ValueError(f"a block needs at least 1 row, not {block}")
    device = fp64_device(sets[0].device)
    zero = torch.zeros(sets[0].shape[1], dtype=torch.float64, device=device)
    total = zero.clone()
    for _, x in Cloud(sets[0], zero, block).blocks():
        total += x.sum(0)
    made = [Cloud(features, total / len(sets[0]), block) for features in sets]
    return made, ROUNDING * max(cloud.longest() for cloud in made)


def check_features(*sets: Tensor) -> None:
    """Raise ValueError unless all are [n, d] with one d, n ≥ 1, and finite."""
    shapes = [list(features.shape) for features in sets]
    if any(len(shape) != 2 or shape[1] != shapes[0][-1] or not shape[0] for shape in shapes):
        raise ValueError(f"features must be [n, d] with one d and n at least 1, not {', '.join(map(str, shapes))}")
    if not all(torch.isfinite(features).all() for features in sets):
        raise ValueError("features hold NaN or infinity")


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """fp64 [m, n], at least 0, of fp64 x [m, d] and y [n, d]."""
    lengths = x.square().sum(1)[:, None] + y.square().sum(1)
    return lengths.addmm_(x, y.T, alpha=-2).clamp_(min=0)


def nearest(x: Cloud, y: Cloud, k: int = 1, own: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k nearest neighbours in ``y`` of each vector of ``x``.

    Args:
        x: n vectors.
        y: where neighbours are sought; at least k, not counting the vector itself.
        k: how many.
        own: int64 [n], the row of ``y`` that each vector of ``x`` is itself, which is no neighbour. By position and
            not by distance: a duplicate is a neighbour.

    Returns:
        (squared distances fp64 [n, k], ascending; rows of ``y`` int64 [n, k]).
    """
    found = [_nearest_of_block(block, y, k, None if own is None else own[rows]) for rows, block in x.blocks()]
    distances, rows = zip(*found, strict=True)
    return torch.cat(distances), torch.cat(rows)


def _nearest_of_block(x: Tensor, y: Cloud, k: int, own: Tensor | None) -> tuple[Tensor, Tensor]:
    best, best_rows = x.new_empty(len(x), 0), torch.empty(len(x), 0, dtype=torch.int64, device=x.device)
    for rows, block in y.blocks():
        distances = squared_distances(x, block)
        numbers = torch.arange(rows.start, rows.stop, device=x.device)
        if own is not None:
            distances.masked_fill_(own.to(x.device)[:, None] == numbers, float("inf"))
        closest, columns = distances.topk(min(k, len(block)), largest=False)
        best, best_rows = torch.cat((best, closest), 1), torch.cat((best_rows, numbers[columns]), 1)
        best, columns = best.topk(min(k, best.shape[1]), largest=False)  # sorted, nearest first
        best_rows = best_rows.gather(1, columns)
    return best, best_rows
