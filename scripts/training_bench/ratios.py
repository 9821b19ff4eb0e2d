"""Medians and how far they can be trusted."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

Spread = dict[str, float]
"""``median``, and ``low`` and ``high``, the quartiles."""


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles of at least two values."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


def ratio(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Of times that were taken one after the other, pair by pair."""
    return spread([a / b for a, b in zip(over, under, strict=True)])
