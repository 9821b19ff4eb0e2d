"""The process group of a run and the device mesh over it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dit_train.config import ConfigError, ParallelConfig
from dit_train.parallel import roll_call
from dit_train.run import stop

_SECONDS_TO_MEET = 300.0
"""Between the first rank of a start and the last."""


@dataclass(frozen=True)
class World:
    """This rank's place among all ranks."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    """Of ``replicate`` (only with several replicas), ``shard`` and ``tensor`` (only with tensor parallelism)."""
    store: dist.Store | None = None
    """Of the process group; None where the caller has started it."""

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and writes."""
        return self.rank == 0

    @property
    def tensor_mesh(self) -> DeviceMesh | None:
        """The ranks that share the matrices of a block; None without tensor parallelism."""
        return self.mesh["tensor"] if "tensor" in _names(self.mesh) else None

    @property
    def tensor_size(self) -> int:
        """Ranks that share the matrices of a block, and see the same images."""
        return self.mesh["tensor"].size() if "tensor" in _names(self.mesh) else 1

    @property
    def data_mesh(self) -> DeviceMesh:
        """The ranks that see different images: of ``shard``, or of ``replicate`` and ``shard``."""
        names = tuple(name for name in _names(self.mesh) if name != "tensor")
        return self.mesh[names] if names != _names(self.mesh) else self.mesh

    @property
    def data_size(self) -> int:
        """Ranks that see different images."""
        return self.size // self.tensor_size

    @property
    def data_rank(self) -> int:
        """This rank's number among those that see different images; ranks of a tensor group have the same."""
        return self.rank // self.tensor_size  # tensor is the fastest dimension of the mesh

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks of `data_mesh`; None, all ranks, without tensor parallelism."""
        if self.tensor_size == 1:
            return None
        mesh = self.data_mesh
        return (mesh if mesh.ndim == 1 else mesh._flatten("data")).get_group()


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    assert mesh.mesh_dim_names is not None
    return mesh.mesh_dim_names


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

    Raises:
        Absent: not all ranks have come in time.
    """
    kind = choose_device_type(config)
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if dist.is_initialized():
        yield _world(config, device)
        return
    # gloo beside NCCL: agreements on the CPU and checkpoints need no GPU memory
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    device_id = device if kind == "cuda" else None
    if "RANK" in os.environ:
        with stop.fatal():
            store, rank, size = _meet()
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=device_id)
    else:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=device_id)
    yield _world(config, device, store)
    # not after an error: the peers may sit in a collective, and NCCL would wait for them here
    dist.barrier()  # gloo aborts now and then when a peer leaves while another still talks
    dist.destroy_process_group()


def _meet() -> tuple[dist.Store, int, int]:
    """A store that the ranks of this start share, this rank, and their number."""
    try:
        found = dist.rendezvous("env://", timeout=timedelta(seconds=_SECONDS_TO_MEET))
        store, rank, size = next(iter(found))
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise roll_call.Absent(f"ranks do not meet at {where} ({' '.join(str(error).split())[:200]})") from None
    return roll_call.meet(store, rank, size, _SECONDS_TO_MEET), rank, size


def _world(config: ParallelConfig, device: torch.device, store: dist.Store | None = None) -> World:
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes = {"replicate": config.replicas, "shard": size // (config.replicas * config.tensor), "tensor": config.tensor}
    kept = {name: number for name, number in sizes.items() if number > 1 or name == "shard"}
    mesh = init_device_mesh(device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))
    return World(rank, size, device, mesh, store)
