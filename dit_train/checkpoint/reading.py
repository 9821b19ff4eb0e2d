"""Filling a model, its average and its optimizer from a checkpoint, on any number of ranks.

torch's reader and planner do the resharding. They are never shown the stored pickle, only what `metadata` has read and
checked, and refuse entries that are no tensors, for which torch would load code.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.optim import Optimizer

from dit_train.checkpoint import contents, metadata, verify
from dit_train.checkpoint.agreement import first_problem, one_line
from dit_train.checkpoint.listing import Checkpoint
from dit_train.checkpoint.manifest import damaged
from dit_train.checkpoint.metadata import StoredTensor
from dit_train.config import ConfigError
from dit_train.run.ema import EMA


def load(checkpoint: Checkpoint, model: nn.Module, ema: EMA, optimizer: Optimizer) -> None:
    """Fill model, EMA and optimizer in place; the number of ranks may differ from the one that saved. Collective.

    Raises:
        ConfigError: the checkpoint is damaged, doctored or of another model; the same on all ranks.
    """
    steps = checkpoint.manifest.optimizer_steps
    if len(steps) != len(optimizer.param_groups):
        raise damaged(checkpoint.folder, f"{len(steps)} parameter groups instead of {len(optimizer.param_groups)}")
    _fill(checkpoint, contents.tensors(model, ema, optimizer))
    for group, step in zip(optimizer.param_groups, steps, strict=True):
        group["step"] = step


def load_weights(checkpoint: Checkpoint, model: nn.Module, kind: Literal["ema", "model"]) -> None:
    """Fill a model alone, with averaged or with trained weights; otherwise as `load`."""
    _fill(checkpoint, contents.weights(model, kind))


def check_sums(checkpoint: Checkpoint) -> None:
    """Compare every file with its SHA-256 in the manifest, the files dealt over the ranks by size. Collective.

    Raises:
        ConfigError: names a file that has changed since it was written; the same on all ranks.
    """
    loads, mine = [0] * dist.get_world_size(), []
    for name, file in sorted(checkpoint.manifest.files.items(), key=lambda item: -item[1].bytes):
        rank = loads.index(min(loads))
        loads[rank] += file.bytes
        if rank == dist.get_rank():
            mine.append(name)
    problem = None
    try:
        verify.check_sums(checkpoint, mine)
    except ConfigError as error:
        problem = str(error)
    if problem := first_problem(problem):
        raise ConfigError(problem)


def _fill(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
    stored, problem = {}, None
    try:
        stored = metadata.read(checkpoint.folder, checkpoint.manifest.files)
    except ConfigError as error:
        problem = str(error)
    if problem := first_problem(problem):
        raise ConfigError(problem)
    _check_scales(checkpoint, stored, tensors)
    try:
        dcp.load(tensors, storage_reader=_Reader(checkpoint, stored), planner=_Planner(flatten_state_dict=False))
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise damaged(checkpoint.folder, _why(reason), metadata.DOCTORED) from None


def _check_scales(checkpoint: Checkpoint, stored: dict[str, StoredTensor], tensors: dict[str, Tensor]) -> None:
    """Refuse scales of 8-bit state whose blocks are those of another division of columns, which is no damage."""
    for name, tensor in tensors.items():
        if name.endswith("_absmax") and name in stored and stored[name].size != tuple(tensor.shape):
            raise ConfigError(
                f"parallel.tensor: {checkpoint.folder} has 8-bit state in other blocks ({name} of {stored[name].size} "
                f"instead of {tuple(tensor.shape)}); keep the value that it was saved with or name another run.folder"
            )


def _why(error: BaseException) -> str:
    """In our words where torch found a pickle that is no tensor: its own advise the reader to run it."""
    if not isinstance(error, pickle.UnpicklingError):
        return one_line(error)
    named = re.search(r"GLOBAL (\S+)|global[: ]+(\S+)", str(error))
    return f"a tensor names {named[1] or named[2]}, which none needs" if named else "the data of a tensor is none"


class _Reader(dcp.FileSystemReader):
    """Reads tensors (with ``weights_only=True``) where already checked metadata says that they are."""

    def __init__(self, checkpoint: Checkpoint, stored: dict[str, StoredTensor]) -> None:
        super().__init__(checkpoint.folder)
        self._stored = stored

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """What was read before, in torch's classes."""
        places = {
            MetadataIndex(name, offsets): place
            for name, tensor in self._stored.items()
            for offsets, (_, place) in tensor.blocks.items()
        }
        return Metadata({name: _described(tensor) for name, tensor in self._stored.items()}, storage_data=places)


class _Planner(dcp.DefaultLoadPlanner):
    """Plans the reading of tensors alone."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> NoReturn:
        """Refuse what torch would unpickle with all that it may run."""
        raise ValueError(f"{read_item.dest_index.fqn} is no tensor")


def _described(tensor: StoredTensor) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, (sizes, _) in tensor.blocks.items()
    ]
    properties = TensorProperties(dtype=getattr(torch, tensor.dtype))
    return TensorStorageMetadata(properties, torch.Size(tensor.size), chunks)
