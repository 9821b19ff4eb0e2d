"""Where a token lies in the image: a fixed table that is added, or a rotation of queries and keys.

Both are buffers outside the state dict. They are filled at construction and again by `refill`, because a model that
was built on the meta device gets uninitialised memory from ``to_empty``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_BASE = 10_000.0


def _frequencies(count: int) -> Tensor:
    """[count] fp64: 10000^(−i/count)."""
    return _BASE ** -(torch.arange(count, dtype=torch.float64, device="cpu") / count)


def _coordinates(side: int) -> tuple[Tensor, Tensor]:
    """Row and column of each of side² tokens in reading order, [T] fp64 each."""
    index = torch.arange(side * side, device="cpu")
    return (index // side).double(), (index % side).double()


def sincos_table(side: int, width: int) -> Tensor:
    """[side², width] fp64: sine and cosine of the column, then of the row (Peebles & Xie, arXiv 2212.09748)."""
    frequencies = _frequencies(width // 4)
    rows, columns = _coordinates(side)
    angles = [torch.outer(axis, frequencies) for axis in (columns, rows)]
    return torch.cat([f(a) for a in angles for f in (torch.sin, torch.cos)], dim=1)


def rotary_angles(side: int, head_width: int) -> Tensor:
    """[side², head_width/2] fp64: a quarter of the head turns with the row, a quarter with the column."""
    frequencies = _frequencies(head_width // 4)
    return torch.cat([torch.outer(axis, frequencies) for axis in _coordinates(side)], dim=1)


class SinCosPosition(nn.Module):
    """A fixed table, added to the tokens."""

    table: Tensor

    def __init__(self, side: int, width: int) -> None:
        super().__init__()
        self.side, self.width = side, width
        self.register_buffer("table", torch.empty(side * side, width), persistent=False)
        self.refill()

    def refill(self) -> None:
        """Compute the table anew."""
        self.table.copy_(sincos_table(self.side, self.width))

    def forward(self, tokens: Tensor) -> Tensor:
        """[N, T, d] -> [N, T, d]."""
        return tokens + self.table.to(tokens.dtype)


class RotaryPosition(nn.Module):
    """2-D rotary embedding (Su et al., arXiv 2104.09864, once an axis): scores depend on offsets alone.

    Each attention has its own, since what a block is handed FSDP2 casts to bf16, and a buffer stays fp32.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, side: int, head_width: int) -> None:
        super().__init__()
        self.side, self.head_width = side, head_width
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(side * side, head_width // 2), persistent=False)
        self.refill()

    def refill(self) -> None:
        """Compute the tables anew."""
        angles = rotary_angles(self.side, self.head_width)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        """Queries or keys [N, heads, T, head_width] -> the same, turned; computed in fp32."""
        first, second = x.float().chunk(2, dim=-1)  # each [N, heads, T, head_width/2]
        turned = torch.cat([first * self.cos - second * self.sin, second * self.cos + first * self.sin], dim=-1)
        return turned.to(x.dtype)
