"""Cuts lists of matrices into slices of rows, for work that should stay in a cache and in a bounded scratch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

CACHE_BYTES = 2**20
"""A slice of one tensor on a CPU. Four take part and fit into the last cache; for smaller ones calls cost too much."""

KERNEL_BYTES = 32 * 2**20
"""The same on an accelerator, where a kernel has to be long enough to hide its launch."""


class Scratch:
    """One allocation for every slice of a walk: a fresh one costs page faults, which take longer than the arithmetic.

    It holds a slice of ``bytes_at_once``, or a single row that is longer.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes_at_once = CACHE_BYTES if device.type == "cpu" else KERNEL_BYTES
        self._held: Tensor | None = None

    def rows(self, n: int, dtype: torch.dtype) -> int:
        """How many rows of n entries make up a slice."""
        return max(1, self.bytes_at_once // (n * dtype.itemsize))

    def take(self, rows: int, n: int, dtype: torch.dtype) -> Tensor:
        """[rows, n], not initialised; it takes the place of what was taken before."""
        count = rows * n
        if self._held is None or self._held.dtype != dtype or self._held.numel() < count:
            self._held = torch.empty(count, dtype=dtype, device=self.device)
        return self._held[:count].view(rows, n)


def slices(members: Sequence[Sequence[Tensor]], rows: int) -> Iterator[tuple[list[int], list[list[Tensor]]]]:
    """Cut members, each of tensors of one 2-D shape, into slices of ``rows`` rows in all, the last of fewer.

    Yields the rows of every part and, for each position in a member, the list of its parts: small matrices share a
    slice, large ones are cut into several.
    """
    counts: list[int] = []
    parts: list[Sequence[Tensor]] = []
    room = rows
    for member in members:
        total, at = member[0].shape[0], 0
        while at < total:
            count = min(room, total - at)
            parts.append(member if count == total else [t[at : at + count] for t in member])
            counts.append(count)
            at, room = at + count, room - count
            if room == 0:
                yield counts, [list(column) for column in zip(*parts, strict=True)]
                counts, parts, room = [], [], rows
    if parts:
        yield counts, [list(column) for column in zip(*parts, strict=True)]


def as_rows(*tensors: Tensor) -> list[Sequence[Tensor]]:
    """Members for ``slices`` of tensors of one shape [rows, n] or [e, m, n]: one, or one a matrix where strides ask."""
    shape = tensors[0].shape
    if prod(shape) == 0:
        return []
    if len(shape) == 2:
        return [tensors]
    try:
        return [[t.view(-1, shape[-1]) for t in tensors]]
    except RuntimeError:  # the strides of one do not allow it
        return list(zip(*(t.unbind() for t in tensors), strict=True))
