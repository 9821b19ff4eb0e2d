"""Checks the options of a parameter group. Every error is one line that names the group and the fix."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..orthogonal.newton_schulz import check_kernel
from ..sharding.layout import Layout
from ..sharding.plan import EXCHANGES
from .algorithm import ALGORITHMS, Algorithm
from .equilibrate import EQUILIBRATIONS
from .momentum import MOMENTUM_FORMS
from .narrow import SELECTIONS
from .scaling import ADJUST_LR, NEURON_NORMS, ROW_NORMS
from .schedule import is_schedule

BOOKKEEPING = ("params", "param_names", "matrix_splits", "algorithm", "step", "initial_lr")
"""Group keys that are no options of an algorithm; learning-rate schedulers write ``initial_lr``."""


def nearest(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the nearest known word, else the list of all."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


def find_algorithm(name: Any, where: str) -> Algorithm:
    """The registered algorithm of that name.

    Raises:
        ValueError: if there is none, with the nearest name.
    """
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise ValueError(f"{where}: unknown algorithm {name!r}{nearest(str(name), ALGORITHMS)}")
    return ALGORITHMS[name]


def one_of(kinds: Mapping[str, Algorithm], what: str, name: Any) -> tuple[Algorithm, ValueError | None]:
    """The algorithm of that name, or any and an error: all ranks have to hear of it before it is raised."""
    if isinstance(name, str) and name in kinds:
        return kinds[name], None
    return next(iter(kinds.values())), ValueError(f"{what} is {name!r} but has to be one of {', '.join(kinds)}")


def structure(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What of a group's options decides which state there is and how matrices travel; it may change between steps."""
    period = group["period"] if group.get("stagger") else None
    kept = bool(group.get("mars_gamma")), group.get("neuron_beta2") is not None, period
    return (*kept, *(group.get(key) for key in _STRUCTURAL))


def check_options(group: Mapping[str, Any], algorithm: Algorithm, where: str) -> None:
    """Raise a ValueError for an unknown key or a value out of range."""
    for key, value in group.items():
        if key in BOOKKEEPING:
            continue
        if key not in algorithm.options:
            known = (*algorithm.options, "params", "param_names", "algorithm")
            raise ValueError(f"{where}: unknown key {key!r} for algorithm {algorithm.name!r}{nearest(key, known)}")
        valid, expected = _RULES[key]
        if not valid(value):
            raise ValueError(f"{where}: {key} is {value!r} but has to be {expected}")
    if algorithm.elementwise is None and "ns_coefficients" in algorithm.options:
        try:
            check_kernel(*(group[key] for key in ("ns_coefficients", "ns_steps", "ns_dtype")))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    if algorithm.step_sizes is not None and group.get("neuron_beta2") is not None:
        raise ValueError(
            f"{where}: {algorithm.name} has step sizes of its own, which neuron_beta2 would undo; set one of the two"
        )
    if group.get("mars_exact") and not group.get("mars_gamma"):
        raise ValueError(f"{where}: mars_exact does nothing without mars_gamma; set mars_gamma above 0 as well")


def check_momenta(group: Mapping[str, Any], where: str) -> None:
    """Of a new group: schedulers may move the momentum below ``input_momentum`` later."""
    if group.get("input_momentum", 0) > group.get("momentum", 1):
        raise ValueError(
            f"{where}: input_momentum {group['input_momentum']} may not be above momentum {group['momentum']}"
        )


def plain(value: Any) -> Any:
    """A number of numpy or a list as Python's own number or a tuple: so groups compare and are stored alike."""
    if isinstance(value, (list, tuple)):
        return tuple(map(plain, value))
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def completed_steps(value: Any, where: str) -> int:
    """The ``step`` of a group.

    Raises:
        ValueError: it is no count.
    """
    if not _whole(value, 0):
        raise ValueError(f"{where}: step is {value!r} but has to be an int >= 0, the number of completed steps")
    return int(value)


def check_grid(grid: int | tuple[int, int] | None, layout: Layout, label: str) -> None:
    """Raise a ValueError if the shard of any rank cuts through a block of the grid."""
    if grid is None or layout.team is None:
        return
    rows, columns = grid if isinstance(grid, tuple) else (grid, 1)
    for matrix in {matrix[1:]: matrix for matrix in layout.matrices}.values():
        at_rows, at_columns = set(), set()
        for region in layout.regions:
            rect, _ = matrix._replace(index=region.index[0]).within(region)
            if rect.rows * rect.columns:
                at_rows |= {rect.row, rect.row + rect.rows}
                at_columns |= {rect.column, rect.column + rect.columns}
        for blocks, size, cuts, what in (
            (rows, matrix.rows, at_rows, "rows"),
            (columns, matrix.columns, at_columns, "columns"),
        ):
            inner = sorted(cuts - {0, size})
            if not _fits(blocks, size, inner):
                raise ValueError(
                    f"{label}: block_grid {grid!r} cuts {size} {what} every {math.ceil(size / blocks)}, but the shards "
                    f"of {len(layout.regions)} ranks lie {_every(inner, what)}; {what[:-1]} counts that fit: "
                    + _fitting(size, inner)
                )


def check_whole_rows(grid: int | tuple[int, int] | None, layout: Layout, label: str) -> None:
    """Raise a ValueError if blocks hold parts of rows, of which neuron-wise normalisation knows no variance."""
    if layout.column_groups or (isinstance(grid, tuple) and grid[1] > 1):
        raise ValueError(
            f"{label}: neuron_beta2 normalises whole rows, but blocks here hold parts of them; use block_grid=(r, 1) "
            "and shards of rows, or an algorithm whose other steps are row steps"
        )


def _fits(blocks: int, size: int, cuts: Sequence[int]) -> bool:
    step = math.ceil(size / blocks)
    return all(cut % step == 0 for cut in cuts)


def _every(cuts: Sequence[int], what: str) -> str:
    first = cuts[0]
    if list(cuts) == [first * (i + 1) for i in range(len(cuts))]:
        return f"every {first} {what}"
    return f"at {what} {', '.join(map(str, cuts[:8]))}"


def _fitting(size: int, cuts: Sequence[int]) -> str:
    """The first block counts, one for each height of a block, that contain the cuts of the shards."""
    allowed: dict[int, int] = {}
    for blocks in range(1, size + 1):
        if _fits(blocks, size, cuts):
            allowed.setdefault(math.ceil(size / blocks), blocks)
    return ", ".join(str(blocks) for blocks in list(allowed.values())[:8])


def _number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and not math.isnan(value)


def _at_least_zero(value: Any) -> bool:
    return _number(value) and 0 <= value < math.inf


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and value >= least


def _learning_rate(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.ndim == 0 and _at_least_zero(float(value))
    return _at_least_zero(value)


def _grid(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return len(value) == 2 and all(_whole(v, 1) for v in value)
    return value is None or _whole(value, 1)


def _numbers(value: Any, count: int) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == count and all(map(_number, value))


def _period(value: Any) -> bool:
    return value == math.inf or _whole(value, 1)


def _scheduled(valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Valid as a number, or as a schedule of such numbers."""
    return lambda v: all(valid(value) for _, value in v) if is_schedule(v) else not isinstance(v, tuple) and valid(v)


_SCHEDULE = "a schedule ((step, value), ...) of such with ascending steps from 0"
_STRUCTURAL = (
    "mars_exact", "momentum_dtype", "exchange", "wire_dtype", "block_grid", "fraction", "rank_fraction",
    "matrix_splits",
)  # fmt: skip
_WIRE = (None, torch.bfloat16, torch.float32, torch.float64)  # fp16 has too small a range for gradients

_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (_learning_rate, "a float or 0-d tensor >= 0"),
    "weight_decay": (_at_least_zero, "a float >= 0"),
    "momentum": (lambda v: _number(v) and 0 <= v < 1, "a float in [0, 1)"),
    "nesterov": (lambda v: isinstance(v, bool), "True or False"),
    "ns_coefficients": (
        lambda v: isinstance(v, (str, tuple, list)),
        "a name or a tuple; see orthogonal/coefficients.py",
    ),
    "eps": (_at_least_zero, "a float >= 0"),
    "ns_steps": (lambda v: v is None or (_whole(v, 1) and v < 100), "None or an int from 1 to 99"),
    "adjust_lr_fn": (lambda v: v in ADJUST_LR, f"one of {', '.join(ADJUST_LR)}"),
    "momentum_form": (lambda v: v in MOMENTUM_FORMS, f"one of {', '.join(MOMENTUM_FORMS)}"),
    "ns_dtype": (lambda v: v is None or (isinstance(v, torch.dtype) and v.is_floating_point), "a float dtype or None"),
    "wire_dtype": (lambda v: v in _WIRE, "None, torch.bfloat16, torch.float32 or torch.float64"),
    "exchange": (lambda v: v in EXCHANGES, f"one of {', '.join(EXCHANGES)}"),
    "period": (_scheduled(_period), f"an int >= 1 or math.inf, or {_SCHEDULE}"),
    "phase": (lambda v: _whole(v, 0), "an int >= 0"),
    "stagger": (lambda v: isinstance(v, bool), "True or False"),
    "momentum_dtype": (
        lambda v: v in (None, torch.float32, torch.bfloat16, torch.float64, "int8", "dynamic8"),
        "None, torch.bfloat16, torch.float32, torch.float64, 'int8' or 'dynamic8'",
    ),
    "mars_gamma": (_at_least_zero, "a float >= 0"),
    "mars_clip": (lambda v: v is None or (_number(v) and v > 0), "a float > 0, or None"),
    "mars_exact": (lambda v: isinstance(v, bool), "True or False"),
    "equilibrate": (lambda v: v is None or v in EQUILIBRATIONS, f"None or one of {', '.join(EQUILIBRATIONS)}"),
    "neuron_beta2": (lambda v: v is None or (_number(v) and 0 <= v < 1), "None or a float in [0, 1)"),
    "neuron_eps": (_at_least_zero, "a float >= 0"),
    "neuron_norm": (lambda v: v in NEURON_NORMS, f"one of {', '.join(NEURON_NORMS)}"),
    "input_momentum": (lambda v: _number(v) and 0 <= v < 1, "a float in [0, 1), not above momentum"),
    "sign_lr_ratio": (_scheduled(_at_least_zero), f"a float >= 0, or {_SCHEDULE}"),
    "rank_fraction": (lambda v: _number(v) and 0 < v <= 1, "a float in (0, 1]"),
    "rank_multiple": (lambda v: _whole(v, 1), "an int >= 1"),
    "fraction": (lambda v: _number(v) and 0 < v <= 1, "a float in (0, 1]"),
    "selection": (lambda v: v in SELECTIONS, f"one of {', '.join(SELECTIONS)}"),
    "radius": (_at_least_zero, "a float >= 0"),
    "row_eps": (_at_least_zero, "a float >= 0"),
    "row_norm": (lambda v: v in ROW_NORMS, f"one of {', '.join(ROW_NORMS)}"),
    "gamma": (_at_least_zero, "a float >= 0"),
    "normalised": (lambda v: isinstance(v, bool), "True or False"),
    "max_norm": (lambda v: _number(v) and v > 0, "a float > 0"),
    "least_step": (_at_least_zero, "a float >= 0"),
    "initial_norm": (lambda v: _at_least_zero(v) and v > 0, "a finite float > 0"),
    "block_lr_ratio": (_scheduled(_at_least_zero), f"a float >= 0, or {_SCHEDULE}"),
    "row_lr_ratio": (_scheduled(_at_least_zero), f"a float >= 0, or {_SCHEDULE}"),
    "block_grid": (_grid, "None, a number of row blocks, or a pair (row blocks, column blocks)"),
    "betas": (lambda v: _numbers(v, 2) and all(0 <= b < 1 for b in v), "two floats in [0, 1)"),
}
