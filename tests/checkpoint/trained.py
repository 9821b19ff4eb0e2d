"""A small model with its average and optimizer that has made some steps, and ways to save and to compare it."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

import optimizers
from dit_train.checkpoint import contents, listing
from dit_train.checkpoint.manifest import RunState
from dit_train.checkpoint.saving import Saver
from dit_train.checkpoint.writing import Retention
from dit_train.parallel.shard import local
from dit_train.run.ema import EMA


class Trained:
    """Made alike on all ranks from a seed; `sharded` over them by FSDP2."""

    def __init__(self, seed: int, steps: int, *, sharded: bool = False, width: int = 6) -> None:
        torch.manual_seed(seed)
        # 13 rows: uneven over 2 and 3 ranks
        self.model = nn.Sequential(nn.Linear(width, 13), nn.Linear(13, width))
        if sharded:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
            fully_shard(self.model, mesh=mesh)
        self.optimizer = optimizers.PeriodicRowMuon(optimizers.param_groups(self.model), lr=0.1, period=3)
        self.ema = EMA(self.model, 0.5)
        self.width = width
        for step in range(steps):
            self.step(step)

    def step(self, number: int) -> None:
        """One step of training."""
        self.model(torch.randn(4, self.width)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ema.update(number)

    def tensors(self) -> dict[str, Tensor]:
        """This rank's parts of all that is saved."""
        return {name: local(tensor) for name, tensor in self._tensors().items()}

    def copy(self) -> dict[str, Tensor]:
        """The same, not changing with the model."""
        return {name: tensor.clone() for name, tensor in self.tensors().items()}

    def _tensors(self) -> dict[str, Tensor]:
        return contents.tensors(self.model, self.ema, self.optimizer)

    def saver(
        self, run: Path, *, background: bool = False, keep: int = 2, keep_every: int = 0, said: list[str] | None = None
    ) -> Saver:
        """What saves it."""
        return Saver(
            run,
            self.model,
            self.ema,
            self.optimizer,
            fixed={"a": 1},
            retention=Retention(keep, keep_every),
            background=background,
            say=[].append if said is None else said.append,
        )

    def save(self, run: Path, *steps: int, **how: int) -> Path:
        """Checkpoints of these steps; the folder of the last."""
        with self.saver(run, **how) as saver:
            for step in steps:
                saver.save(RunState(step=step, train_seconds=0.1))
        return listing.folder_of_step(run, steps[-1])


def names(run: Path) -> list[str]:
    """What lies among a run's checkpoints."""
    return sorted(path.name for path in listing.folder_of(run).iterdir())


@contextmanager
def full_disk(largest: int) -> Iterator[None]:
    """No file of this process can grow beyond `largest` bytes: writing fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
