"""Directions: from the momentum input U of one group of weights to what is subtracted from them.

Each direction takes local shards and returns a ``Step``: views of the weights, a normalised direction for each view
and the factor between the two. Nothing in this file communicates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..orthogonal.newton_schulz import STACK_BYTES, compute_dtype, orthogonalize_all, orthogonalize_pieces
from ..orthogonal.pieces import Pieces, largest_entry
from ..sharding.layout import Layout
from .scaling import row_scale, spectral_scale

Grid = tuple[int, int]


@dataclass
class Step:
    """W_i ← (1 − η·λ)·W_i − η·factor_i·direction_i for every i; the views W_i make up whole local shards."""

    weights: list[Tensor] = field(default_factory=list)
    directions: list[Tensor] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)


Direction = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Layout], Mapping[str, Any]], Step]
"""(weights, inputs, their layouts, group) -> Step. Weights and inputs are [rows, n] or [e, m, n]."""


def iteration_dtype(options: Mapping[str, Any], weight: torch.dtype, device: torch.device) -> torch.dtype:
    """dtype of the Newton–Schulz iterations, which depends on what this rank's hardware does natively."""
    return compute_dtype(options["ns_dtype"], weight, device, options["ns_coefficients"])


def _kernel(options: Mapping[str, Any], weight: Tensor) -> tuple[Any, int | None, float, torch.dtype]:
    """Arguments of Newton–Schulz: coefficients, steps, eps, dtype."""
    dtype = iteration_dtype(options, weight.dtype, weight.device)
    return options["ns_coefficients"], options["ns_steps"], options["eps"], dtype


def orthogonalise(
    matrices: Sequence[Pieces], options: Mapping[str, Any], weight: Tensor, stack_bytes: int = STACK_BYTES
) -> None:
    """Newton–Schulz of whole matrices where they lie, with the options of their group."""
    orthogonalize_pieces(matrices, *_kernel(options, weight), stack_bytes)


def spectral(
    weights: Sequence[Tensor], inputs: Sequence[Tensor], layouts: Sequence[Layout], options: Mapping[str, Any]
) -> Step:
    """Orthogonalise whole matrices that lie on this rank; the directions take the place of the inputs.

    They are rounded to the wire dtype on the way in and out although nothing travels, so that one process and many
    compute the same: the inputs have that dtype.
    """
    step = Step()
    for weight, u, layout in zip(weights, inputs, layouts, strict=True):
        step.weights += layout.views(weight)
        step.directions += layout.views(u)
    orthogonalise([Pieces.whole(u, u) for u in step.directions], options, weights[0])
    step.factors = [spectral_scale(options["adjust_lr_fn"], *w.shape) for w in step.weights]
    return step


def block(
    weights: Sequence[Tensor], inputs: Sequence[Tensor], layouts: Sequence[Layout], options: Mapping[str, Any]
) -> Step:
    """Orthogonalise every block by itself, scaled by the block's own sizes."""
    ratio = options.get("block_lr_ratio", 1.0)
    step, blocks = Step(), []
    for weight, u, layout in zip(weights, inputs, layouts, strict=True):
        for w, x, (matrix, _, _) in zip(layout.views(weight), layout.views(u), layout.here, strict=True):
            size = block_size(options["block_grid"], matrix.shape, w.shape)
            step.weights += _cut(w, size)
            blocks += _cut(x, size)
    step.directions = orthogonalize_all(blocks, *_kernel(options, weights[0]))
    step.factors = [ratio * spectral_scale(options["adjust_lr_fn"], *w.shape) for w in step.weights]
    return step


def row(
    weights: Sequence[Tensor],
    inputs: Sequence[Tensor],
    layouts: Sequence[Layout],
    options: Mapping[str, Any],
    sums: Sequence[Tensor] | None = None,
) -> Step:
    """Divide every row by its 2-norm; a zero row stays zero.

    A row lies wholly on one rank under Shard(0). If columns are divided over ranks, ``sums`` are the whole rows' sums
    of squares, as ``row_sums`` of all of them together.
    """
    step = Step()
    for i, (weight, u, layout) in enumerate(zip(weights, inputs, layouts, strict=True)):
        direction = unit_rows(u) if sums is None else divide_rows(u, sums[i])
        factors = row_factors(layout, options)
        if len(set(factors)) <= 1:  # by far the usual case: no need to take the tensor apart
            step.weights.append(weight)
            step.directions.append(direction)
            step.factors += factors[:1] or [1.0]
        else:
            step.weights += layout.views(weight)
            step.directions += layout.views(direction)
            step.factors += factors
    return step


def row_factors(layout: Layout, options: Mapping[str, Any]) -> list[float]:
    """The factor of the row step of every matrix of which this rank holds anything."""
    ratio, adjust = options.get("row_lr_ratio", 1.0), options["adjust_lr_fn"]
    return [ratio * row_scale(adjust, *matrix.shape) for matrix, _, _ in layout.here]


def row_sums(u: Tensor) -> Tensor:
    """Sums of squares of the rows of ``u`` [..., n], in fp64: squares of every fp32 number are in its range."""
    return torch.linalg.vector_norm(u, dim=-1, keepdim=True, dtype=torch.float64).square_()


def divide_rows(u: Tensor, sums: Tensor) -> Tensor:
    """``u`` [..., n] over the roots of ``sums`` [..., 1]; a zero row stays zero."""
    return u / sums.sqrt().to(u.dtype).clamp_min(torch.finfo(u.dtype).tiny)


def unit_rows(u: Tensor) -> Tensor:
    """``u`` [..., n] with unit rows. The largest entry goes first, so that squares neither overflow nor vanish."""
    tiny = torch.finfo(u.dtype).tiny
    if u.numel() == 0:
        return u.clone()
    r = u / largest_entry(u, -1).clamp_min(tiny)
    return r.div_(torch.linalg.vector_norm(r, dim=-1, keepdim=True).clamp_min(tiny))


def wire_dtype(options: Mapping[str, Any], weight: torch.dtype) -> torch.dtype:
    """dtype in which whole matrices travel on a refresh: as asked, else fp64 for fp64 weights and bf16 for others."""
    if options["wire_dtype"] is not None:
        return options["wire_dtype"]
    return torch.float64 if weight == torch.float64 else torch.bfloat16


def block_size(grid: Grid | int | None, whole: tuple[int, int], local: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of a block: the local shard without a grid, else ⌈m/r⌉ × ⌈n/c⌉ as torch.chunk cuts."""
    if grid is None:
        return max(1, local[0]), local[1]
    r, c = grid if isinstance(grid, tuple) else (grid, 1)
    return math.ceil(whole[0] / r), math.ceil(whole[1] / c)


def _cut(matrix: Tensor, size: tuple[int, int]) -> Iterator[Tensor]:
    if matrix.numel() == 0:
        return
    for rows in matrix.split(size[0], 0):
        yield from rows.split(size[1], 1)
