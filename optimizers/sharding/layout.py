"""Which part of which matrix every rank holds, read from the DTensor itself; the user passes no mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import product

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from .matrices import Matrix, MatrixSplit, Rect, Region, Span, matrices
from .team import Team


@dataclass(frozen=True)
class Layout:
    """Where the matrices of one parameter, or one of them (``alone``), lie.

    ``regions[r]``: what rank r of ``team`` holds; one region without a team. Ranks of equal ``replicas[r]`` hold the
    parameter once between them. ``rank`` is this process's rank in the team. ``is_cut``: whether ranks have to meet to
    see whole matrices. ``groups``: over which ones matrices are divided, ``column_groups`` among them their columns.
    ``row_groups`` divide the rows of the parameter, whether or not they divide those of its matrices.
    """

    matrices: tuple[Matrix, ...]
    regions: tuple[Region, ...]
    replicas: tuple[int, ...] = (0,)
    rank: int = 0
    team: Team | None = None
    is_cut: bool = False
    groups: tuple[dist.ProcessGroup, ...] = field(default=(), compare=False)
    column_groups: tuple[dist.ProcessGroup, ...] = field(default=(), compare=False)
    row_groups: tuple[dist.ProcessGroup, ...] = field(default=(), compare=False)
    alone: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n) of the first matrix, which is the only one if it travels."""
        return self.matrices[0].shape

    @property
    def is_shared(self) -> bool:
        """Whether ranks meet on a refresh: to see whole matrices, or so that replicas need not all do the same work."""
        return self.is_cut or len(set(self.replicas)) > 1

    def each(self) -> list[Layout]:
        """Layouts of the single matrices, since each may travel in another bucket."""
        return [replace(self, matrices=(matrix,), alone=True) for matrix in self.matrices]

    @cached_property
    def shares(self) -> tuple[Rect, ...]:
        """The part of the first matrix that each rank of the team holds."""
        return tuple(self.matrices[0].within(region)[0] for region in self.regions)

    @cached_property
    def here(self) -> list[tuple[Matrix, Rect, int]]:
        """The matrices of which this rank holds anything, what it holds, and in which local row that begins."""
        found = [(matrix, *matrix.within(self.regions[self.rank])) for matrix in self.matrices]
        return [(matrix, rect, row) for matrix, rect, row in found if rect.rows or len(self.matrices) == 1]

    @cached_property
    def places(self) -> dict[Matrix, int]:
        """Which of the matrices one is."""
        return {matrix: i for i, matrix in enumerate(self.matrices)}

    def select(self, shard: Tensor) -> Tensor:
        """[rows, n] or [e, rows, n]: what this layout covers of a local shard. A view if strides allow."""
        shard = as_matrices(shard)
        return self._part(shard, *self.here[0]) if self.alone else shard

    def views(self, selected: Tensor) -> list[Tensor]:
        """What ``select`` returned by matrix, in the order of ``here``: 2-D each."""
        if self.alone or (len(self.matrices) == 1 and selected.ndim == 2):
            return [selected]
        if len(self.here) == selected.shape[0] and selected.ndim == 3:
            return list(selected.unbind())
        return [self._part(selected, *found) for found in self.here]

    def _part(self, shard: Tensor, matrix: Matrix, rect: Rect, row: int) -> Tensor:
        if rect.rows == 0:
            return shard[:0].flatten(0, -2)
        if shard.ndim == 3:
            shard = shard[matrix.index - self.regions[self.rank].index[0]]
        return shard[row : row + matrix.step * (rect.rows - 1) + 1 : matrix.step]


def chunk_rows(m: int, ranks: int) -> tuple[int, ...]:
    """Rows a rank under FSDP2's Shard(0): ⌈m/ranks⌉ until they are used up; the last ranks hold fewer or none."""
    return tuple(_chunk((0, m), ranks, rank)[1] for rank in range(ranks))


def layout_of(
    param: Tensor,
    label: str,
    split: MatrixSplit | None = None,
    within_replica: bool = False,
    holders: Team | None = None,
) -> Layout:
    """The layout of a parameter of a matrix algorithm; ``label`` names it in errors.

    Args:
        param: plain, or a DTensor whose placements are Replicate, Shard or _StridedShard (FSDP2 over TP).
        split: which logical matrices its rows are.
        within_replica: leave other replicas out of the team.
        holders: ranks that each hold the same values if ``param`` is plain; None: it stands alone.

    Raises:
        ValueError: for 0-D and 1-D parameters, other placements, shards that are no boxes, and splits that do not fit.
    """
    if param.ndim < 2:
        raise ValueError(
            f"{label}: a {param.ndim}-D parameter is no matrix; put it into a group with algorithm='adamw' "
            "(param_groups(model) does so)"
        )
    shard = local(param.detach())
    if shard.ndim > 3 and not shard.is_contiguous():
        raise ValueError(
            f"{label}: a convolution weight has to be contiguous to be updated as a matrix; "
            "call .to(memory_format=torch.contiguous_format) on the model"
        )
    box = tuple(param.shape) if param.ndim == 3 else (1, param.shape[0], math.prod(param.shape[1:]))
    found = matrices(box, split, label)
    if not isinstance(param, DTensor):
        whole = Region(*((0, size) for size in box))
        if holders is None or within_replica:
            return Layout(found, (whole,))
        ranks = range(len(holders.ranks))
        return Layout(found, (whole,) * len(ranks), tuple(ranks), holders.ranks.index(dist.get_rank()), holders)
    mesh = param.device_mesh
    try:
        held = regions_of(tuple(param.shape), tuple(param.placements), tuple(mesh.shape))
    except ValueError as error:
        raise ValueError(
            f"{label}: {error} on a mesh of shape {tuple(mesh.shape)}; matrix algorithms take plain tensors, and "
            "Replicate, Shard of rows, columns or matrices of a stack, and the _StridedShard that fully_shard makes "
            "over tensor parallelism"
        ) from None
    position = {rank: i for i, rank in enumerate(mesh.mesh.flatten().tolist())}
    own = held[position[dist.get_rank()]]
    _check_local(shard, own[0], label)
    team = _team(param, [r for r, i in position.items() if not within_replica or held[i][1] == own[1]])
    regions, replicas = zip(*(held[position[r]] for r in team.ranks), strict=True)
    column_dim = 2 if param.ndim == 3 else 1
    row_axes, column_axes = (
        [i for i in _cutting(param) if param.placements[i].dim == dim] for dim in (column_dim - 1, column_dim)
    )
    is_cut = bool(_cutting(param)) and _is_cut(found, regions, param.ndim == 3 or split is not None)
    return Layout(
        found, regions, replicas, team.ranks.index(dist.get_rank()), team, is_cut,
        groups=dividing_groups(param) if is_cut else (),
        column_groups=tuple(mesh.get_group(i) for i in column_axes),
        row_groups=tuple(mesh.get_group(i) for i in row_axes),
    )  # fmt: skip


@lru_cache(maxsize=1024)
def regions_of(
    shape: tuple[int, ...], placements: tuple[Placement, ...], mesh_shape: tuple[int, ...]
) -> tuple[tuple[Region, int], ...]:
    """For every position of a mesh, last axis fastest: its region, and the number of the replica it belongs to.

    Raises:
        ValueError: naming the placements, if a rank would not hold a box of a matrix.
    """
    cutting = [i for i, p in enumerate(placements) if mesh_shape[i] > 1 and type(p) is not Replicate]
    orders = [_order(d, placements, mesh_shape, cutting) for d in range(len(shape))]
    if any(not isinstance(placements[i], (Shard, _StridedShard)) for i in cutting) or (
        len(shape) > 3 and any(placements[i].dim > 1 for i in cutting)
    ):
        raise ValueError(f"placements {placements} are not supported")
    deep = math.prod(shape[2:])
    found = []
    for position in product(*map(range, mesh_shape)):
        spans: list[Span] = []
        for size, order in zip(shape, orders, strict=True):
            span = (0, size)
            for axis in order:
                span = _chunk(span, mesh_shape[axis], position[axis])
            spans.append(span)
        if len(shape) != 3:
            spans = [(0, 1), spans[0], (spans[1][0] * deep, spans[1][1] * deep)]
        replica = 0
        for axis, size in enumerate(mesh_shape):
            if axis not in cutting:
                replica = replica * size + position[axis]
        found.append((Region(*spans), replica))
    return tuple(found)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank (the tensor itself if it is no DTensor). Call under ``no_grad``."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def dividing_groups(param: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The process groups over which a parameter is divided, () for a plain one."""
    return tuple(param.device_mesh.get_group(i) for i in _cutting(param)) if isinstance(param, DTensor) else ()


def as_matrices(tensor: Tensor) -> Tensor:
    """[m, n] or [e, m, n] of a local shard; convolutions are flattened to [out, in·…]. A view if strides allow."""
    return tensor if tensor.ndim <= 3 else tensor.flatten(1)


def _cutting(param: DTensor) -> list[int]:
    """Mesh axes that divide the parameter. Those of size 1 do not count."""
    return [i for i, p in enumerate(param.placements) if param.device_mesh.size(i) > 1 and type(p) is not Replicate]


def _order(
    dim: int, placements: Sequence[Placement], mesh_shape: Sequence[int], cutting: Sequence[int]
) -> tuple[int, ...]:
    """Mesh axes that cut a dimension, in the order in which they do.

    FSDP2 cuts what tensor parallelism has cut already, although its mesh axis comes first: ``_StridedShard`` with the
    product of the later axes as its split factor.
    """
    order: list[int] = []
    for axis in reversed(cutting):
        placement = placements[axis]
        if getattr(placement, "dim", None) != dim:
            continue
        if isinstance(placement, _StridedShard):
            if placement.split_factor != math.prod(mesh_shape[i] for i in order):
                raise ValueError(f"placements {tuple(placements)} do not give every rank a box of the tensor")
            order.append(axis)
        else:
            order.insert(0, axis)
    return tuple(order)


def _chunk(span: Span, parts: int, which: int) -> Span:
    """What torch.chunk gives to one of several parts: ⌈count/parts⌉ until they are used up."""
    start, count = span
    most = math.ceil(count / parts)
    skipped = min(count, which * most)
    return start + skipped, min(most, count - skipped)


def _check_local(shard: Tensor, region: Region, label: str) -> None:
    held = tuple(as_matrices(shard).shape)
    expected = tuple(count for _, count in region)
    if held != (expected if shard.ndim == 3 else expected[1:]):
        raise ValueError(
            f"{label}: rank {dist.get_rank()} holds a shard of shape {tuple(shard.shape)} where its placements give "
            f"{expected} matrices, rows and columns; only torch.chunk's division is supported"
        )


def _team(param: DTensor, ranks: Sequence[int]) -> Team:
    """The group of a mesh axis if one has just these ranks."""
    mesh = param.device_mesh
    axes = [i for i in range(mesh.ndim) if mesh.size(i) > 1]
    for axis in axes:
        if mesh.size(axis) == len(ranks):
            group = mesh.get_group(axis)
            members = tuple(dist.get_process_group_ranks(group))
            if set(members) == set(ranks):
                return Team(members, group)
    return Team(tuple(sorted(ranks)))


def _is_cut(found: Sequence[Matrix], regions: Sequence[Region], several: bool) -> bool:
    """Whether matrices have to travel: a stack cut between matrices has not, nor do parts inside the shards."""
    if not several:
        return True
    kinds = {matrix[1:]: matrix for matrix in found}.values()
    for region in dict.fromkeys(regions):
        for matrix in kinds:
            rect, _ = matrix._replace(index=region.index[0]).within(region)
            if rect.rows * rect.columns not in (0, matrix.rows * matrix.columns):
                return True
    return False
