"""Which kind of step this one is."""

from __future__ import annotations

import math


def is_refresh(completed_steps: int, period: float, phase: int) -> bool:
    """Whether the step after ``completed_steps`` is a spectral refresh: (t − phase) mod period = 0, never if ∞."""
    return not math.isinf(period) and (completed_steps - phase) % int(period) == 0
