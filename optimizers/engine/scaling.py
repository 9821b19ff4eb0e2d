"""Factors a(m, n) between the learning rate and the normalised direction: W ← W − η·a·O."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

AdjustLr = Literal["original", "match_rms_adamw", "spectral_unclamped"]
ADJUST_LR: tuple[str, ...] = get_args(AdjustLr)

RowNorm = Literal["matched", "plain"]
ROW_NORMS: tuple[str, ...] = get_args(RowNorm)
NeuronNorm = Literal["orthogonal", "direction"]
NEURON_NORMS: tuple[str, ...] = get_args(NeuronNorm)


def rate_on(lr: float | Tensor, device: torch.device) -> float | Tensor:
    """The learning rate for arithmetic on a device: a number as it is, a 0-d tensor moved there."""
    return lr.to(device) if isinstance(lr, Tensor) else lr


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


def refresh_scale(group: Mapping[str, Any], m: int, n: int) -> float:
    """The factor of an orthogonal m×n direction: a(m, n), times Scion's radius; 1 if a group has no such options."""
    if "adjust_lr_fn" not in group:
        return 1.0
    return group.get("radius", 1.0) * spectral_scale(group["adjust_lr_fn"], m, n)
