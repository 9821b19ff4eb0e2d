"""The images of a run, or latents of them, split into a training and a held-out part, behind one small interface.

`check` finds what is wrong with the settings before anything starts; it, and importing this module, needs no torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dit_train import console
from dit_train.config import ConfigError, DataConfig
from dit_train.data import arrays, folder, latents, shapes
from dit_train.data.latents import Encoding
from dit_train.data.table import Samples, Table, Unreadable, to_model_range

if TYPE_CHECKING:
    from torch import Tensor

_IMAGES: dict[str, Callable[[DataConfig], Table]] = {
    "digits": arrays.digits,
    "fashion_mnist": arrays.fashion_mnist,
    "image_folder": folder.image_folder,
    "synthetic": shapes.synthetic,
}


def _open(config: DataConfig, device: str) -> Table:
    return latents.latents(config, device) if config.source == "latents" else _IMAGES[config.source](config)


_DRAWS_FOR_A_REPLACEMENT = 20  # where so many of a class are unreadable, the disk is


@dataclass(frozen=True)
class Source:
    """Images [N, C, H, W] and labels [N] by index, decoded as they are asked for."""

    table: Table
    rows: np.ndarray
    """Rows of the table that belong to this part, [len] int64, rising."""
    _instead: dict[int, int] = field(default_factory=dict, repr=False)
    """The row that is read in place of each that this process has found unreadable."""

    def __len__(self) -> int:
        return len(self.rows)

    def images(self, indices: Sequence[int] | np.ndarray) -> Tensor:
        """[N] integers in 0..len−1 -> [N, C, H, W] uint8 on the CPU.

        Raises `Unreadable`, a `ConfigError` that names the file, for an image that can't be read and is not replaced.

        Latents are decoded, on the device that `load` was given; without an autoencoder that is a `ConfigError`.
        """
        import torch  # here, so that a check of the settings starts at once

        rows = self.rows[np.asarray(indices, dtype=np.int64)]
        if not self.table.replace:
            return torch.from_numpy(self.table.read(rows))
        try:
            return torch.from_numpy(self.table.read(self._readable(rows)))
        except Unreadable:
            return torch.from_numpy(np.concatenate([self._read_or_replace(int(row)) for row in rows]))

    def count_replaced(self, indices: Sequence[int] | np.ndarray) -> int:
        """How many of the images that `images` gave for these indices stand in for unreadable ones."""
        return sum(int(row) in self._instead for row in self.rows[np.asarray(indices, dtype=np.int64)])

    def _readable(self, rows: np.ndarray) -> np.ndarray:
        return np.array([self._instead.get(int(row), int(row)) for row in rows], dtype=np.int64)

    def _read_or_replace(self, row: int) -> np.ndarray:
        """[1, C, H, W] uint8 of a row, or of another of its class and part, drawn from the row's number alone."""
        from dit_train.rng import stream

        try:
            return self.table.read(self._readable(np.array([row])))
        except Unreadable as error:
            first = error
        peers = self.rows[self.table.labels[self.rows] == self.table.labels[row]]
        draw = stream(0, "unreadable", row)
        for other in map(int, draw.choice(peers, _DRAWS_FOR_A_REPLACEMENT)):
            with contextlib.suppress(Unreadable):
                image = self.table.read(np.array([other]))
                self._instead[row] = other
                self._tell(str(first))
                return image
        raise Unreadable(f"{first}; so are {_DRAWS_FOR_A_REPLACEMENT} of its class drawn in its place")

    def _tell(self, reason: str) -> None:
        """A line for each file at first, then at the 16th, 32nd, 64th, …: a broken disk must not fill the log."""
        count = len(self._instead)
        if count <= 10 or (count >= 16 and count.bit_count() == 1):
            console.err(f"data: {reason}. Another of its class takes its place ({count} so far)")

    def inputs(self, indices: Sequence[int] | np.ndarray, seed: int, *keys: int | str, samples: Samples) -> Tensor:
        """What the model learns from: [N] integers in 0..len−1 -> fp32 [N, C, H, W] on the CPU.

        Images in −1..1; of latents a sample of each posterior, with a standard deviation of about 1 by shift and scale.
        Its noise, and whether a training image is mirrored, depend on (seed, keys, sample) alone, as
        `dit_train.rng` has it; ``samples`` holds N numbers.
        """
        import torch

        if self.table.read_latents is None:
            return to_model_range(self.images(indices))
        rows = self.rows[np.asarray(indices, dtype=np.int64)]
        return torch.from_numpy(self.table.read_latents(rows, seed, keys, samples))

    def labels(self, indices: Sequence[int] | np.ndarray) -> Tensor:
        """[N] integers in 0..len−1 -> [N] int64 on the CPU."""
        import torch

        return torch.from_numpy(self.table.labels[self.rows[np.asarray(indices, dtype=np.int64)]])


@dataclass(frozen=True)
class Dataset:
    """A named set of images of one shape with classes."""

    name: str
    train: Source
    heldout: Source
    channels: int
    image_size: int
    """Side of what the model sees, in pixels or latent cells."""
    num_classes: int
    class_names: tuple[str, ...]
    image_name: str
    """What its images are, for records: the name, or where they come from if the model sees latents."""
    encoding: Encoding | None = None
    """How images became latents; None where the model sees images."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """[C, H, W] of its images."""
        return _image_shape(self)


@dataclass(frozen=True)
class Summary:
    """What a dataset will be, known without reading it."""

    channels: int
    image_size: int
    num_classes: int
    train_count: int
    heldout_count: int
    encoding: Encoding | None = None

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """[C, H, W] of the images."""
        return _image_shape(self)


def _image_shape(data: Dataset | Summary) -> tuple[int, int, int]:
    if data.encoding is not None:
        return 3, data.encoding.image_size, data.encoding.image_size
    return data.channels, data.image_size, data.image_size


def load(config: DataConfig, device: str = "cpu") -> Dataset:
    """Open the images of the settings. Raises `ConfigError`, one line that names the fix.

    `device` is where images of latents are decoded.
    """
    table = _open(config, device)
    return Dataset(
        name=config.source,
        train=Source(table, np.flatnonzero(~table.heldout)),
        heldout=Source(table, np.flatnonzero(table.heldout)),
        channels=table.channels,
        image_size=table.image_size,
        num_classes=len(table.class_names),
        class_names=table.class_names,
        image_name=table.image_name or config.source,
        encoding=table.encoding,
    )


def check(config: DataConfig) -> Summary:
    """Raise the `ConfigError` that `load` would, without decoding the images; else say what they will be.

    An image that is unreadable inside a readable folder shows only when it is decoded.
    """
    for name in ("vae", "images"):
        if config.source != "latents" and vars(config)[name] is not None:
            raise ConfigError(f"data.{name}: belongs to data.source latents, not to {config.source}; leave it out")
    if config.source == "fashion_mnist":
        train, heldout = arrays.fashion_mnist_counts(config)
        return Summary(1, arrays.FASHION_SIZE, len(arrays.FASHION_CLASSES), train, heldout)
    table = _open(config, "cpu")
    table.probe()
    heldout = int(table.heldout.sum())
    counts = len(table.heldout) - heldout, heldout
    return Summary(table.channels, table.image_size, len(table.class_names), *counts, table.encoding)
