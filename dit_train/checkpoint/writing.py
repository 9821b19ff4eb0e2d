"""One save: tensors by torch's distributed checkpoint into a folder beside, sums, manifest, and a rename that commits.

Every step that can fail is agreed on over the group before the next, so that all ranks come to the same end; after a
failure nothing is left of the save and everything of those before it.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta

from dit_train.checkpoint import listing, manifest
from dit_train.checkpoint.agreement import on_main, one_line
from dit_train.checkpoint.files import sync_folder
from dit_train.checkpoint.manifest import File, Manifest


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay."""

    newest: int
    """So many of the newest."""
    every: int = 0
    """And, for good, those of steps that this divides; 0: none."""


@dataclass(frozen=True)
class Outcome:
    """How a save ended, the same on all ranks."""

    folder: Path
    seconds: float
    problem: str | None = None
    """Why nothing was saved."""
    unpruned: str | None = None
    """Why older checkpoints could not be removed; this one is sound."""


def write(
    run: Path,
    tensors: dict[str, Tensor],
    host: dict[str, Tensor] | None,
    about: Manifest,
    retention: Retention,
    group: dist.ProcessGroup,
) -> Outcome:
    """Write, commit and prune on all ranks of a gloo group; from one thread of each at a time.

    Args:
        run: the run folder.
        tensors: all tensors by name, sharded or replicated. With `host` their shapes and shards alone are used.
        host: this rank's parts in host memory to write instead, so that the tensors may change meanwhile.
        about: what goes into state.json; its `files` are filled in here.
    """
    start = time.perf_counter()
    final = listing.folder_of_step(run, about.run.step)
    partial = final.with_name(f"{final.name}.tmp")
    problem = on_main(lambda: _begin(run, partial), group)
    if problem is None:
        problem = _write_tensors(partial, tensors, host, about, group)
    if problem is None:
        problem = on_main(lambda: _commit(partial, final), group)
    if problem is not None:
        on_main(lambda: shutil.rmtree(partial, ignore_errors=True), group)
        return Outcome(final, time.perf_counter() - start, problem)
    unpruned = on_main(lambda: listing.prune(run, retention.newest, retention.every), group)
    return Outcome(final, time.perf_counter() - start, unpruned=unpruned)


def _begin(run: Path, partial: Path) -> None:
    listing.clear(run)
    partial.mkdir(parents=True)


def _write_tensors(
    partial: Path,
    tensors: dict[str, Tensor],
    host: dict[str, Tensor] | None,
    about: Manifest,
    group: dist.ProcessGroup,
) -> str | None:
    """Tensors, metadata and manifest, each synced to the disk; the problem that any rank has met."""
    writer = _Writer(partial, copy_ahead=host is None)
    try:
        dcp.save(tensors, storage_writer=writer, planner=_Planner(host), process_group=group)
    except CheckpointException as error:  # of any rank, raised on all
        return one_line(next(iter(error.failures.values()))[0])
    sums: list[dict[str, File]] | None = [{}] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    dist.gather_object(writer.files, sums, dst=0, group=group)

    def describe() -> None:
        files = {name: file for part in sums or [] for name, file in part.items()}
        manifest.write(partial, replace(about, files=dict(sorted(files.items()))))

    return on_main(describe, group)


def _commit(partial: Path, final: Path) -> None:
    listing.check_sizes(partial, manifest.read(partial))
    if final.exists():  # the run went back and came to this step again
        listing.discard(final)
    partial.rename(final)
    sync_folder(final.parent)
    sync_folder(final.parent.parent)


class _Planner(dcp.DefaultSavePlanner):
    """Takes a tensor's data from host memory where there is a snapshot, all else from the tensor itself."""

    def __init__(self, host: dict[str, Tensor] | None) -> None:
        super().__init__(flatten_state_dict=False)
        self._host = host

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """This rank's part of a tensor."""
        return super().lookup_object(index) if self._host is None else self._host[index.fqn]


class _Writer(dcp.FileSystemWriter):
    """Takes the SHA-256 of every file while it is written, and tells nobody where."""

    def __init__(self, folder: Path, *, copy_ahead: bool) -> None:
        super().__init__(folder, sync_files=True, per_thread_copy_ahead=10_000_000 if copy_ahead else 0)
        self.fs = _HashingFiles()

    @property
    def files(self) -> dict[str, File]:
        """What this rank has written, by name."""
        return self.fs.written

    def storage_meta(self) -> StorageMeta:
        """Nothing: torch would note this machine's path."""
        return StorageMeta()


class _HashingFiles(FileSystem):
    def __init__(self) -> None:
        self.written: dict[str, File] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        with _HashingFile(open(path, mode, buffering=0)) as stream:
            try:
                yield stream
            except RuntimeError as error:  # of torch, which says where in its file and not why
                raise stream.problem or error from None
        self.written[Path(path).name] = File(stream.count, stream.digest.hexdigest())

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class _HashingFile(io.BufferedWriter):
    """Written from front to back, as torch does."""

    def __init__(self, raw: io.RawIOBase) -> None:
        super().__init__(raw)
        self.digest, self.count = hashlib.sha256(), 0
        self.problem: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Write and hash."""
        self.digest.update(data)
        self.count += memoryview(data).nbytes
        try:
            return super().write(data)
        except OSError as error:
            self.problem = error
            raise
