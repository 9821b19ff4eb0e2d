"""Which kind of step this one is, and which matrices refresh in it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence


def is_refresh(completed_steps: int, period: float, phase: int) -> bool:
    """Whether the step after ``completed_steps`` is a spectral refresh: (t − phase) mod period = 0, never if ∞."""
    return not math.isinf(period) and (completed_steps - phase) % int(period) == 0


def stagger_offsets(costs: Sequence[int], period: float) -> list[int]:
    """Steps after the phase at which each matrix refreshes, dealt so that every step of a period costs the same.

    Largest first to the step with the least work so far. It depends on costs and their order alone, so a run that
    resumes on another number of ranks keeps it.
    """
    if math.isinf(period):
        return [0] * len(costs)
    idle = [(0, offset) for offset in range(int(period))]
    offsets = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, offsets[i] = heapq.heappop(idle)
        heapq.heappush(idle, (load + costs[i], offsets[i]))
    return offsets
