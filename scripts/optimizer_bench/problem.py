"""What every optimizer of the benchmark gets: a model of matrices sharded by FSDP2, and random gradients."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

Shape = tuple[int, int]


@dataclass(frozen=True)
class Settings:
    """One command's settings, sent to every rank. ``smoke``: times and memory mean nothing, only counts do."""

    ranks: int
    steps: int
    blocks: int
    width: int
    device: str
    compile: bool
    peers: bool
    smoke: bool = False

    @property
    def shapes(self) -> list[Shape]:
        """The matrices of one block: attention output, and up and down of an MLP."""
        return [(self.width, self.width), (4 * self.width, self.width), (self.width, 4 * self.width)]

    @property
    def elements(self) -> int:
        """Elements of all matrices."""
        return self.blocks * sum(m * n for m, n in self.shapes)

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest matrix in bf16, as it travels."""
        return 2 * max(m * n for m, n in self.shapes)

    @property
    def cores(self) -> int:
        """Cores that this process may use."""
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    @property
    def threads(self) -> int:
        """Threads of a rank, so that ranks share the cores."""
        return max(1, self.cores // self.ranks)


class Problem:
    """The model and its gradients on this rank. ``parameters`` makes a copy of the model for each who asks."""

    def __init__(self, settings: Settings, mesh: DeviceMesh) -> None:
        self.settings, self.mesh = settings, mesh
        self.device = torch.device(mesh.device_type)
        draw = torch.Generator().manual_seed(1 + dist.get_rank())
        self.gradients = [_random_like(p, draw) for p in self.parameters()]

    def parameters(self) -> list[nn.Parameter]:
        """Weights of a new model, each block and the root wrapped by ``fully_shard``."""
        torch.manual_seed(0)
        with self.device:
            blocks = [
                nn.Sequential(*(nn.Linear(n, m, bias=False) for m, n in self.settings.shapes))
                for _ in range(self.settings.blocks)
            ]
        model = nn.Sequential(*blocks)
        for block in model:
            fully_shard(block, mesh=self.mesh)
        fully_shard(model, mesh=self.mesh)
        return list(model.parameters())

    def local_gradients(self) -> list[Tensor]:
        """This rank's shards of the gradients."""
        return [g.to_local() for g in self.gradients]

    def owned(self) -> list[Tensor]:
        """Whole matrices, as many as an even deal of the work gives this rank."""
        everyone = sorted(self.settings.shapes * self.settings.blocks, key=lambda s: s[0] * s[1] * min(s))
        mine = everyone[dist.get_rank() :: self.settings.ranks]
        draw = torch.Generator().manual_seed(dist.get_rank())
        return [torch.randn(shape, generator=draw).to(self.device) for shape in mine]


def _random_like(p: Tensor, draw: torch.Generator) -> Tensor:
    assert isinstance(p, DTensor)
    shard = torch.randn(p.to_local().shape, generator=draw).to(p.device)
    return DTensor.from_local(shard, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
