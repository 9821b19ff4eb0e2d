"""Bytes that each rank holds, by formula from real placements, for all ranks at once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from dit_train.parallel.mesh import World
from optimizers.sharding.layout import regions_of

_Key = tuple[tuple[int, ...], tuple[Placement, ...], tuple[str, ...], int]


def held(tensors: Iterable[Tensor], world: World) -> np.ndarray:
    """Bytes of the local parts of tensors on every rank, int64 [ranks]; plain tensors are on all of them."""
    kinds: Counter[_Key] = Counter()
    everywhere = 0
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            names = tensor.device_mesh.mesh_dim_names
            kinds[tuple(tensor.shape), tuple(tensor.placements), names, tensor.element_size()] += 1
        else:
            everywhere += tensor.numel() * tensor.element_size()
    total = np.full(world.size, everywhere, dtype=np.int64)
    for (shape, placements, names, item), count in kinds.items():
        total += count * item * _elements(shape, placements, names, world)
    return total


def parameters(model: nn.Module, world: World) -> np.ndarray:
    """Bytes of the sharded parameters, and as many of their gradients, on every rank, int64 [ranks].

    FSDP2 pads each rank's part to the largest, so that all hold as much as the first.
    """
    return np.full(world.size, held(model.parameters(), world)[0])


def states(optimizer: torch.optim.Optimizer, world: World) -> np.ndarray:
    """Bytes of an optimizer's state on every rank, int64 [ranks]."""
    found = (value for state in optimizer.state.values() for value in state.values())
    return held((value for value in found if isinstance(value, Tensor)), world)


def averages(model: nn.Module, world: World) -> np.ndarray:
    """Bytes of the averaged weights on every rank, int64 [ranks]."""
    return held(model.parameters(), world)


def _elements(
    shape: tuple[int, ...], placements: tuple[Placement, ...], names: tuple[str, ...], world: World
) -> np.ndarray:
    """Elements of one tensor on every rank, int64 [ranks]; mesh dimensions that it does not name hold copies."""
    whole = dict(zip(world.mesh.mesh_dim_names, world.mesh.shape, strict=True))
    regions = regions_of(shape if len(shape) > 1 else (*shape, 1), placements, tuple(whole[name] for name in names))
    sizes = np.array([math.prod(count for _, count in region) for region, _ in regions])
    sizes = sizes.reshape([whole[name] if name in names else 1 for name in whole])
    return np.broadcast_to(sizes, tuple(whole.values())).reshape(-1)
