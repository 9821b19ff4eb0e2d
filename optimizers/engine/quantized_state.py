"""State of 8 bits an element, with a scale for each block of a row.

    encode   s = max |x| over the block;  q: that of the code's values which is nearest to x / s
    decode   x = s · value(q)

Linear (8-bit Muon, arXiv 2509.23106): values q / 127. Dynamic (arXiv 2110.02861, bitsandbytes): seven decades, each
with twice as many values as the one below; the unsigned map, for second moments, has one bit more for each. There no
entry above 0 is encoded as 0, which may be nearer and which bitsandbytes takes: the step would be m/ε, the zero-point
problem of arXiv 2309.01507.

A block is at most 2048 elements of one row: what it holds does not depend on how rows are divided over ranks. The
sources take 2048 elements of the flattened local shard instead. Rows of 512 elements and more take 1 + 4/512 bytes an
element at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..sharding.layout import as_matrices

BLOCK = 2048
"""Elements of a block at most."""

LEAST_ELEMENTS = 4096
"""Smaller tensors, and vectors, keep fp32, as in bitsandbytes."""


@dataclass(frozen=True)
class Code:
    """256 values, or 255; ``encode`` and ``decode`` are elementwise, fp32 entries in [-1, 1]."""

    dtype: torch.dtype
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]


@lru_cache(maxsize=8)
def dynamic_map(signed: bool = True) -> tuple[float, ...]:
    """The 256 values of the dynamic code in ascending order.

    For decade i = 0 … 6: the 2^i (unsigned: 2^(i+1)) midpoints between equidistant points of [0.1, 1], times
    10^(i−6), with both signs; and 0 and 1.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        count = 2 ** (decade if signed else decade + 1)
        middles = [(0.1 + 0.9 * (i + 0.5) / count) * 10.0 ** (decade - 6) for i in range(count)]
        values += middles + ([-x for x in middles] if signed else [])
    return tuple(sorted(values))


class _Tables(NamedTuple):
    """The dynamic code on a device; floats whose upper 16 bits are alike, those of bf16, have two codes at most."""

    values: Tensor
    """fp32 [256]."""
    lower: Tensor
    """uint8 [65536]: the lower of the two codes, by those bits."""
    limit: Tensor
    """fp32 [65536]: above it an entry has the upper one."""


def _on(device: torch.device, signed: bool) -> _Tables:
    if _get_current_dispatch_mode() is not None:  # what fake tensors see is fake, and may not be kept
        return _tables(device, signed)
    return _kept_tables(device, signed)


def _tables(device: torch.device, signed: bool) -> _Tables:
    values = torch.tensor(dynamic_map(signed), dtype=torch.float32, device=device)
    half_way = (values[1:] + values[:-1]) / 2
    if not signed:
        half_way[0] = 0.0  # a second moment above 0 is never kept as 0
    first = torch.arange(2**16, dtype=torch.int32, device=device) << 16
    least = torch.minimum(first.view(torch.float32), (first | 0xFFFF).view(torch.float32))
    lower = torch.bucketize(least, half_way)
    limit = torch.cat([half_way, values.new_tensor([torch.inf])])[lower]
    return _Tables(values, lower.to(torch.uint8), limit)


_kept_tables = lru_cache(maxsize=32)(_tables)


def _linear(x: Tensor) -> Tensor:
    return x.mul(127).round_().to(torch.int8)


def _dynamic(signed: bool) -> Code:
    def encode(x: Tensor) -> Tensor:
        # on a CPU sixteen times as fast as bucketize's search, and index_select five times as fast as indexing
        tables, bits = _on(x.device, signed), (x.view(torch.int32) >> 16 & 0xFFFF).flatten()
        codes = tables.lower.index_select(0, bits).view(x.shape)
        return codes.add_(x > tables.limit.index_select(0, bits).view(x.shape))

    def decode(q: Tensor) -> Tensor:
        return _on(q.device, signed).values.index_select(0, q.int().flatten()).view(q.shape)

    return Code(torch.uint8, encode, decode)


CODES: dict[str, Code] = {
    "int8": Code(torch.int8, _linear, lambda q: q.float().div_(127)),
    "dynamic8": _dynamic(True),
    "dynamic8_unsigned": _dynamic(False),
}
"""By the name that ``momentum_dtype`` uses; the unsigned one is for second moments."""


def unpack(q: Tensor, absmax: Tensor, code: Code, dtype: torch.dtype) -> Tensor:
    """Decode ``q`` [..., n], or a convolution's, with ``absmax`` [..., blocks] into ``dtype``."""
    found = code.decode(q)
    for part, scale in zip(_blocks(as_matrices(found), absmax), absmax.split(1, -1), strict=False):
        part.mul_(scale)
    return found.to(dtype)


def pack(x: Tensor, q: Tensor, absmax: Tensor, code: Code) -> None:
    """Encode ``x`` [..., n] into ``q`` and ``absmax`` [..., blocks].

    A block with a NaN or an infinity decodes to NaN.
    """
    parts = _blocks(as_matrices(x.float()), absmax), _blocks(as_matrices(q), absmax), absmax.split(1, -1)
    for part, target, scale in zip(*parts, strict=False):
        torch.amax(part.abs(), -1, keepdim=True, out=scale)
        target.copy_(code.encode(part / scale.clamp_min(torch.finfo(torch.float32).tiny)))
        scale.masked_fill_(~scale.isfinite(), torch.nan)


def _blocks(x: Tensor, absmax: Tensor) -> tuple[Tensor, ...]:
    """The blocks of rows: as equal as ``torch.chunk`` makes them; none if there are no elements."""
    return x.chunk(absmax.shape[-1], -1) if x.numel() else ()
