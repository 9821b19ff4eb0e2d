"""The autoencoder behind latents: what its folder says, and images to latents and back. Only here is diffusers met.

A folder is one that ``AutoencoderKL.save_pretrained`` writes: ``config.json`` and a safetensors file. Nothing is
fetched, and other files with weights are not read, since they may run code.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dit_train.config import ConfigError
from dit_train.data.table import to_model_range

if TYPE_CHECKING:
    import torch
    from torch import Tensor

WEIGHTS = "diffusion_pytorch_model.safetensors"
_ENCODER = ("encoder.", "quant_conv.")
_AT_ONCE = 16
"""Images decoded at a time: at 512 pixels one takes a gigabyte on its way."""


@dataclass(frozen=True)
class Info:
    """What the folder of an autoencoder says without torch."""

    name: str
    sha256: str
    """Of the weights file."""
    encoder_sha256: str
    """Of the encoder's tensors, which alone decide the latents: some autoencoders differ in the decoder only."""
    channels: int
    """C, of a latent."""
    factor: int
    """Pixels a side over latent cells a side."""
    shift: tuple[float, ...]
    """[C], see `scale`."""
    scale: tuple[float, ...]
    """[C]: a model sees (z − shift)·scale of a latent z."""


def inspect(folder: str | Path) -> Info:
    """Read a folder's config and hash its weights. Raises `ConfigError`, one line, for what is not as it must be."""
    root = Path(folder).expanduser()
    try:
        config = json.loads((root / "config.json").read_text())
        kind = config["_class_name"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        hint = f"; name {root / 'vae'}" if (root / "vae").is_dir() else ""
        raise ConfigError(f"{root}: no autoencoder, whose folder has a config.json of diffusers{hint}") from None
    if kind != "AutoencoderKL":
        raise ConfigError(f"{root}: holds a {kind}, but latents are those of an AutoencoderKL")
    if not (root / WEIGHTS).is_file():
        raise ConfigError(f"{root}: no {WEIGHTS}; save the autoencoder with safe_serialization=True")
    try:
        channels, blocks = int(config["latent_channels"]), len(config["block_out_channels"])
        shift, scale = _normalisation(config, channels)
        whole, encoder = _hashes(root / WEIGHTS)
    except (KeyError, ValueError, TypeError, AttributeError, OSError) as error:
        raise ConfigError(f"{root}: damaged ({type(error).__name__}: {error}); copy it again") from None
    if config.get("in_channels", 3) != 3:
        raise ConfigError(f"{root}: encodes images of {config['in_channels']} channels, not RGB")
    return Info(root.resolve().name, whole, encoder, channels, 2 ** (blocks - 1), shift, scale)


def _normalisation(config: dict[str, Any], channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(shift, scale), each [C], of a diffusers config, which has one number for all channels or statistics of each."""
    factor = float(config.get("scaling_factor") or 0.18215)  # the class's default, of Stable Diffusion 1 and 2
    if config.get("latents_mean") is None or config.get("latents_std") is None:
        return (float(config.get("shift_factor") or 0.0),) * channels, (factor,) * channels
    means, stds = (tuple(map(float, config[key])) for key in ("latents_mean", "latents_std"))
    if not len(means) == len(stds) == channels:
        raise ValueError(f"latents_mean and latents_std must have {channels} numbers")
    return means, tuple(factor / std for std in stds)


def _hashes(path: Path) -> tuple[str, str]:
    """SHA-256 of a safetensors file, and of its encoder's tensors by name."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = 8 + int.from_bytes(data[:8], "little")
        header = {name: about for name, about in json.loads(data[8:start]).items() if name != "__metadata__"}
        if start + max(about["data_offsets"][1] for about in header.values()) != len(data):
            raise ValueError(f"{path.name} is cut short")
        encoder = hashlib.sha256()
        for name in sorted(name for name in header if name.startswith(_ENCODER)):
            first, last = header[name]["data_offsets"]
            encoder.update(f"{name} {header[name]['dtype']} {header[name]['shape']}\n".encode())
            encoder.update(data[start + first : start + last])
        return hashlib.sha256(data).hexdigest(), encoder.hexdigest()


class Autoencoder:
    """An AutoencoderKL in fp32 on one device; of raw latents, neither shifted nor scaled."""

    def __init__(self, vae: torch.nn.Module, device: torch.device) -> None:
        self._vae, self._device = vae, device

    def moments(self, images: Tensor) -> Tensor:
        """uint8 [N, 3, H, W] -> mean and log-variance of each posterior, fp32 [N, 2C, h, w] on the CPU."""
        import torch

        from eval.extractors.precision import exact  # TF32 would make latents depend on the generation of the GPU

        with exact(self._device):
            posterior = self._vae.encode(to_model_range(images.to(self._device))).latent_dist
            return torch.cat((posterior.mean, posterior.logvar), 1).cpu()

    def decode(self, latents: Tensor) -> Tensor:
        """Raw latents fp32 [N, C, h, w] -> images about −1..1, fp32 [N, 3, H, W], on the device."""
        import torch

        from eval.extractors.precision import exact

        with exact(self._device):
            parts = latents.to(self._device).split(_AT_ONCE)
            return torch.cat([self._vae.decode(part).sample for part in parts])


@lru_cache(maxsize=1)  # each score and each grid decodes
def load(folder: str, device: str) -> Autoencoder:
    """The autoencoder of a folder. Raises `ConfigError` where diffusers cannot build it."""
    import torch
    from diffusers import AutoencoderKL

    path = Path(folder).expanduser()
    try:
        vae = AutoencoderKL.from_pretrained(
            path, local_files_only=True, use_safetensors=True, torch_dtype=torch.float32, low_cpu_mem_usage=False
        )
    except Exception as error:  # whatever diffusers meets in a damaged folder
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path}: diffusers cannot load this autoencoder ({reason}); copy it again") from error
    return Autoencoder(vae.to(device).eval().requires_grad_(False), torch.device(device))
