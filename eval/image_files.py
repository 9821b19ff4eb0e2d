"""Image files in a folder or a zip: which they are, whether they fit together, and their pixels on demand."""

import io
import os
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from PIL import ImageFile, UnidentifiedImageError
from torch import Tensor

from eval import decoding
from eval.decoding import Header, Reading
from eval.threads import in_threads

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
# Leaving these out would change the number of images without a word.
_OTHER_IMAGES = tuple(
    ".gif .tif .tiff .ppm .pgm .pbm .pnm .tga .avif .heic .heif .jxl .jp2 .jpe .jfif .exr .hdr .dng .svg .npy".split()
)
_CHUNK = 4096  # headers held at once: of a million files only counts are kept


@dataclass(frozen=True)
class Files:
    """Image files by name, relative to ``root`` and with ``/`` between folders, in sorted order."""

    root: str
    names: list[str]
    others: list[str]  # no images, passed over
    open: Callable[[str], BinaryIO]


def in_folder(root: Path) -> Files:
    """All images below a folder; links are followed, hidden files and folders are not seen.

    Raises:
        ValueError: a folder that cannot be listed, or that is reached twice, which would count its images twice.
    """
    names, seen = [], set()

    def unlistable(error: OSError) -> None:  # os.walk passes over such folders by itself
        raise ValueError(f"{error.filename}: cannot be listed ({error.strerror})") from error

    for folder, folders, files in os.walk(root, onerror=unlistable, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            raise ValueError(f"{folder}: leads to {real}, which was seen before; its images would count twice")
        seen.add(real)
        folders[:] = [name for name in folders if not _hidden(name)]
        names += [os.path.relpath(os.path.join(folder, name), root).replace(os.sep, "/") for name in files]
    return _sorted_out(str(root), names, lambda name: open(os.path.join(root, name), "rb"))


def in_zip(path: Path) -> Files:
    """All images in a zip file, in any of its folders.

    Raises:
        ValueError: not a zip, or members that are encrypted, occur twice, or lie at no plain path below its root.
    """
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: cannot be read as a zip file ({error})") from error
    members = [info for info in archive.infolist() if not info.is_dir()]
    odd = next((info.filename for info in members if {"", ".", ".."} & set(info.filename.split("/"))), None)
    if odd is not None:
        raise ValueError(f"{path}: {odd} is no plain path, without /, ./ or ../ before it; write the zip file anew")
    files = _sorted_out(str(path), [info.filename for info in members], archive.open)
    images = set(files.names)
    locked = next((info.filename for info in members if info.filename in images and info.flag_bits & 1), None)
    if locked:
        raise ValueError(f"{path}: {locked} is encrypted; write the zip file without a password")
    if len(images) < len(files.names):
        twice = next(a for a, b in zip(files.names, files.names[1:], strict=False) if a == b)
        raise ValueError(f"{path}: {twice} occurs twice in it; write the zip file anew")
    return files


def survey(files: Files, how: Reading) -> tuple[tuple[int, int, int], list[str]]:
    """Look at the headers of all files. Cheap beside decoding, and it fails on every rank alike, before any work.

    Returns:
        ((C, H, W), conversions in words, with counts); C is 1 where every file is grey.

    Raises:
        ValueError: a file that cannot be opened or must not be scored as it is, sizes that differ, with file names.
    """
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise ValueError("PIL.ImageFile.LOAD_TRUNCATED_IMAGES is set: cut-off images would be scored; unset it")
    counts: Counter[str] = Counter()
    first, grey = None, 0
    for start in range(0, len(files.names), _CHUNK):
        chunk = files.names[start : start + _CHUNK]
        headers = in_threads(lambda name: _header(files, name), chunk)
        for name, header in zip(chunk, headers, strict=True):
            first = first or (name, header)
            _check(files, name, header, first, how)
            grey += header.mode in decoding.GREY_MODES and not header.alpha
            counts.update(decoding.conversions(header, how))
    assert first is not None  # `_sorted_out` let no empty list pass
    total = len(files.names)
    if 0 < grey < total:
        counts["grey to RGB, since others have colour"] = grey
    notes = [f"{what}: {count} of {total} images" for what, count in counts.items()]
    if files.others:
        notes.append(f"no images and passed over: {len(files.others)} files, first {files.others[0]}")
    size = first[1].size if how.center_crop_adm is None else (how.center_crop_adm,) * 2
    return (1 if grey == total else 3, *size), notes


def reader(files: Files, shape: tuple[int, int, int], how: Reading) -> Callable[[list[int]], np.ndarray]:
    """The function from row numbers [B] to uint8 [B, C, H, W] that decodes files in several threads."""

    def pixels(row: int) -> np.ndarray:
        name = files.names[row]
        try:
            with files.open(name) as file:
                made = decoding.decode(io.BytesIO(file.read()), shape[0] == 1, how)
        except Exception as error:  # decoders raise whatever they meet: OSError, SyntaxError, zlib.error, ...
            raise _unreadable(files, name, error) from error
        if made.shape != shape:
            raise ValueError(f"{files.root}: {name} is {list(made.shape)} and was {list(shape)} when it was opened")
        return made

    return lambda rows: np.stack(in_threads(pixels, rows)) if rows else np.empty((0, *shape), np.uint8)


def class_labels(files: Files) -> Tensor:
    """int64 [N]: the place of each file's first folder among all first folders in sorted order.

    Raises:
        ValueError: a file lies in no folder.
    """
    for name in files.names:
        if "/" not in name:
            raise ValueError(f"{files.root}: {name} lies in no class folder; each image must lie in one")
    folders = [name.partition("/")[0] for name in files.names]
    places = {folder: place for place, folder in enumerate(sorted(set(folders)))}
    return torch.tensor([places[folder] for folder in folders])


def _sorted_out(root: str, names: list[str], opener: Callable[[str], BinaryIO]) -> Files:
    """Raises ValueError where images of a kind that is not read are among the names, or none that is."""
    seen = sorted(name for name in names if not any(_hidden(part) for part in name.split("/")))
    images = [name for name in seen if name.lower().endswith(SUFFIXES)]
    others = [name for name in seen if not name.lower().endswith(SUFFIXES)]
    unread = [name for name in others if name.lower().endswith(_OTHER_IMAGES)]
    if unread:
        raise ValueError(f"{root}: {unread[0]} is of a kind that is not read here; save it as PNG or take it away")
    if not images:
        hint = f"; it holds {others[0]}" if others else ""
        raise ValueError(f"{root}: no images in it ({', '.join(SUFFIXES)}){hint}")
    return Files(root, images, others, opener)


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _header(files: Files, name: str) -> Header:
    try:
        with files.open(name) as file:
            return decoding.read_header(file)
    except Exception as error:  # as for decoding
        raise _unreadable(files, name, error) from error


def _unreadable(files: Files, name: str, error: Exception) -> ValueError:
    text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if isinstance(error, UnidentifiedImageError):  # Pillow names its own object
        text = "it is no PNG, JPEG, WebP or BMP, or is damaged"
    return ValueError(f"{files.root}: {name} cannot be read as an image ({text}); replace it")


def _check(files: Files, name: str, header: Header, first: tuple[str, Header], how: Reading) -> None:
    problem = decoding.refusal(header, how)
    if problem:
        raise ValueError(f"{files.root}: {name} {problem}")
    if how.center_crop_adm is None and header.size != first[1].size:
        (h0, w0), (h, w) = first[1].size, header.size
        raise ValueError(
            f"{files.root}: {first[0]} is {w0}x{h0} (width x height), {name} is {w}x{h}: all must have one size, "
            "or say center_crop_adm=SIDE"
        )
