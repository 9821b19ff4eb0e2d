"""Images that lie on disk, in a folder, a zip or an ``.npz`` file, as uint8 batches by index.

Nothing is converted without a word: what is changed stands in ``ImageSet.conversions``, all else is refused with its
remedy. Memory is bounded by a batch, whatever the number of images.
"""

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from eval import image_arrays, image_files
from eval.decoding import Reading
from eval.ranks import from_main, raise_together, world

_CHUNK = 64  # images held at once where the caller states no batch


def _nothing_to_verify() -> None:
    """For image files, of which each is read whole when it is decoded."""


@dataclass(frozen=True, eq=False)
class ImageSet:
    """N uint8 images of one shape, decoded when they are asked for.

    Attributes:
        path: where they lie.
        shape: (C, H, W); C is 1 where all are grey.
        labels: int64 [N], or None.
        conversions: what was done to stored pixels, in words; empty where they are taken as they are.
        read: row numbers [B] to uint8 [B, C, H, W].
        verify: raises ValueError where the container is damaged in a way that ``read`` does not see.
    """

    path: str
    length: int
    shape: tuple[int, int, int]
    labels: Tensor | None
    conversions: tuple[str, ...]
    read: Callable[[list[int]], np.ndarray] = field(repr=False)
    verify: Callable[[], None] = field(repr=False, default=_nothing_to_verify)

    def __len__(self) -> int:
        return self.length

    def batch(self, indices: Tensor) -> Tensor:
        """Images uint8 [B, C, H, W] of int64 indices [B] in any order; also an ``eval.generate.Images``.

        Raises:
            TypeError: indices are not int64 [B].
            IndexError: an index beyond the set.
            ValueError: an image is broken, named.
        """
        if indices.dtype != torch.int64 or indices.ndim != 1:
            raise TypeError(f"indices must be int64 [B], not {indices.dtype} {list(indices.shape)}")
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < len(self):
            raise IndexError(f"{self.path} holds images 0..{len(self) - 1}, not {indices.tolist()}")
        return torch.from_numpy(self.read(indices.tolist()))

    def batches(
        self,
        indices: Tensor,
        batch_size: int,
        group: dist.ProcessGroup | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's share of the images ``indices`` as (indices [b], images [b, C, H, W]).

        Dealt as by ``eval.generate.generate``, but only what is kept is read, and the next batch is read while the
        caller works on this one. At most two batches are held. Rank 0 verifies the container first. ``progress``
        counts the images of all ranks and is called equally often on every rank.

        Raises:
            ValueError: ``batch_size`` below 1, or as in ``batch``; on every rank alike.
        """
        if batch_size < 1:
            raise ValueError(f"batches of {batch_size} images hold nothing")
        from_main(self.verify, group)
        rank, ranks = world(group)
        batches = indices.split(batch_size) if len(indices) else ()
        mine = iter(batches[rank::ranks])
        with ThreadPoolExecutor(1) as reader:

            def begin() -> tuple[Tensor, Future] | None:
                chosen = next(mine, None)
                return None if chosen is None else (chosen, reader.submit(self.batch, chosen))

            coming = begin()
            for first in range(0, len(batches), ranks):  # as many rounds on every rank: ``progress`` may communicate
                broken = coming[1].exception() if coming else None
                if broken is not None and not isinstance(broken, ValueError):
                    raise broken
                raise_together(broken, group)
                if coming:
                    chosen, images = coming[0], coming[1].result()
                    coming = begin()
                    yield chosen, images
                if progress:
                    progress(min((first + ranks) * batch_size, len(indices)), len(indices))

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of all pixels, uint8 NCHW in the order of the set: equal for equal pixels in any container.

        The first call reads the whole set, on each rank that asks.
        """
        digest = hashlib.sha256()
        for indices in torch.arange(len(self)).split(_CHUNK):
            digest.update(self.batch(indices).numpy())
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """JSON values for a record, all but ``sha256``."""
        return {
            "path": self.path,
            "images": len(self),
            "image_shape": list(self.shape),
            "classes": None if self.labels is None else len(self.labels.unique()),
            "conversions": list(self.conversions),
        }


def open_images(
    path: str | Path,
    *,
    value_range: tuple[float, float] | None = None,
    background: str | None = None,
    center_crop_adm: int | None = None,
    lossy: bool = False,
    class_folders: bool = False,
) -> ImageSet:
    """The images of a folder (PNG, JPEG, WebP, BMP; recursive, by sorted path), of a ``.zip`` of such, or an ``.npz``.

    The ``.npz`` holds ``arr_0`` [N, H, W, C] and perhaps labels ``arr_1`` [N], as ADM writes it. Every file's header is
    looked at here, so that what does not fit fails before any work, on every rank alike. Pixels are decoded later.

    Args:
        path: folder or file.
        value_range: of an array of floats: (0, 1), (-1, 1) or (0, 255). Checked against every image.
        background: colour on which transparent files are seen, e.g. ``"white"``; without it they are refused.
        center_crop_adm: side in pixels of ADM's centre crop, for references from photographs of many sizes.
        lossy: take JPEG and lossy WebP. Right for photographs that exist only so, wrong for generated images.
        class_folders: the first folder of each file's path is its class.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        ValueError: what cannot be scored as it is, in one line with the remedy: fewer than 2 images, sizes that differ,
            16 bits, CMYK, transparency, animation, broken or encrypted files, floats, NaN, 0..1 instead of 0..255, ...
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such folder or file of images")
    verify = _nothing_to_verify
    if path.is_file() and path.suffix.lower() == ".npz":
        if background is not None or center_crop_adm is not None or class_folders:
            raise ValueError(
                f"{path}: background=, center_crop_adm= and class_folders= are for image files, not arrays"
            )
        n, shape, labels, notes, read, verify = image_arrays.open_npz(path, value_range)
    else:
        if value_range is not None:
            raise ValueError(f"{path}: value_range= is for arrays of floats; image files hold 0..255")
        how = Reading(background, center_crop_adm, lossy)
        files = _listed(path)
        shape, notes = image_files.survey(files, how)
        labels = image_files.class_labels(files) if class_folders else None
        n, read = len(files.names), image_files.reader(files, shape, how)
    if n < 2:
        raise ValueError(f"{path}: {n} image in it, but a covariance needs at least 2")
    if 0 in shape:
        raise ValueError(f"{path}: images of shape {list(shape)} hold no pixels")
    images = ImageSet(str(path), n, shape, labels, tuple(notes), read, verify)
    _check_span(images, value_range)
    return images


def _listed(path: Path) -> image_files.Files:
    if path.is_dir():
        return image_files.in_folder(path)
    if path.suffix.lower() == ".zip":
        return image_files.in_zip(path)
    raise ValueError(f"{path}: images come in a folder, a .zip or an .npz file")


def _check_span(images: ImageSet, value_range: tuple[float, float] | None) -> None:
    """Raise ValueError where the whole set is too dark or too bright for the range that it is said to have.

    Looks at images until one settles it: at the first one, as a rule.
    """
    signed = value_range is not None and value_range[0] < 0
    brightest, darkest = 0, 255
    for row in range(len(images)):
        pixels = images.read([row])
        brightest, darkest = max(brightest, int(pixels.max())), min(darkest, int(pixels.min()))
        if brightest > 1 and (darkest < 128 or not signed):
            return
    if brightest == 1:
        raise ValueError(f"{images.path}: the brightest pixel is 1, but uint8 images must span 0..255, not 0..1")
    if signed and brightest > 1:
        raise ValueError(f"{images.path}: no value is below 0, so it is not {value_range}: say value_range=(0, 1)")
