"""The images of a run, split into a training and a held-out part, behind one small interface.

`check` finds what is wrong with the settings before anything starts; it, and importing this module, needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dit_train.config import DataConfig
from dit_train.data import arrays, folder, shapes
from dit_train.data.table import Table

if TYPE_CHECKING:
    from torch import Tensor

_OPENERS: dict[str, Callable[[DataConfig], Table]] = {
    "digits": arrays.digits,
    "fashion_mnist": arrays.fashion_mnist,
    "image_folder": folder.image_folder,
    "synthetic": shapes.synthetic,
}


@dataclass(frozen=True)
class Source:
    """Images [N, C, H, W] and labels [N] by index, decoded as they are asked for."""

    table: Table
    rows: np.ndarray
    """Rows of the table that belong to this part, [len] int64, rising."""

    def __len__(self) -> int:
        return len(self.rows)

    def images(self, indices: Sequence[int] | np.ndarray) -> Tensor:
        """[N] integers in 0..len−1 -> [N, C, H, W] uint8 on the CPU; `ConfigError` names a file that can't be read."""
        import torch  # here, so that a check of the settings starts at once

        return torch.from_numpy(self.table.read(self.rows[np.asarray(indices, dtype=np.int64)]))

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
    """Side in pixels."""
    num_classes: int
    class_names: tuple[str, ...]


@dataclass(frozen=True)
class Summary:
    """What a dataset will be, known without reading it."""

    channels: int
    image_size: int
    num_classes: int
    train_count: int
    heldout_count: int


def load(config: DataConfig) -> Dataset:
    """Open the images of the settings. Raises `ConfigError`, one line that names the fix."""
    table = _OPENERS[config.source](config)
    return Dataset(
        name=config.source,
        train=Source(table, np.flatnonzero(~table.heldout)),
        heldout=Source(table, np.flatnonzero(table.heldout)),
        channels=table.channels,
        image_size=table.image_size,
        num_classes=len(table.class_names),
        class_names=table.class_names,
    )


def check(config: DataConfig) -> Summary:
    """Raise the `ConfigError` that `load` would, without decoding the images; else say what they will be.

    An image that is unreadable inside a readable folder shows only when it is decoded.
    """
    if config.source == "fashion_mnist":
        train, heldout = arrays.fashion_mnist_counts(config)
        return Summary(1, arrays.FASHION_SIZE, len(arrays.FASHION_CLASSES), train, heldout)
    table = _OPENERS[config.source](config)
    table.probe()
    heldout = int(table.heldout.sum())
    return Summary(table.channels, table.image_size, len(table.class_names), len(table.heldout) - heldout, heldout)


def to_model_range(images: Tensor) -> Tensor:
    """uint8 0..255 -> fp32 −1..1, any shape: x/127.5 − 1."""
    return images.float() / 127.5 - 1.0
