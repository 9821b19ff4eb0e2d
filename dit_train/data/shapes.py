"""Coloured shapes of any size, drawn on the spot: data for tests and for measuring speed without any files."""

from __future__ import annotations

import colorsys

import numpy as np

from dit_train.config import ConfigError, DataConfig
from dit_train.data.table import Table, every_nth, require_size

SHAPES = ("disc", "square", "diamond", "ring", "cross")
MOST = 10_000_000
"""Images; their labels and places in the split are held in memory."""


def synthetic(config: DataConfig) -> Table:
    """`count` RGB images; image i has class i mod `classes`, which fixes shape and hue, and depends on i alone."""
    size = require_size(config)
    if config.classes < 1 or config.count < config.classes:
        raise ConfigError(
            f"data.count: must be at least data.classes ({config.classes}), and that 1, not {config.count}"
        )
    if config.count > MOST:
        raise ConfigError(f"data.count: at most {MOST:,} images are drawn, not {config.count}")
    labels = np.arange(config.count, dtype=np.int64) % config.classes

    def read(rows: np.ndarray) -> np.ndarray:
        out = np.empty((len(rows), 3, size, size), dtype=np.uint8)
        for image, row in zip(out, rows, strict=True):
            image[:] = draw(int(row), size, config.classes)
        return out

    names = tuple(f"{SHAPES[c % len(SHAPES)]} {c}" for c in range(config.classes))
    return Table(labels, every_nth(labels, config), read, 3, size, names)


def draw(index: int, size: int, classes: int) -> np.ndarray:
    """Image `index`, [3, size, size] uint8: a shape of its class's hue, at a random place, over a dark grey."""
    generator = np.random.Generator(np.random.Philox(key=index))
    label = index % classes
    centre, radius = generator.uniform(0.35, 0.65, 2), generator.uniform(0.2, 0.35)
    brightness, ground = generator.uniform(0.7, 1.0), generator.uniform(0.0, 0.2)
    pixels = (np.arange(size) + 0.5) / size
    y, x = (pixels[:, None] - centre[0]) / radius, (pixels[None, :] - centre[1]) / radius
    edge = (1 - _distance(SHAPES[label % len(SHAPES)], x, y)) * radius * size  # in pixels, positive inside
    cover = np.clip(edge + 0.5, 0, 1)  # of a pixel, so that edges are smooth
    colour = np.array(colorsys.hsv_to_rgb(label / classes, 0.8, brightness))[:, None, None]
    return np.rint(255 * (ground + (colour - ground) * cover)).astype(np.uint8)


def _distance(shape: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """[size, size]: below 1 inside a shape of radius 1."""
    if shape == "disc":
        return np.hypot(x, y)
    if shape == "square":
        return np.maximum(abs(x), abs(y)) * 1.2
    if shape == "diamond":
        return abs(x) + abs(y)
    if shape == "ring":
        return 1 + abs(np.hypot(x, y) - 0.75) - 0.25
    return np.minimum(np.maximum(abs(x), 3 * abs(y)), np.maximum(3 * abs(x), abs(y)))  # a cross
