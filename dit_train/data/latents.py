"""Latents of an autoencoder, as ``scripts/encode_latents.py`` writes them.

    LATENTS/manifest.json        how they were made, and what they are; without "parts" it is not finished
    LATENTS/labels.npy           int64 [n]
    LATENTS/part-00000.npy …     fp16 or fp32 [k, 2C, h, w]: mean and log-variance of each image's posterior
    LATENTS/mirrored-00000.npy … the same of the mirrored images, with --flip

Moments are stored as the encoder gave them. They are shifted and scaled here, once, when they are read; what a sampler
makes is scaled back before it is decoded, by the same numbers of the manifest.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dit_train.config import ConfigError, DataConfig
from dit_train.data import autoencoder, folder
from dit_train.data.table import Keys, Samples, Table, every_nth, forbid_other_size

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST, LABELS = "manifest.json", "labels.npy"
NO_VAE = "data.vae: latents become images only by it; name the folder of their autoencoder"


@dataclass(frozen=True)
class Encoding:
    """How images became latents."""

    vae: str
    """Name of the autoencoder's folder."""
    encoder_sha256: str
    image_size: int
    """Side in pixels of the images, which are RGB."""
    shift: tuple[float, ...]
    scale: tuple[float, ...]
    names_sha256: str
    """Of the images' names."""
    settings_sha256: str
    """Of everything that decides what a model sees."""

    def scaled(self, raw: np.ndarray) -> np.ndarray:
        """Latents [N, C, h, w] of the encoder -> what a model sees, with a standard deviation of about 1."""
        shift, scale = (np.array(values, np.float32).reshape(-1, 1, 1) for values in (self.shift, self.scale))
        return (raw - shift) * scale

    def raw(self, scaled: Tensor) -> Tensor:
        """The other way, for the decoder; fp32 [N, C, h, w] on any device."""
        shift, scale = (scaled.new_tensor(values).view(-1, 1, 1) for values in (self.shift, self.scale))
        return scaled / scale + shift


def latents(config: DataConfig, device: str = "cpu") -> Table:
    """Latents of the folder `path`, memory-mapped. Their images are those of the folder `images` if it is given.

    Else they are what the autoencoder `vae` makes, on `device`, of the means.
    """
    if config.path is None:
        raise ConfigError("data.path: latents need one, a folder that scripts/encode_latents.py wrote")
    root = Path(config.path).expanduser()
    manifest = read_manifest(root)
    try:
        encoding = _encoding(manifest)
        names = tuple(manifest["settings"]["classes"])
        plain = _Shards(root, [part for part in manifest["parts"] if not part["mirrored"]])
        mirrored = _Shards(root, [part for part in manifest["parts"] if part["mirrored"]])
        labels = np.load(root / LABELS, allow_pickle=False)
        _check_whole(encoding, plain, mirrored, labels, len(names))
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"data.path: {root}: damaged ({reason}); encode the images again") from None
    forbid_other_size(config, encoding.image_size)
    table = _Latents(encoding, plain, mirrored, every_nth(labels, config))
    channels, side = plain.shape[0] // 2, plain.shape[1]
    return Table(
        labels,
        table.heldout,
        _images(config, encoding, plain, device),
        channels,
        side,
        names,
        probe=lambda: _probe(config, encoding),
        encoding=encoding,
        read_latents=table.draw,
        image_name="decoded latents" if config.images is None else "encoded images",
    )


def read_manifest(root: Path) -> dict[str, Any]:
    """The manifest of finished latents. Raises `ConfigError`."""
    if not (root / MANIFEST).is_file():
        raise ConfigError(f"data.path: {root} holds no latents; scripts/encode_latents.py writes them")
    try:
        manifest = json.loads((root / MANIFEST).read_text())
        parts = manifest.get("parts")
    except (ValueError, AttributeError, OSError, RecursionError):
        raise ConfigError(f"data.path: {root / MANIFEST} is damaged; encode the images again") from None
    if parts is None:
        raise ConfigError(f"data.path: {root} is not finished; the same scripts/encode_latents.py command goes on")
    return manifest


def _encoding(manifest: dict[str, Any]) -> Encoding:
    settings = manifest["settings"]
    vae = settings["vae"]
    decisive = {**settings, "vae": [vae[key] for key in ("encoder_sha256", "shift", "scale")]}
    return Encoding(
        vae=vae["name"],
        encoder_sha256=vae["encoder_sha256"],
        image_size=settings["image_size"],
        shift=tuple(vae["shift"]),
        scale=tuple(vae["scale"]),
        names_sha256=settings["names_sha256"],
        settings_sha256=hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest(),
    )


class _Shards:
    """Rows of many arrays as if they were one."""

    def __init__(self, root: Path, parts: list[dict[str, Any]]) -> None:
        self._arrays = [np.load(root / part["file"], mmap_mode="r", allow_pickle=False) for part in parts]
        shapes = {array.shape[1:] for array in self._arrays}
        for part, array in zip(parts, self._arrays, strict=True):
            right = array.ndim == 4 and len(shapes) == 1 and array.dtype in (np.float16, np.float32)
            if not right or len(array) != part["count"]:
                raise ValueError(f"{part['file']} is {array.dtype} {list(array.shape)}")
        self._ends = np.cumsum([len(array) for array in self._arrays])
        self.count = int(self._ends[-1]) if parts else 0
        self.shape: tuple[int, ...] = shapes.pop() if shapes else ()

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Rows [N] -> fp32 [N, 2C, h, w]."""
        out = np.empty((len(rows), *self.shape), np.float32)
        holder = np.searchsorted(self._ends, rows, side="right")
        for number in np.unique(holder):
            array, here = self._arrays[number], holder == number
            out[here] = array[rows[here] - (self._ends[number] - len(array))]
        return out


def _check_whole(encoding: Encoding, plain: _Shards, mirrored: _Shards, labels: np.ndarray, classes: int) -> None:
    """Raise ValueError where the parts of a folder do not fit together."""
    if plain.count == 0 or plain.shape[0] != 2 * len(encoding.shift) or plain.shape[1] != plain.shape[2]:
        raise ValueError(f"{plain.count} posteriors of {list(plain.shape)} for {len(encoding.shift)} channels")
    if mirrored.count and (mirrored.count, mirrored.shape) != (plain.count, plain.shape):
        raise ValueError(f"{mirrored.count} mirrored latents of {list(mirrored.shape)} beside {plain.count}")
    if labels.shape != (plain.count,) or labels.dtype != np.int64 or not 0 <= labels.min() <= labels.max() < classes:
        raise ValueError(f"{LABELS} does not fit to {plain.count} latents of {classes} classes")


@dataclass(frozen=True)
class _Latents:
    encoding: Encoding
    plain: _Shards
    mirrored: _Shards
    heldout: np.ndarray

    def draw(self, rows: np.ndarray, seed: int, keys: Keys, samples: Samples) -> np.ndarray:
        """A sample of each posterior, of the mirrored image for half of the training samples; scaled."""
        from dit_train import rng  # needs torch, which a check of the settings does not

        if self.mirrored.count:
            coins = rng.uniform(seed, "mirror", *keys, samples=samples).numpy()
            turned = (coins < 0.5) & ~self.heldout[rows]
            moments = np.empty((len(rows), *self.plain.shape), np.float32)
            moments[~turned], moments[turned] = self.plain.read(rows[~turned]), self.mirrored.read(rows[turned])
        else:
            moments = self.plain.read(rows)
        mean, log_variance = np.split(moments, 2, axis=1)
        noise = rng.normal(mean.shape[1:], seed, "posterior", *keys, samples=samples).numpy()
        return self.encoding.scaled(mean + np.exp(log_variance / 2) * noise)


def _images(config: DataConfig, encoding: Encoding, plain: _Shards, device: str) -> Any:
    """Rows [N] -> images [N, 3, H, W] uint8, for scores."""
    if config.images is not None:
        by_class = folder.listing(config.images, "data.images")
        if folder.names_sha256(by_class) != encoding.names_sha256:
            raise ConfigError(f"data.images: {config.images} holds other images than were encoded; name their folder")
        return folder.reader(by_class, encoding.image_size)

    def decoded(rows: np.ndarray) -> np.ndarray:
        if config.vae is None:
            raise ConfigError(NO_VAE)
        import torch

        from eval.generate import quantize

        means = np.split(plain.read(rows), 2, axis=1)[0]
        return quantize(autoencoder.load(config.vae, device).decode(torch.from_numpy(means))).cpu().numpy()

    return decoded


def _probe(config: DataConfig, encoding: Encoding) -> None:
    """Refuse a `vae` that is not that of the latents."""
    if config.vae is None:
        return
    try:
        found = autoencoder.inspect(config.vae)
    except ConfigError as error:
        raise ConfigError(f"data.vae: {error}") from None
    if found.encoder_sha256 != encoding.encoder_sha256:
        raise ConfigError(
            f"data.vae: {config.vae} has another encoder than made these latents, {encoding.vae}; name that one, or "
            "one that differs from it in the decoder alone"
        )
