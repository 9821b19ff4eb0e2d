"""Which period a refresh gets: the smallest whose overhead over AdamW stays within a budget.

`scripts/plan.py` asks with modelled times, ``optimizer.period: auto`` with measured ones. Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PERIODS = range(1, 65)
"""Those that are chosen from."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the parts of a step."""

    computing: float
    """Forward and backward if no link were waited for."""
    waiting: float
    """What links add to that."""
    adamw: float
    """AdamW for all parameters, in place of the optimizer."""
    between: float
    """The optimizer where it does not refresh."""
    refresh: float
    """The optimizer where all of its matrices refresh."""

    def optimizer(self, period: float) -> float:
        """Mean time of the optimizer, one in `period` of whose steps is a refresh; ∞: none."""
        share = 1 / period
        return share * self.refresh + (1 - share) * self.between


@dataclass(frozen=True)
class Overhead:
    """What a period costs, against AdamW."""

    period: int
    step_seconds: float
    """Mean over the period."""
    against_adamw: float
    """Share of AdamW's step that comes on top."""
    against_hidden: float
    """The same on top of AdamW, as a share of AdamW's step if no link were waited for: never less, if not negative."""


def overhead(times: StepTimes, period: int) -> Overhead:
    """The overhead of one period."""
    hidden = times.computing + times.adamw
    base = hidden + times.waiting
    extra = times.optimizer(period) - times.adamw
    return Overhead(period, base + extra, extra / base, extra / hidden)


def smallest_period(times: StepTimes, budget: float, periods: Iterable[int] = PERIODS) -> int | None:
    """The smallest period whose overhead is at most `budget`, None if no one's is.

    It is taken of AdamW's step without waiting for links. That holds what is meant, and a slow link, which slows AdamW
    down too, can then not make an overhead look small: a slower link never gives a smaller period.
    """
    return next((p for p in sorted(periods) if overhead(times, p).against_hidden <= budget), None)


def choose(times: StepTimes, budget: float) -> tuple[int, bool]:
    """The period that ``auto`` takes, and whether it is within the budget; where no one is, the longest."""
    found = smallest_period(times, budget)
    return (max(PERIODS), False) if found is None else (found, True)
