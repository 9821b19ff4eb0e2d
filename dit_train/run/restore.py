"""A trained model, reopened from its run folder to sample from."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dit_train import overlays
from dit_train.checkpoint import listing, reading
from dit_train.checkpoint.listing import Checkpoint
from dit_train.config import Config, ConfigError, ParallelConfig
from dit_train.data import sources
from dit_train.model.dit import DiT
from dit_train.parallel import precision, shard
from dit_train.parallel.mesh import World

Weights = Literal["ema", "model"]


@dataclass(frozen=True)
class Trained:
    """What is known of a run's checkpoint before its weights are read."""

    config: Config
    images: sources.Summary
    checkpoint: Checkpoint

    def model(self, world: World, weights: Weights = "ema") -> DiT:
        """The model in evaluation mode over all ranks of ``world``, which may be other than trained it. Collective."""
        config, dtype = self.config, precision.DTYPES[self.checkpoint.state.compute_dtype]
        dit = shard.build(config.model, ParallelConfig(), self.images, world, dtype, seed=None)
        reading.load_weights(self.checkpoint, dit, weights)
        return dit.eval().requires_grad_(False)


def reopen(run: str | Path, step: int | None = None, vae: str | None = None) -> Trained:
    """The newest checkpoint of a run folder, or that of ``step``; ``vae`` takes the place of ``data.vae``.

    Raises:
        ConfigError: no run folder, no such checkpoint, or a damaged one.
    """
    folder = Path(run)
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder}: no run folder (config.yaml is missing)")
    config = overlays.read([folder / "config.yaml"])
    if vae is not None:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, vae=vae))
    found = listing.find_latest(folder) if step is None else listing.find(folder, step)
    if found is None:
        raise ConfigError(f"{folder}: no checkpoint yet; train it first")
    return Trained(config, sources.check(config.data), found)
