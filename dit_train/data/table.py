"""What every source comes down to: rows with a class, a reader, and which rows are held out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from dit_train.config import ConfigError, DataConfig

if TYPE_CHECKING:
    from torch import Tensor

    from dit_train.data.latents import Encoding

Keys = tuple[int | str, ...]


class Reader(Protocol):
    """What a model learns from, where that are no images."""

    def __call__(self, rows: np.ndarray, seed: int, keys: Keys, samples: Samples) -> np.ndarray:
        """Rows [N] int64 -> fp32 [N, C, H, W], random only by (seed, keys, samples)."""


Samples = range | np.ndarray
"""N numbers of samples, of which each has a stream of its own."""


class Unreadable(ConfigError):
    """A sample cannot be decoded; the message names its file."""


@dataclass(frozen=True)
class Table:
    """All images of a source, before they are split in two."""

    labels: np.ndarray
    """[n] int64."""
    heldout: np.ndarray
    """[n] bool."""
    read: Callable[[np.ndarray], np.ndarray]
    """Rows [N] int64 -> images [N, C, H, W] uint8, an array of its own; may raise `Unreadable`."""
    channels: int
    """Of what the model sees, as the next."""
    image_size: int
    class_names: tuple[str, ...]
    probe: Callable[[], None] = lambda: None
    """Looks at a few images without decoding them; raises `ConfigError`."""
    replace: bool = False
    """Whether another image of its class takes the place of one that is unreadable."""
    encoding: Encoding | None = None
    """How images became the latents that the model sees; None where it sees images."""
    read_latents: Reader | None = None
    """Reads those latents."""
    image_name: str | None = None
    """What `read` gives, where that is not told by the name of the source."""


def every_nth(labels: np.ndarray, config: DataConfig) -> np.ndarray:
    """[n] bool: of each class the `heldout_every`-th image and its multiples, in the order of the rows.

    Raises `ConfigError` where that leaves nothing to train on, or nothing held out.
    """
    every = config.heldout_every
    if every < 2:
        raise ConfigError(f"data.heldout_every: must be at least 2, not {every}; 5 holds out a fifth of the images")
    order = np.argsort(labels, kind="stable")
    counts = np.bincount(labels)
    rank = np.empty(len(labels), dtype=np.int64)  # of an image within its class
    rank[order] = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    heldout = rank % every == every - 1
    if not heldout.any():
        raise ConfigError(
            f"data.heldout_every: {every} holds out nothing; no class has more than {counts.max()} images"
        )
    return heldout


def require_size(config: DataConfig) -> int:
    """The side that the settings ask for. Raises `ConfigError` where they name none."""
    if config.image_size is None or config.image_size < 1:
        raise ConfigError(f"data.image_size: {config.source} needs one, the side in pixels, such as 64")
    return config.image_size


def forbid_other_size(config: DataConfig, size: int) -> None:
    """Raise `ConfigError` where the settings ask for another side than the images have."""
    if config.image_size not in (None, size):
        raise ConfigError(f"data.image_size: {config.source} has images of {size} pixels; leave it out")


def to_model_range(images: Tensor) -> Tensor:
    """uint8 0..255 -> fp32 −1..1, any shape: x/127.5 − 1."""
    return images.float() / 127.5 - 1.0
