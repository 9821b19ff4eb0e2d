"""Which kind of step this one is, which matrices refresh in it, and options that change from step to step.

A period or a ratio is a number or a schedule: ((step, value), …) with ascending steps from 0. A period holds its value
until the next step; a ratio moves linearly to the next value and keeps the last. Steps are the group's, so that a
checkpoint goes on where it was.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence

Schedule = tuple[tuple[int, float], ...]


def held(value: float | Schedule, step: int) -> float:
    """The value of the last step of a schedule that is not after ``step``; of a number, itself."""
    return value if not isinstance(value, tuple) else value[_part(value, step)][1]


def interpolated(value: float | Schedule, step: int) -> float:
    """The value on the straight line between the steps of a schedule; of a number, itself."""
    if not isinstance(value, tuple):
        return value
    i = _part(value, step)
    if i == len(value) - 1:
        return value[-1][1]
    (start, first), (end, last) = value[i : i + 2]
    return first + (last - first) * (step - start) / (end - start)


def _part(schedule: Schedule, step: int) -> int:
    return bisect_right(schedule, step, key=lambda pair: pair[0]) - 1


def is_schedule(value: object) -> bool:
    """Whether it has the form of a schedule."""
    if not isinstance(value, tuple) or not value or not all(isinstance(v, tuple) and len(v) == 2 for v in value):
        return False
    steps = [step for step, _ in value]
    whole = all(isinstance(step, int) and not isinstance(step, bool) for step in steps)
    return whole and steps[0] == 0 and all(a < b for a, b in itertools.pairwise(steps))


def is_refresh(completed_steps: int, period: float, phase: int) -> bool:
    """Whether the step after ``completed_steps`` is a spectral refresh: (t − phase) mod period = 0, never if ∞."""
    return not math.isinf(period) and (completed_steps - phase) % int(period) == 0


def stagger_offsets(costs: Sequence[int], period: float | Schedule) -> list[int]:
    """Steps after the phase at which each matrix refreshes, dealt so that every step of a period costs the same.

    Largest first to the step with the least work so far. It depends on costs and their order alone, so a run that
    resumes on another number of ranks keeps it. Of a schedule, the longest period is dealt over: in a shorter one each
    matrix refreshes once as well, but not all steps cost the same.
    """
    if isinstance(period, tuple):
        period = max((value for _, value in period if not math.isinf(value)), default=math.inf)
    if math.isinf(period):
        return [0] * len(costs)
    idle = [(0, offset) for offset in range(min(int(period), len(costs)))]  # no more are taken
    offsets = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, offsets[i] = heapq.heappop(idle)
        heapq.heappush(idle, (load + costs[i], offsets[i]))
    return offsets
