"""Files that appear whole or not at all, folders that one process at a time writes to, and what damaged files raise."""

import fcntl
import lzma
import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

DAMAGED = (OSError, EOFError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, NotImplementedError)
"""What ``zipfile`` raises for a file that cannot be read, or is packed in a way that it does not know."""


@contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of ``path`` once all is written, and goes if anything is raised.

    ``durable`` waits for the disk, so that a power cut cannot leave the name without the bytes.
    """
    path = Path(os.path.realpath(path))  # a link stays one
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def try_lock(file: IO, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file without waiting; true as well on a file system without locks.

    The lock ends with the file or with this process, however that ends. ``kind`` LOCK_SH is shared with others of it.
    """
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


class FolderLock:
    """Holds a folder by its hidden file ``.lock`` until ``release``. Raises ValueError where another process holds it.

    Args:
        folder: which must exist.
        name: what the error calls it.
    """

    def __init__(self, folder: Path, name: Path):
        self._path = folder / ".lock"
        while True:
            self._file = self._path.open("a")
            if not try_lock(self._file):
                self._file.close()
                raise ValueError(f"{name}: another process is writing it; wait for it, or write elsewhere")
            if self._is_the_one_there():
                return
            self._file.close()  # its last holder has removed it since it was opened

    def release(self) -> None:
        """Let go and leave no file behind."""
        if not self._file.closed:
            self._path.unlink(missing_ok=True)
            self._file.close()

    def _is_the_one_there(self) -> bool:
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False
