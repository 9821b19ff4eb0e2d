"""The process group of a run and the device mesh over it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dit_train.config import ConfigError, ParallelConfig


@dataclass(frozen=True)
class World:
    """This rank's place among all ranks."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and writes."""
        return self.rank == 0


def choose_device_type(config: ParallelConfig) -> str:
    """``cuda`` or ``cpu``.

    Raises:
        ConfigError: CUDA is asked for and there is no GPU.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("parallel.device: cuda, but torch sees no GPU here; use auto or cpu")
    return "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"


@contextmanager
def joined(config: ParallelConfig) -> Iterator[World]:
    """Join the process group (NCCL on GPUs, gloo on CPUs; alone outside torchrun) and leave it at the end.

    A group that the caller has already started is used as it is, and left to the caller.
    """
    kind = choose_device_type(config)
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if dist.is_initialized():
        yield _world(device)
        return
    # gloo beside NCCL: agreements on the CPU and checkpoints need no GPU memory
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, device_id=device if kind == "cuda" else None)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield _world(device)
    # not after an error: the peers may sit in a collective, and NCCL would wait for them here
    dist.barrier()  # gloo aborts now and then when a peer leaves while another still talks
    dist.destroy_process_group()


def _world(device: torch.device) -> World:
    rank, size = dist.get_rank(), dist.get_world_size()
    return World(rank, size, device, init_device_mesh(device.type, (size,), mesh_dim_names=("shard",)))
