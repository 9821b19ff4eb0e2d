"""Tensor parallelism: the matrices of attention and MLP split over ranks that see the same images.

    query, key, value, up, gate    by rows (output features): a rank computes some heads, some hidden features
    output, down                   by columns (input features): partial sums, added over the ranks

Modulation, embeddings and the final layer are whole on each rank (as far as FSDP2 leaves them whole): they see one
vector an image, or are small. Shoeybi et al., Megatron-LM, arXiv 1909.08053.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from dit_train.model.dit import DiT


def split_matrices(dit: DiT, mesh: DeviceMesh) -> None:
    """Make the blocks' matrices DTensors over `mesh`, in place; heads and hidden features divide by its size."""
    for block in dit.blocks:
        attention = ["query", "key", "value"]
        plan = {f"attention.{name}": ColwiseParallel() for name in attention}
        plan["attention.output"] = RowwiseParallel()
        plan |= {f"mlp.{name}": ColwiseParallel() for name in ("up", "gate") if hasattr(block.mlp, name)}
        plan["mlp.down"] = RowwiseParallel()
        for name in ("query_norm", "key_norm"):
            if isinstance(getattr(block.attention, name), nn.RMSNorm):
                # heads, dimension 1 of [N, heads, T, d/heads], are dealt; the gain is on all, and its gradient adds up
                plan[f"attention.{name}"] = SequenceParallel(sequence_dim=1, use_local_output=True)
        parallelize_module(block, mesh, plan)
