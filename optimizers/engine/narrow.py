"""How many rows of a matrix are selected, and the cargo that they make up: see ``selection.py``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..sharding.layout import Layout
from ..sharding.matrices import Matrix, Rect
from ..sharding.plan import Cargo


def count_of(group: Mapping[str, Any], rows: int) -> int:
    """How many of so many rows are selected."""
    return math.ceil(group["fraction"] * rows)


def narrowed(
    cargo: Cargo, group: Mapping[str, Any], layout: Layout, matrix: Matrix, rows: Tensor | None = None
) -> Cargo:
    """The selected rows of a matrix and where they lie; without ``rows`` on the host, as many of each rank's share."""
    shares, rects = [], [matrix.within(region)[0] for region in layout.regions]
    each = {rect.row: count_of(group, rect.rows) for rect in rects if rect.rows}
    for rect in rects:
        if rows is not None:
            first, last = torch.searchsorted(rows, torch.tensor([rect.row, rect.row + rect.rows])).tolist()
        else:
            first = sum(count for row, count in each.items() if row < rect.row)
            last = first + count_of(group, rect.rows)
        shares.append(Rect(first, last - first, rect.column, rect.columns))
    count = max(share.row + share.rows for share in shares)
    return Cargo(cargo.index, (count, matrix.columns), tuple(shares))
