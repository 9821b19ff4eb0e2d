"""Which state tensors a parameter has, of what dtype, and where they lie."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .column_state import Columns
from .quantized_state import BLOCK, CODES, LEAST_ELEMENTS


@dataclass(frozen=True)
class Form:
    """How a state tensor relates to its parameter.

    Args:
        per_row: a number for each row of every matrix, [m, 1] or [e, m, 1], instead of one for each element. A fact on
            a whole matrix is kept so as well, the same in all its rows: so it is where its rows are, on any ranks.
        per_column: r numbers for each column of every matrix, as ``columns`` says where it is known.
        dtype: None is fp32, fp64 for fp64 parameters.
        code: of 8 bits; a second tensor, ``absmax_key``, then has a scale for each block of a row.
        of_weight: whether it begins as a copy of the parameter instead of as zeros.
    """

    per_row: bool = False
    dtype: torch.dtype | None = None
    code: str | None = None
    per_column: bool = False
    columns: Columns | None = None
    of_weight: bool = False

    def dtype_for(self, p: Tensor) -> torch.dtype:
        """Of a new tensor."""
        if self.code is not None:
            return CODES[self.code].dtype
        return self.dtype or wide(p.dtype)


ELEMENTS = Form()
ROWS = Form(per_row=True)
COLUMNS = Form(per_column=True)
WEIGHT = Form(of_weight=True)


def absmax_key(key: str) -> str:
    """The state key of the scales of an 8-bit state."""
    return f"{key}_absmax"


def wide(dtype: torch.dtype) -> torch.dtype:
    """Of state that is not narrowed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def fits_code(p: Tensor) -> bool:
    """Whether state of 8 bits pays off for a parameter: not for vectors and small tensors."""
    return p.ndim >= 2 and p.numel() >= LEAST_ELEMENTS


def new_state(p: Tensor, form: Form) -> Tensor:
    """The first value of a form, sharded as the parameter is."""
    dtype = form.dtype_for(p)
    if form.per_column:
        return form.columns.first(p, dtype)
    if form.per_row:
        return _for_rows(p, 1, dtype)
    zeros = torch.zeros_like(p.detach(), dtype=dtype, memory_format=torch.contiguous_format)
    return zeros.copy_(p.detach()) if form.of_weight else zeros


def new_absmax(p: Tensor) -> Tensor:
    """Zeros for the scales of an 8-bit state: [m, blocks] or [e, m, blocks]."""
    return _for_rows(p, blocks(p), torch.float32)


def blocks(p: Tensor) -> int:
    """Blocks of a row: of at most 2048 columns, none across a shard.

    Where ranks divide the columns, each has as many; the count is then that of this division.
    """
    parts = math.prod(size for size, _ in _column_axes(p))
    columns = math.ceil(_columns(p) / parts)
    return parts * max(1, math.ceil(columns / BLOCK))


def expected(p: Tensor, form: Form, key: str) -> tuple[tuple[int, ...], tuple[Placement, ...]]:
    """Global shape and placements of a state tensor, () for plain ones; ``key`` may be that of the scales."""
    if form.code is not None and key.endswith("_absmax"):
        return _row_shape(p, blocks(p)), _row_placements(p, blocks(p))
    if form.per_column:
        return form.columns.shape(p), form.columns.placements(p)
    if form.per_row:
        return _row_shape(p, 1), _row_placements(p, 1)
    return tuple(p.shape), tuple(p.placements) if isinstance(p, DTensor) else ()


def _columns(p: Tensor) -> int:
    return p.shape[2] if p.ndim == 3 else math.prod(p.shape[1:])


def _column_axes(p: Tensor) -> list[tuple[int, int]]:
    """(size, number) of the mesh axes that divide the columns."""
    if not isinstance(p, DTensor):
        return []
    dim = 2 if p.ndim == 3 else 1
    return [
        (p.device_mesh.size(i), i)
        for i, placed in enumerate(p.placements)
        if p.device_mesh.size(i) > 1 and type(placed) is not Replicate and placed.dim == dim
    ]


def _row_shape(p: Tensor, count: int) -> tuple[int, ...]:
    return (*(p.shape[:2] if p.ndim == 3 else p.shape[:1]), count)


def _row_placements(p: Tensor, count: int) -> tuple[Placement, ...]:
    """Rows lie where the parameter's do. One number a row is the same on all ranks that share the row."""
    if not isinstance(p, DTensor):
        return ()
    last = 2 if p.ndim == 3 else 1
    axes = {number for _, number in _column_axes(p)}
    divided = Shard(last) if count > 1 else Replicate()
    return tuple(divided if i in axes else placed for i, placed in enumerate(p.placements))


def _for_rows(p: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    shape = _row_shape(p, count)
    if not isinstance(p, DTensor):
        return torch.zeros(shape, dtype=dtype, device=p.device)
    shard, parts = p.detach().to_local(), math.prod(size for size, _ in _column_axes(p)) if count > 1 else 1
    held = (*(shard.shape[:2] if p.ndim == 3 else shard.shape[:1]), count // parts)
    local = torch.zeros(held, dtype=dtype, device=shard.device)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, p.device_mesh, _row_placements(p, count), run_check=False, shape=torch.Size(shape), stride=stride
    )


OF_OPTIONS = ("neuron_second_moment", "last_gradient", "last_weight")
"""State that options of a group add, and that goes with them: switched on again, it would tell of steps long ago."""


def forms_of(state: Mapping[str, Form], group: Mapping[str, Any], p: Tensor) -> dict[str, Form]:
    """The state of a parameter: that of its group's algorithm, and what options of the group add to it."""
    found = dict(state)
    if "momentum_buffer" in found:
        asked = group.get("momentum_dtype")
        found["momentum_buffer"] = Form(code=asked) if isinstance(asked, str) else Form(dtype=asked)
    if group.get("neuron_beta2") is not None:
        found["neuron_second_moment"] = ROWS
    if group.get("mars_gamma"):
        found["last_gradient"] = ELEMENTS
        if group["mars_exact"]:
            found["last_weight"] = WEIGHT
    return {key: ELEMENTS if form.code and not fits_code(p) else form for key, form in found.items()}
