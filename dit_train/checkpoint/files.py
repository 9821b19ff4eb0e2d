"""Files of a checkpoint: their SHA-256, and making sure that they are on the disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from eval.files import replacing

_CHUNK = 1 << 22


def sha256(path: Path, progress: Callable[[int], object] = lambda _: None) -> str:
    """The SHA-256 of a file in hexadecimal, as ``sha256sum`` prints it; `progress` is told the bytes of each piece."""
    digest, buffer = hashlib.sha256(), bytearray(_CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
            progress(count)
    return digest.hexdigest()


def write_durably(path: Path, text: str) -> None:
    """Write a text file whole or not at all, and to the disk."""
    with replacing(path) as file:
        file.write(text.encode())
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, where its file system can."""
    with contextlib.suppress(OSError):  # some network file systems refuse it for folders
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def size(count: float) -> str:
    """A number of bytes for a person: ``1.2 GB``."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
