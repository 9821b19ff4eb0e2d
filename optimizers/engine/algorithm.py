"""What an algorithm is made of. Each file of ``optimizers/algorithms`` declares one ``Algorithm`` and registers it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from ..orthogonal.coefficients import NS5
from .directions import Direction
from .forms import ELEMENTS, Form
from .scaling import row_scale
from .schedule import held, interpolated, is_refresh

ElementwiseRule = Callable[[list[Tensor], dict[str, list[Tensor]], list[Tensor], Mapping[str, Any]], None]
"""(weights, state lists by key, gradients, group): one step of weights and state, in place."""

StepSizes = Callable[[Tensor, list[Tensor], Mapping[str, Any]], Tensor]
"""(‖G‖_F², the rows of each state that is per row, group) -> step size of every row: one for a whole matrix."""


@dataclass(frozen=True)
class Together:
    """A step that all tasks of an algorithm take together, because ranks meet several times in its course.

    ``name``: of such steps. ``take`` (tasks with their state, all_reduce): one step in place; the bytes that this rank
    sends. ``flops`` (group, (m, n), part): of products with a part of a matrix. ``sums`` (group, layout, dtype of the
    weights): process groups, and how many bytes a rank of every region adds up in them.
    """

    name: str
    take: Callable[..., int]
    flops: Callable[..., int]
    sums: Callable[..., Any]


MAX_IN_FLIGHT = 2

MOMENTUM_OPTIONS: dict[str, Any] = {
    "lr": 1e-3,
    "weight_decay": 0.1,
    "momentum": 0.95,
    "nesterov": True,
    "momentum_form": "ema",
    "momentum_dtype": None,
    "adjust_lr_fn": "match_rms_adamw",
    "mars_gamma": 0.0,
    "mars_clip": 1.0,
    "mars_exact": False,
}
"""Options, with defaults, of every algorithm that keeps a momentum matrix. Names follow ``torch.optim.Muon``."""

MATRIX_OPTIONS: dict[str, Any] = {
    **MOMENTUM_OPTIONS,
    "ns_coefficients": NS5,
    "eps": 1e-7,
    "ns_steps": None,
    "ns_dtype": None,
    "wire_dtype": None,
    "exchange": "owner",
    "equilibrate": None,
    "neuron_beta2": None,
    "neuron_eps": 1e-8,
    "neuron_norm": "orthogonal",
}
"""Options, with defaults, of every algorithm that orthogonalises."""

Unit = Literal["rows", "columns", "matrix"]

Scale = Callable[[Mapping[str, Any], int, int], float]
"""(group, m, n): the factor of a direction of an m×n matrix, beside the learning rate."""


def matched_rows(group: Mapping[str, Any], m: int, n: int) -> float:
    """Of unit rows, so that their RMS is that of a refresh, times ``row_lr_ratio``."""
    ratio = interpolated(group.get("row_lr_ratio", 1.0), group["step"])
    return ratio * row_scale(group["adjust_lr_fn"], m, n)


@dataclass(frozen=True)
class Algorithm:
    """The parts of one algorithm.

    A matrix algorithm orthogonalises whole matrices on its refresh steps. On the others it follows ``between``, which
    never communicates, or brings each row, each column or the whole matrix to norm 1, as ``unit`` says, for which
    ranks may have to add up squares, and takes ``unit_scale`` of it. ``period`` fixes the schedule of one whose groups
    have no such option: 1 refreshes always, ∞ never. ``step_sizes`` takes the place of lr and scale; one that
    ``selects`` orthogonalises some rows only. ``together`` is a step of another kind altogether, which never refreshes.
    An elementwise algorithm is its rule.
    """

    name: str
    options: Mapping[str, Any]
    between: Direction | None = None
    unit: Unit | None = None
    unit_scale: Scale = matched_rows
    period: float | None = None
    step_sizes: StepSizes | None = None
    selects: bool = False
    together: Together | None = None
    elementwise: ElementwiseRule | None = None
    state: Mapping[str, Form] = field(default_factory=lambda: {"momentum_buffer": ELEMENTS})

    def refreshes(self, group: Mapping[str, Any], offset: int = 0) -> bool:
        """Whether the group's next step orthogonalises whole matrices, those dealt ``offset`` steps after phase."""
        if self.elementwise is not None:
            return False
        period = held(group.get("period", self.period), group["step"])
        return is_refresh(group["step"], period, group.get("phase", 0) + offset)

    @property
    def other_steps(self) -> str | None:
        """What the steps of a matrix algorithm that orthogonalise no whole matrices are called; None: it has none."""
        if self.together is not None:
            return self.together.name
        if self.unit is not None:
            return {"rows": "row steps", "columns": "column steps", "matrix": "Frobenius steps"}[self.unit]
        return None if self.between is None else f"{self.between.__name__} steps"

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
