"""Where a parameter's local shard lies in its whole matrix, read from the DTensor itself.

A parameter of 2 dimensions is a matrix [m, n]; of 4 or more a convolution [out, in, …] seen as [out, in·…]; of 3 a
stack of matrices [e, m, n].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard


@dataclass(frozen=True)
class Layout:
    """Where the rows of one parameter lie.

    ``shape`` (m, n) of one whole matrix. ``rows[r]``: how many rows of it rank r of ``group`` holds, rank 0 the first
    ones; empty if every matrix of this parameter lies whole on the ranks that hold any of it. ``rank`` is this
    process's rank in ``group``.
    """

    shape: tuple[int, int]
    rows: tuple[int, ...] = ()
    group: dist.ProcessGroup | None = None
    rank: int = 0

    @property
    def is_cut(self) -> bool:
        """Whether ranks have to meet to see the whole matrix."""
        return len(self.rows) > 1


def chunk_rows(m: int, ranks: int) -> tuple[int, ...]:
    """Rows a rank under FSDP2's Shard(0): ⌈m/ranks⌉ until they are used up; the last ranks hold fewer or none."""
    most = math.ceil(m / ranks)
    return tuple(max(0, min(most, m - r * most)) for r in range(ranks))


def layout_of(param: Tensor, label: str) -> Layout:
    """The layout of a parameter of a matrix algorithm; ``label`` names it in errors.

    Raises:
        ValueError: for 0-D and 1-D parameters, and for placements other than Shard(0) or Replicate on one mesh axis.
    """
    if param.ndim < 2:
        raise ValueError(
            f"{label}: a {param.ndim}-D parameter is no matrix; put it into a group with algorithm='adamw' "
            "(param_groups(model) does so)"
        )
    is_stack = param.ndim == 3
    shape = (param.shape[1], param.shape[2]) if is_stack else (param.shape[0], math.prod(param.shape[1:]))
    axis = _shard_axis(param, label)
    if axis is None or is_stack:  # Shard(0) of a stack cuts between matrices, never through one
        _require_view(param, label)
        return Layout(shape)
    mesh = param.device_mesh
    rows = chunk_rows(shape[0], mesh.size(axis))
    rank = mesh.get_local_rank(axis)
    held = param.to_local().shape[0]
    if held != rows[rank]:
        raise ValueError(
            f"{label}: rank {rank} of {len(rows)} holds {held} rows where Shard(0) of {shape[0]} rows gives "
            f"{rows[rank]}; only torch.chunk's division is supported"
        )
    _require_view(param, label)
    return Layout(shape, rows, mesh.get_group(axis), rank)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank (the tensor itself if it is no DTensor). Call under ``no_grad``."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_matrices(tensor: Tensor) -> Tensor:
    """[m, n] or [e, m, n] of a local shard; convolutions are flattened to [out, in·…]. A view if strides allow."""
    return tensor if tensor.ndim <= 3 else tensor.flatten(1)


def _shard_axis(param: Tensor, label: str) -> int | None:
    """The mesh axis over which dim 0 is cut, None if nothing is. Mesh axes of size 1 do not count."""
    if not isinstance(param, DTensor):
        return None
    mesh, placements = param.device_mesh, param.placements
    cuts = [i for i, p in enumerate(placements) if mesh.size(i) > 1 and type(p) is not Replicate]
    real_axes = sum(mesh.size(i) > 1 for i in range(mesh.ndim))
    if not cuts:
        return None
    placement = placements[cuts[0]]
    if real_axes > 1 or type(placement) is not Shard or placement.dim != 0:
        raise ValueError(
            f"{label}: placements {tuple(placements)} on a mesh of shape {tuple(mesh.shape)} are not supported; "
            "matrix algorithms take plain tensors, Replicate, and Shard(0) on one mesh axis (FSDP2's fully_shard)"
        )
    return cuts[0]


def _require_view(param: Tensor, label: str) -> None:
    shard = local(param.detach())
    if shard.ndim > 3 and not shard.is_contiguous():
        raise ValueError(
            f"{label}: a convolution weight has to be contiguous to be updated as a matrix; "
            "call .to(memory_format=torch.contiguous_format) on the model"
        )
