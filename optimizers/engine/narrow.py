"""How many rows of a matrix are selected, and the cargo that they make up: see ``selection.py``."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..sharding.layout import Layout
from ..sharding.matrices import Rect
from ..sharding.plan import Cargo

Selection = Literal["global", "local"]
SELECTIONS: tuple[str, ...] = get_args(Selection)


def count_of(group: Mapping[str, Any], rows: int) -> int:
    """How many of so many rows are selected."""
    return math.ceil(group["fraction"] * rows - 1e-9)  # 0.1 of 30 is 3, whatever the product rounds to


def narrowed(cargo: Cargo, group: Mapping[str, Any], layout: Layout, rows: Tensor | None = None) -> Cargo:
    """The selected rows of a matrix that travels, and where they lie.

    ``rows``: which, ascending, on the host; None: as many of each rank's share.
    """
    if rows is not None:
        edges = torch.tensor([[rect.row, rect.row + rect.rows] for rect in layout.shares])
        spans = torch.searchsorted(rows, edges).tolist()
    else:
        each = {rect.row: count_of(group, rect.rows) for rect in layout.shares if rect.rows}
        starts = sorted(each)
        before = list(accumulate((each[row] for row in starts), initial=0))
        firsts = [before[bisect_left(starts, rect.row)] for rect in layout.shares]
        spans = [(n, n + count_of(group, rect.rows)) for n, rect in zip(firsts, layout.shares, strict=True)]
    shares = tuple(
        Rect(first, last - first, rect.column, rect.columns)
        for (first, last), rect in zip(spans, layout.shares, strict=True)
    )
    return Cargo(cargo.index, (max(last for _, last in spans), layout.shape[1]), shares)
