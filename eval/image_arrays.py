"""Images in the arrays of an ``.npz`` file, in the layout of ADM's evaluation, read row by row.

A zipped array cannot be mapped to memory, and ``numpy.load`` would hold all of it: 9.8 GB for 50,000 images of 256x256.
So rows are read one by one: from a member that is stored as it is (``numpy.savez``) at their place in the file, from a
deflated one (``numpy.savez_compressed``) by unpacking forward to them. The latter costs one pass over the file where
indices rise from batch to batch, as they do in a score, and begins anew for each batch that lies before the last.
"""

import struct
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from eval.files import DAMAGED

_RANGES = ((0, 1), (-1, 1), (0, 255))
_PIECE = 1 << 20  # bytes read at once where only the check sum is wanted
_SHAPE_FIX = "save uint8 [N, H, W, C] with C 1 or 3"


def open_npz(
    path: Path, value_range: tuple[float, float] | None
) -> tuple[int, tuple[int, int, int], Tensor | None, list[str], Callable[[list[int]], np.ndarray], Callable[[], None]]:
    """``arr_0`` [N, H, W, C] and, where it is there, ``arr_1`` [N] of an ``.npz`` file.

    Returns:
        (N, (C, H, W), labels int64 [N] or None, conversions in words, function from rows to uint8 [B, C, H, W],
        function that reads ``arr_0`` once and raises ValueError unless it has its check sum).

    Raises:
        ValueError: not an ``.npz`` file, no ``arr_0``, another layout or dtype, floats without ``value_range``; each
            with the remedy.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            member = _member(path, archive)
            names = {name.removesuffix(".npy") for name in archive.namelist()}
    except DAMAGED as error:
        raise ValueError(f"{path}: cannot be read as an .npz file ({error})") from error
    n, height, width, channels = _checked_layout(path, member.shape)
    notes = _checked_values(path, member.dtype, value_range)
    if {"mu", "sigma"} <= names:
        notes.append(f"the file also holds mu and sigma of other images: not used, only the {n} images are")
    labels = _labels(path, n) if "arr_1" in names else None

    def read(rows: list[int]) -> np.ndarray:
        pixels = member.rows(rows)
        if value_range is not None:
            pixels = _to_levels(path, pixels, rows, value_range)
        return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))

    return n, (channels, height, width), labels, notes, read, member.verify


class _Member:
    """Rows of one ``.npy`` member of a zip file; several threads may ask."""

    def __init__(self, path: Path, name: str, offset: int | None, start: int, shape: tuple[int, ...], dtype: np.dtype):
        self.shape, self.dtype = shape, dtype
        self._path, self._name, self._offset = path, name, offset  # None: deflated
        self._start = start  # of the first row, within the member
        self._lock = threading.Lock()
        self._unpacking: BinaryIO | None = None

    def rows(self, rows: list[int]) -> np.ndarray:
        """[B, *shape[1:]] of the stored dtype. Raises ValueError that names the file where it is damaged."""
        made = np.empty((len(rows), *self.shape[1:]), self.dtype)
        try:
            with self._lock:
                self._fill(made, rows)
        except DAMAGED as error:
            raise ValueError(f"{self._path}: {self._name} is damaged ({error}); write the file anew") from error
        return made

    def verify(self) -> None:
        """Read all of it once for its check sum, which rows read here and there pass by. Raises as ``rows``."""
        try:
            with zipfile.ZipFile(self._path) as archive, archive.open(self._name) as file:
                while file.read(_PIECE):
                    pass
        except DAMAGED as error:
            raise ValueError(f"{self._path}: {self._name} is damaged ({error}); write the file anew") from error

    def _fill(self, made: np.ndarray, rows: list[int]) -> None:
        nbytes = self.dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))
        file, base = self._file()
        try:
            for place in sorted(range(len(rows)), key=rows.__getitem__):  # forward, however they were asked for
                file.seek(base + rows[place] * nbytes)
                data = file.read(nbytes)
                if len(data) < nbytes:
                    raise EOFError(f"it ends within row {rows[place]}")
                made[place] = np.frombuffer(data, self.dtype).reshape(self.shape[1:])
        finally:
            if self._offset is not None:
                file.close()

    def _file(self) -> tuple[BinaryIO, int]:
        """A file and the place of row 0 in it: fresh for a stored member, the one that is unpacked for a deflated."""
        if self._offset is not None:
            return open(self._path, "rb"), self._offset + self._start
        if self._unpacking is None:
            self._unpacking = zipfile.ZipFile(self._path).open(self._name)  # noqa: SIM115 - stays open where it stands
        return self._unpacking, self._start


def _member(path: Path, archive: zipfile.ZipFile) -> _Member:
    """``arr_0`` of an open ``.npz`` file; its header is read, its rows are not."""
    names = archive.namelist()
    if "arr_0.npy" not in names:
        held = ", ".join(name.removesuffix(".npy") for name in names[:5]) or "nothing"
        raise ValueError(f"{path}: no arr_0 in it but {held}; images go in as numpy.savez(FILE, arr_0=IMAGES)")
    if names.count("arr_0.npy") > 1:
        raise ValueError(f"{path}: arr_0 occurs twice in it; write the file anew")
    info = archive.getinfo("arr_0.npy")
    if info.flag_bits & 1:
        raise ValueError(f"{path}: arr_0 is encrypted; write the file without a password")
    with archive.open(info) as file:
        shape, fortran, dtype = _npy_header(path, file)
        start = file.tell()
    if dtype.hasobject:
        raise ValueError(f"{path}: arr_0 holds Python objects, e.g. images of several sizes; {_SHAPE_FIX}")
    if fortran:
        raise ValueError(f"{path}: arr_0 is in Fortran order; save numpy.ascontiguousarray of it")
    if info.file_size != start + dtype.itemsize * int(np.prod(shape, dtype=object)):
        raise ValueError(f"{path}: arr_0 has not the length that its header tells; write the file anew")
    offset = _data_offset(path, info) if info.compress_type == zipfile.ZIP_STORED else None
    return _Member(path, info.filename, offset, start, shape, dtype)


def _npy_header(path: Path, file: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
    try:
        version = npy.read_magic(file)
        return npy.read_array_header_1_0(file) if version == (1, 0) else npy.read_array_header_2_0(file)
    except ValueError as error:
        raise ValueError(f"{path}: arr_0 is no array of numbers ({error})") from error


def _data_offset(path: Path, info: zipfile.ZipInfo) -> int:
    """Where a member's bytes begin: after its local header, whose extra field may differ from the directory's."""
    with path.open("rb") as file:
        file.seek(info.header_offset)
        local = file.read(30)
    name_length, extra_length = struct.unpack("<HH", local[26:30])
    return info.header_offset + 30 + name_length + extra_length


def _checked_layout(path: Path, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    if len(shape) != 4:
        fix = "; add the channel with arr_0[..., None]" if len(shape) == 3 else ""
        raise ValueError(f"{path}: arr_0 is {list(shape)}, not [N, H, W, C]{fix}")
    if shape[3] not in (1, 3):
        fix = "; it looks like [N, C, H, W]: save arr_0.transpose(0, 2, 3, 1)" if shape[1] in (1, 3) else ""
        fix = "; lay the images over a background first" if shape[3] in (2, 4) and not fix else fix
        raise ValueError(f"{path}: arr_0 is {list(shape)}, not [N, H, W, C] with C 1 or 3{fix}")
    return shape  # type: ignore[return-value]


def _checked_values(path: Path, dtype: np.dtype, value_range: tuple[float, float] | None) -> list[str]:
    """The conversion that ``value_range`` states, in words. Raises ValueError where it is missing or does not fit."""
    if dtype == np.uint8:
        if value_range is not None:
            raise ValueError(f"{path}: arr_0 is uint8, so leave out value_range={value_range}")
        return []
    if dtype.kind != "f":
        raise ValueError(f"{path}: arr_0 is {dtype}, not uint8 in 0..255; save arr_0.astype(numpy.uint8) if it is that")
    if value_range is None:
        raise ValueError(
            f"{path}: arr_0 is {dtype}; save uint8, or say value_range=(0, 1) or value_range=(-1, 1), as it is"
        )
    if tuple(value_range) not in _RANGES:
        raise ValueError(f"value_range={value_range}: it is one of {', '.join(map(str, _RANGES))}")
    low, high = value_range
    return [f"{dtype} in [{low}, {high}] rounded half up to 0..255"]


def _to_levels(path: Path, pixels: np.ndarray, rows: list[int], value_range: tuple[float, float]) -> np.ndarray:
    """Floats [B, H, W, C] to uint8. Raises ValueError that names the first image with NaN or values out of range."""
    low, high = value_range
    for row, image in zip(rows, pixels, strict=True):
        if not np.isfinite(image).all():
            raise ValueError(f"{path}: image {row} holds NaN or infinity")
        if image.min() < low or image.max() > high:
            raise ValueError(
                f"{path}: image {row} spans [{image.min():.4g}, {image.max():.4g}], beyond [{low}, {high}]: clip the "
                "images, or say another value_range="
            )
    unit = (pixels.astype(np.float64) - low) / (high - low)
    return np.floor(unit * 255 + 0.5).astype(np.uint8)


def _labels(path: Path, n: int) -> Tensor:
    try:
        with np.load(path, allow_pickle=False) as file:
            labels = file["arr_1"]
    except (ValueError, *DAMAGED) as error:
        raise ValueError(f"{path}: arr_1 cannot be read ({error})") from error
    if labels.shape != (n,) or labels.dtype.kind not in "iu":
        raise ValueError(f"{path}: arr_1 is {labels.dtype} {list(labels.shape)}, not one class number ≥ 0 an image")
    labels = labels.astype(np.int64)  # what is beyond wraps to below 0
    if n and labels.min() < 0:
        raise ValueError(f"{path}: arr_1 holds {labels.min()}, which is no class number ≥ 0")
    return torch.from_numpy(labels)
