"""Factors a(m, n) between the learning rate and the normalised direction: W ← W − η·a·O."""

from __future__ import annotations

import math
from typing import Literal, get_args

AdjustLr = Literal["original", "match_rms_adamw", "spectral_unclamped"]
ADJUST_LR: tuple[str, ...] = get_args(AdjustLr)


def spectral_scale(adjust_lr_fn: AdjustLr, m: int, n: int) -> float:
    """a(m, n) for an orthogonal m×n direction; m is the number of rows (out-features).

    ``original`` √max(1, m/n) (Keller Jordan), ``match_rms_adamw`` 0.2·√max(m, n) (arXiv 2502.16982),
    ``spectral_unclamped`` √(m/n) (μP).
    """
    if adjust_lr_fn == "original":
        return math.sqrt(max(1.0, m / n))
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(m, n))
    if adjust_lr_fn == "spectral_unclamped":
        return math.sqrt(m / n)
    raise ValueError(f"adjust_lr_fn {adjust_lr_fn!r} is none of {', '.join(ADJUST_LR)}")


def row_scale(adjust_lr_fn: AdjustLr, m: int, n: int) -> float:
    """a(m, n)·√(min(m, n)/m): unit rows then have the RMS of an orthogonal direction scaled by a(m, n)."""
    return spectral_scale(adjust_lr_fn, m, n) * math.sqrt(min(m, n) / m)
