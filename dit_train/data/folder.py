"""A folder of images, one subfolder a class."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from dit_train.config import ConfigError, DataConfig
from dit_train.data.table import Table, Unreadable, every_nth, require_size
from eval.decoding import center_crop

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def image_folder(config: DataConfig) -> Table:
    """RGB images in ``path/<class>/*``, cropped and resized to `image_size`; decoded when they are read.

    Classes and files are in name order. Hidden and other files are passed over, and EXIF rotation is (as in ADM).
    """
    size = require_size(config)
    if config.path is None:
        raise ConfigError("data.path: image_folder needs one, a folder with one folder of images a class")
    by_class = listing(config.path, "data.path")
    labels = labels_of(by_class)

    def probe() -> None:
        for folder in by_class.values():
            with _opened(folder[0]):
                pass

    replace = config.unreadable == "replace"
    read = reader(by_class, size)
    table = Table(labels, every_nth(labels, config), read, 3, size, tuple(by_class), replace=replace)
    return table if replace else dataclasses.replace(table, probe=probe)


def reader(by_class: dict[str, list[str]], size: int) -> Callable[[np.ndarray], np.ndarray]:
    """Rows [N] int64 of a listing -> images [N, 3, size, size] uint8, see `decode`."""
    files = [file for folder in by_class.values() for file in folder]

    def read(rows: np.ndarray) -> np.ndarray:
        out = np.empty((len(rows), 3, size, size), dtype=np.uint8)
        for image, row in zip(out, rows, strict=True):
            image[:] = decode(files[row], size)
        return out

    return read


def labels_of(by_class: dict[str, list[str]]) -> np.ndarray:
    """Classes of a listing's images, [n] int64."""
    return np.repeat(np.arange(len(by_class)), [len(files) for files in by_class.values()]).astype(np.int64)


def names_sha256(by_class: dict[str, list[str]]) -> str:
    """Hash of the classes and names of files, wherever the folder lies."""
    digest = hashlib.sha256()
    for name, files in by_class.items():
        digest.update(
            "".join(f"{name}/{os.path.basename(file)}\n" for file in files).encode("utf-8", "surrogateescape")
        )
    return digest.hexdigest()


def decode(path: str, size: int) -> np.ndarray:
    """One image as [3, size, size] uint8. Raises `Unreadable` that names the file if it cannot be decoded."""
    with _opened(path) as image:
        image.load()
        opened = image.copy()
    return np.asarray(center_crop(to_rgb(opened), size)).transpose(2, 0, 1)


@contextmanager
def _opened(path: str) -> Iterator[Image.Image]:
    try:
        with Image.open(path) as image:
            yield image
    except Exception as error:  # decoders raise whatever they meet: OSError, SyntaxError, zlib.error, ...
        raise Unreadable(f"{path} cannot be read as an image ({type(error).__name__}); replace it") from error


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode to RGB: transparency over white, 16-bit grey scaled to 8 bits."""
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow itself would clip at 255
        image = Image.fromarray(np.rint(np.asarray(image).clip(0, 65535) / 257).astype(np.uint8))
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert("RGB")


def listing(path: str, setting: str) -> dict[str, list[str]]:
    """Class name to the paths of its images, both sorted. Raises `ConfigError` for what is missing or empty.

    `setting` is what the errors call the folder.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        raise ConfigError(f"{setting}: {root} is no folder; it should hold one folder of images a class")
    names = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise ConfigError(f"{setting}: {root} has no folders; put the images of each class into one, {root}/CLASS/")
    by_class = {name: _images_in(root / name) for name in names}
    for name, files in by_class.items():
        if not files:
            raise ConfigError(f"{root / name} has no images ({', '.join(SUFFIXES)}): add some or remove the folder")
    return by_class


def _images_in(folder: Path) -> list[str]:
    """Paths as strings, since a million `Path` objects weigh half a gigabyte."""
    names = sorted(n for n in os.listdir(folder) if n.lower().endswith(SUFFIXES) and not n.startswith("."))
    return [os.path.join(folder, name) for name in names]
