"""The ``.metadata`` of torch's distributed checkpoint, a pickle, read without executing any of it and without torch.

The unpickler knows the names below and nothing else. None of them gives it torch's own class: each becomes an inert
record that keeps what it was handed, so that a doctored file can neither call anything nor change a class. What
comes out is checked entry by entry before a tensor is read.
"""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from dit_train.checkpoint.manifest import File, damaged

NAME = ".metadata"
DOCTORED = "damaged or doctored checkpoint"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Where a block of a tensor lies."""

    relative_path: str
    """Name of a file in the checkpoint's folder."""
    offset: int
    length: int
    """Both in bytes."""
    transform_descriptors: None = None
    """Blocks are stored plainly; torch's reader asks."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    dtype: str
    """As in ``torch.float32``, without the first word."""
    size: Shape
    blocks: dict[Shape, tuple[Shape, Place]]
    """By the offsets of each in the tensor: its sizes, and where it lies."""


class _Record:
    """Keeps what a pickle hands to a class."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        self.state = state


def _records(module: str, names: str) -> dict[tuple[str, str], Any]:
    return {(module, name): type(name, (_Record,), {}) for name in names.split()}


_DTYPES = (
    "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128 uint16 uint32 uint64 "
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz"
)
_KNOWN: dict[tuple[str, str], Any] = {
    **_records(
        "torch.distributed.checkpoint.metadata",
        "Metadata MetadataIndex TensorStorageMetadata TensorProperties ChunkStorageMetadata StorageMeta "
        "_MEM_FORMAT_ENCODING",
    ),
    **_records("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    **_records("torch.serialization", "_get_layout"),
    **_records("pathlib", "PosixPath WindowsPath"),  # torch notes the folder; Python 3.13 names its class otherwise
    **_records("pathlib._local", "PosixPath WindowsPath"),
    ("torch", "Size"): tuple,
    **{("torch", name): name for name in _DTYPES.split()},
}
_TENSOR = _KNOWN["torch.distributed.checkpoint.metadata", "TensorStorageMetadata"]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _KNOWN[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no tensor needs") from None


def read(folder: Path, files: dict[str, File]) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint by name, all of whose blocks lie inside `files`.

    Raises:
        ConfigError: the file is damaged, holds anything but tensors, or points elsewhere; nothing was executed.
    """
    try:
        with (folder / NAME).open("rb") as file:
            found = _Unpickler(file).load()
        return _tensors(found, files)
    except pickle.UnpicklingError as error:
        raise damaged(folder, f"{NAME}: {error}", DOCTORED) from None
    except _Refused as error:
        raise damaged(folder, f"{NAME}: {error}", DOCTORED) from None
    except (OSError, EOFError, MemoryError, RecursionError, ArithmeticError) as error:
        raise damaged(folder, f"{NAME}: {error or type(error).__name__}", DOCTORED) from None
    except (AttributeError, ImportError, IndexError, KeyError, TypeError, ValueError):  # as a pickle of nonsense raises
        raise damaged(folder, f"{NAME} is no metadata of tensors", DOCTORED) from None


class _Refused(ValueError):
    """An entry that must not be read; the message says which and why."""


def _tensors(found: Any, files: dict[str, File]) -> dict[str, StoredTensor]:
    places = {}
    for index, info in found.state["storage_data"].items():
        name, offset = index.state["fqn"], index.state.get("offset")
        places[name, None if offset is None else _shape(offset)] = _place(name, info.state, files)
    tensors = {}
    for name, entry in found.state["state_dict_metadata"].items():
        if not isinstance(name, str) or type(entry) is not _TENSOR:
            raise _Refused(f"entry {str(name)[:80]!r} is no tensor")
        tensors[name] = _tensor(name, entry.state, places)
    return tensors


def _place(name: str, info: dict[str, Any], files: dict[str, File]) -> Place:
    path, offset, length = info["relative_path"], info["offset"], info["length"]
    if not isinstance(path, str) or PurePosixPath(path).name != path or path not in files:
        raise _Refused(f"{str(name)[:80]!r} lies in {str(path)[:80]!r}, which is no file of this checkpoint")
    if type(offset) is not int or type(length) is not int or not 0 <= offset <= offset + length <= files[path].bytes:
        raise _Refused(f"{name!r} lies beyond the end of {path}")
    if info.get("transform_descriptors"):
        raise _Refused(f"{name!r} is stored in a form that a run does not write")
    return Place(path, offset, length)


def _tensor(name: str, entry: dict[str, Any], places: dict[tuple[str, Shape | None], Place]) -> StoredTensor:
    dtype, size = entry["properties"].state[0], _shape(entry["size"])
    if dtype not in _DTYPES.split():
        raise _Refused(f"{name!r} has no dtype")
    blocks = {}
    for chunk in entry["chunks"]:
        offsets, sizes = _shape(chunk.state["offsets"]), _shape(chunk.state["sizes"])
        if not len(offsets) == len(sizes) == len(size):
            raise _Refused(f"{name!r} has a block of another rank")
        if any(at + length > whole for at, length, whole in zip(offsets, sizes, size, strict=True)):
            raise _Refused(f"{name!r} has a block outside of it")
        blocks[offsets] = (sizes, places[name, offsets])
    if sum(math.prod(sizes) for sizes, _ in blocks.values()) != math.prod(size):
        raise _Refused(f"{name!r} is not covered by its blocks")
    return StoredTensor(dtype, size, blocks)


def _shape(value: Any) -> Shape:
    if type(value) is not tuple or not all(type(item) is int and 0 <= item < 1 << 63 for item in value):
        raise _Refused("a shape is no list of whole numbers")
    return value
