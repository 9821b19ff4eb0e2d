"""What an algorithm is made of. Each file of ``optimizers/algorithms`` declares one ``Algorithm`` and registers it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..orthogonal.coefficients import NS5
from .directions import Direction
from .schedule import is_refresh

ElementwiseRule = Callable[[list[Tensor], dict[str, list[Tensor]], list[Tensor], Mapping[str, Any]], None]
"""(weights, state lists by key, gradients, group): one step of weights and state, in place."""

MAX_IN_FLIGHT = 2

MATRIX_OPTIONS: dict[str, Any] = {
    "lr": 1e-3,
    "weight_decay": 0.1,
    "momentum": 0.95,
    "nesterov": True,
    "ns_coefficients": NS5,
    "eps": 1e-7,
    "ns_steps": None,
    "adjust_lr_fn": "match_rms_adamw",
    "momentum_form": "ema",
    "ns_dtype": None,
    "wire_dtype": None,
    "exchange": "owner",
}
"""Options, with defaults, of every algorithm that keeps a momentum matrix. Names follow ``torch.optim.Muon``."""


@dataclass(frozen=True)
class Algorithm:
    """The parts of one algorithm.

    A matrix algorithm orthogonalises whole matrices on its refresh steps. On the others it follows ``between``, or
    takes the row step if ``whole_rows``, which has to know the norms of whole rows where ranks share them; ``period``
    fixes the schedule of one whose groups have no such option: 1 refreshes always, ∞ never.
    An elementwise algorithm is its rule.
    """

    name: str
    options: Mapping[str, Any]
    between: Direction | None = None
    period: float | None = None
    elementwise: ElementwiseRule | None = None
    whole_rows: bool = False
    state: tuple[str, ...] = field(default=("momentum_buffer",))

    def refreshes(self, group: Mapping[str, Any], offset: int = 0) -> bool:
        """Whether the group's next step orthogonalises whole matrices, those dealt ``offset`` steps after phase."""
        if self.elementwise is not None:
            return False
        return is_refresh(group["step"], group.get("period", self.period), group.get("phase", 0) + offset)

    @property
    def has_other_steps(self) -> bool:
        """Whether it is a matrix algorithm with steps that orthogonalise no whole matrices."""
        return self.whole_rows or self.between is not None

    @property
    def can_refresh(self) -> bool:
        """Whether any step of any group could."""
        return self.elementwise is None and self.period != math.inf


ALGORITHMS: dict[str, Algorithm] = {}
"""Algorithms by the name that groups and config files use."""


def register(algorithm: Algorithm) -> Algorithm:
    """Make an algorithm known to groups by its name."""
    ALGORITHMS[algorithm.name] = algorithm
    return algorithm
