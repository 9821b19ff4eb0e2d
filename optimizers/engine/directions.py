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
from ..orthogonal.pieces import Pieces
from ..sharding.layout import Layout
from .equilibrate import equilibrated
from .scaling import refresh_scale, spectral_scale
from .schedule import interpolated

Grid = tuple[int, int]


@dataclass
class Step:
    """W_i ← (1 − η·λ)·W_i − η·factor_i·direction_i for every i; the views W_i make up whole local shards.

    ``decays``, if there are any: what to multiply η·λ by for each i.
    """

    weights: list[Tensor] = field(default_factory=list)
    directions: list[Tensor] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    decays: list[float] = field(default_factory=list)


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
    if options["equilibrate"] is not None:
        matrices = [equilibrated(matrix, options["equilibrate"]) for matrix in matrices]
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
    step.factors = [refresh_scale(options, *w.shape) for w in step.weights]
    return step


def signs(scale: Callable[[Mapping[str, Any], int, int], float], decay_by_step: bool = False) -> Direction:
    """The sign of every element times ``scale`` (group, m, n); a weight decay may be as much smaller as the step is."""

    def sign(
        weights: Sequence[Tensor], inputs: Sequence[Tensor], layouts: Sequence[Layout], options: Mapping[str, Any]
    ) -> Step:
        step = Step()
        for weight, u, layout in zip(weights, inputs, layouts, strict=True):
            step.weights += layout.views(weight)
            step.directions += [x.sign() for x in layout.views(u)]
            step.factors += [scale(options, *matrix.shape) for matrix, _, _ in layout.here]
        step.decays = step.factors if decay_by_step else []
        return step

    return sign


def block(
    weights: Sequence[Tensor], inputs: Sequence[Tensor], layouts: Sequence[Layout], options: Mapping[str, Any]
) -> Step:
    """Orthogonalise every block by itself, scaled by the block's own sizes."""
    ratio = interpolated(options.get("block_lr_ratio", 1.0), options["step"])
    step, blocks = Step(), []
    for weight, u, layout in zip(weights, inputs, layouts, strict=True):
        for w, x, (matrix, _, _) in zip(layout.views(weight), layout.views(u), layout.here, strict=True):
            size = block_size(options["block_grid"], matrix.shape, w.shape)
            step.weights += _cut(w, size)
            blocks += _cut(x, size)
    if options["equilibrate"] is not None:
        blocks = [equilibrated(Pieces.whole(x), options["equilibrate"]).example for x in blocks]
    step.directions = orthogonalize_all(blocks, *_kernel(options, weights[0]))
    step.factors = [ratio * spectral_scale(options["adjust_lr_fn"], *w.shape) for w in step.weights]
    return step


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
