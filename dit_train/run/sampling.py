"""Images from the model by global index: noise, label and pixels of sample i do not depend on ranks or batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from dit_train import rng
from dit_train.config import Config, ConfigError, DataConfig
from dit_train.data import autoencoder
from dit_train.data.latents import NO_VAE
from dit_train.data.sources import Dataset, Summary
from dit_train.diffusion.guidance import guided
from dit_train.diffusion.samplers import SAMPLERS
from dit_train.parallel.mesh import World
from eval.generate import generate, quantize
from eval.ranks import gather

_GAP_GREY = 70
"""Level, of 255, of the lines between samples."""


class Sampler:
    """``sampler(indices int64 [N]) -> uint8 [N, C, H, W]``, where sample i has class ``labels(i)``.

    ``rule`` is how floats become uint8, see `eval.generate.quantize`; latents are decoded by `data.vae` before.

    A diverged model must not end its run: values that are not finite become black, and `broken` holds the indices of
    such samples.
    """

    def __init__(
        self,
        config: Config,
        data: Dataset | Summary,
        model: torch.nn.Module,
        device: torch.device,
        labels: Callable[[Tensor], Tensor],
        rule: str = "round",
    ) -> None:
        self._settings, self._model, self._device, self.labels = config.sample, model, device, labels
        self._rule = rule
        self._shape = (data.channels, data.image_size, data.image_size)
        self._null_label = data.num_classes
        self._decode = decoder(config.data, data, device)
        self.broken: set[int] = set()

    def __call__(self, indices: Tensor) -> Tensor:
        """Samples by global index."""
        samples = self.values(indices)
        finite = samples.isfinite().flatten(1).all(1).cpu()
        self.broken |= set(indices[~finite].tolist())
        return quantize(samples.nan_to_num(-1, -1, -1), self._rule).cpu()

    def values(self, indices: Tensor) -> Tensor:
        """The same before quantisation, about -1..1: floats [N, C, H, W] of images on the model's device."""
        settings = self._settings
        noise = rng.normal(self._shape, settings.seed, "sample", samples=indices.tolist()).to(self._device)
        labels = self.labels(indices).to(self._device)
        velocity = guided(self._model, labels, self._null_label, settings.guidance)
        return self._decode(SAMPLERS[settings.sampler](velocity, noise, settings.steps))

    def count_broken(self) -> int:
        """How many samples of all ranks were not finite; every rank calls it."""
        told = [self.broken] * dist.get_world_size()
        dist.all_gather_object(told, self.broken)
        return len(set().union(*told))


def can_decode(config: DataConfig) -> bool:
    """Whether what a model makes can become images."""
    return config.source != "latents" or config.vae is not None


def decoder(config: DataConfig, data: Dataset | Summary, device: torch.device) -> Callable[[Tensor], Tensor]:
    """What turns samples of a model, fp32 [N, C, H, W], into images about -1..1: nothing, or the VAE of latents.

    Raises:
        ConfigError: the model sees latents, and no VAE is named or it cannot be loaded.
    """
    encoding = data.encoding
    if encoding is None:
        return lambda samples: samples
    if config.vae is None:
        raise ConfigError(NO_VAE)
    vae = autoencoder.load(config.vae, str(device))
    return lambda samples: vae.decode(encoding.raw(samples))


def provenance(
    config: Config, compute_dtype: str, labels: str, classes: Tensor, weights: str = "ema", rule: str = "round"
) -> dict[str, Any]:
    """What a score has to say about how its images were sampled; ``classes`` int64 [N] by the law ``labels``."""
    settings, train = config.sample, config.train
    return {
        "sampler": f"{settings.sampler}-{settings.steps}",
        "guidance": settings.guidance,
        "sample_seed": settings.seed,
        "labels": labels,
        "classes_sha256": hashlib.sha256(classes.numpy().tobytes()).hexdigest(),
        "quantize": rule,
        "weights": f"ema {train.ema_decay}{' ramped' * train.ema_ramp}" if weights == "ema" else weights,
        "compute_dtype": compute_dtype,
        **({"vae_sha256": autoencoder.inspect(config.data.vae).sha256} if config.data.vae else {}),
    }


def grid(config: Config, data: Dataset, model: torch.nn.Module, world: World) -> Tensor:
    """A picture of grid x grid samples, a column a class, uint8 [C, height, width]; all ranks call it, all get it."""
    side = config.sample.grid
    indices = torch.arange(side * side)
    images = Sampler(config, data, model, world.device, lambda i: i % side % data.num_classes)
    made = [(kept, pixels) for kept, pixels in generate(images, indices, config.sample.batch, world.data_group)]
    shape = data.image_shape
    mine = torch.cat([pixels for _, pixels in made]) if made else torch.empty((0, *shape), dtype=torch.uint8)
    where = torch.cat([kept for kept, _ in made]) if made else indices[:0]
    rows, _ = gather(mine.flatten(1), where, world.data_group)
    gap = max(1, shape[-1] // 16)
    tiles = F.pad(rows.view(-1, *shape), (0, gap, 0, gap), value=_GAP_GREY)
    return rearrange(tiles, "(r c) k h w -> k (r h) (c w)", r=side)


def save_picture(picture: Tensor, path: Path, pixels: int = 512) -> None:
    """Write a uint8 [C, H, W] picture as PNG, enlarged by a whole factor to about `pixels`."""
    from PIL import Image

    factor = max(1, pixels // picture.shape[-1])
    array: Any = picture.repeat_interleave(factor, 1).repeat_interleave(factor, 2)
    array = rearrange(array if len(picture) == 3 else array.expand(3, -1, -1), "k h w -> h w k").numpy()
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)
