"""A copy of this rank's tensors in host memory that is allocated once and filled anew for every save."""

from __future__ import annotations

import torch
from torch import Tensor

from dit_train.checkpoint.files import size
from dit_train.config import ConfigError
from dit_train.parallel.shard import local


class Snapshot:
    """Host buffers, pinned for tensors of a GPU, one for each tensor's part on this rank."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        """Take all of the memory at once, so that a host that lacks it says so before the first step and not later.

        Raises:
            ConfigError: there is not so much.
        """
        self.host: dict[str, Tensor] = {}
        self._copied: torch.cuda.Event | None = None
        try:
            self.host = {name: self._buffer(name, local(tensor)).zero_() for name, tensor in tensors.items()}
        except (RuntimeError, MemoryError) as error:
            needed = size(sum(local(tensor).nbytes for tensor in tensors.values()))
            reason = str(error).splitlines()[0][:100]
            raise ConfigError(
                f"run.async_checkpoint: no {needed} of host memory for a rank's copy ({reason}); set it to false"
            ) from None

    def take(self, tensors: dict[str, Tensor]) -> None:
        """Copy; on a GPU the copies are queued on its current stream, before whatever changes the tensors next.

        The buffers of the snapshot before are written over: call it only once that one is not needed any more.
        """
        self.host = {name: self._buffer(name, local(tensor)) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            self.host[name].copy_(local(tensor), non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> None:
        """Wait until the buffers hold what `take` was given; from any thread."""
        if self._copied is not None:
            self._copied.synchronize()

    def _buffer(self, name: str, part: Tensor) -> Tensor:
        kept = self.host.get(name)
        if kept is not None and (kept.shape, kept.dtype) == (part.shape, part.dtype):
            return kept
        return torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
