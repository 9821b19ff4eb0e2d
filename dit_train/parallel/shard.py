"""A DiT over all ranks: built on the meta device, sharded by FSDP2, filled with weights that no mesh changes."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dit_train.config import ModelConfig, ParallelConfig
from dit_train.data.sources import Dataset, Summary
from dit_train.model.dit import DiT
from dit_train.model.init import initialize
from dit_train.parallel.memory import checkpointing
from dit_train.parallel.mesh import World
from dit_train.parallel.tensor import split_matrices


def build(
    model: ModelConfig,
    parallel: ParallelConfig,
    data: Dataset | Summary,
    world: World,
    compute_dtype: torch.dtype,
    seed: int | None,
) -> DiT:
    """The model with fp32 master weights sharded over the mesh and forward/backward in `compute_dtype`.

    Without a seed the weights are left as memory has them, for a checkpoint to fill.
    """
    with torch.device("meta"):
        dit = DiT(model, channels=data.channels, image_size=data.image_size, num_classes=data.num_classes)
    shard(dit, parallel, world, compute_dtype)
    dit.to_empty(device=world.device)
    if seed is None:
        dit.refill_tables()
    else:
        initialize(dit, seed)
    return dit


def shard(dit: DiT, parallel: ParallelConfig, world: World, compute_dtype: torch.dtype) -> None:
    """Tensor parallelism, then activation checkpointing, compilation, and FSDP2 of each block and the root, in place.

    In that order, so that each wraps the one before: recomputed parts are compiled too, and FSDP2 gathers once for
    a block's forward and once for its backward.
    """
    if world.tensor_mesh is not None:
        split_matrices(dit, world.tensor_mesh)
    for block in dit.blocks:
        block.recompute = checkpointing(parallel.activation_checkpointing)
        if parallel.compile:
            block.compile(backend=parallel.compile_backend)
    param_dtype = None if compute_dtype == torch.float32 else compute_dtype
    blocks = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    # the root must not cast its inputs: bf16 would round t = 0.998 to 1
    root = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    reshard = parallel.reshard_after_forward
    for block in dit.blocks:
        fully_shard(block, mesh=world.data_mesh, reshard_after_forward=reshard, mp_policy=blocks)
    fully_shard(dit, mesh=world.data_mesh, mp_policy=root)
    _prefetch(list(dit.blocks), parallel.prefetch)


def _prefetch(blocks: list[FSDPModule], ahead: int) -> None:
    """Gather the weights of the next blocks, in either direction, while one computes."""
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + ahead])
        block.set_modules_to_backward_prefetch(blocks[max(0, i - ahead) : i][::-1])


def reshard(model: nn.Module) -> None:
    """Give back gathered weights; after a forward without backward the root's parameters would stay plain tensors."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor, sharing its memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def distinct(tensor: torch.Tensor) -> int:
    """Over how many ranks the elements of a tensor are divided; all other ranks hold copies of theirs."""
    if not isinstance(tensor, DTensor):
        return 1
    count = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        count *= 1 if placement.is_replicate() else size
    return count
