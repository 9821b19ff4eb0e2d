"""What the model is told beside the image: the time, the class, and how both modulate a block."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dit_train.config import ModelConfig

_FREQUENCIES = 256
_TIME_SCALE = 1000.0  # the original model was told t in 0..999


def time_frequencies(t: Tensor) -> Tensor:
    """t [N] fp32 in [0, 1] -> [N, 256] fp32: cosines, then sines, of 1000·t·10000^(−i/128), i = 0..127.

    The denominator is the half width, as in the original DiT (not half − 1, as in diffusers).
    """
    half = _FREQUENCIES // 2
    frequencies = torch.exp(-math.log(10_000.0) / half * torch.arange(half, dtype=torch.float32, device=t.device))
    angles = (_TIME_SCALE * t.float())[:, None] * frequencies  # [N, 128]
    return torch.cat([angles.cos(), angles.sin()], dim=1)


class TimeEmbedding(nn.Module):
    """The time to a vector: fixed frequencies, then two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(_FREQUENCIES, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, t: Tensor) -> Tensor:
        """t [N] fp32 -> [N, d] in the weights' dtype; only the finished frequencies are cast (bf16 has no 0.998)."""
        frequencies = time_frequencies(t).to(self.in_proj.weight.dtype)  # [N, 256]
        return self.out_proj(F.silu(self.in_proj(frequencies)))


class LabelEmbedding(nn.Module):
    """A vector for each class, and one more, the last, for no class."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(num_classes + 1, width)

    def forward(self, labels: Tensor) -> Tensor:
        """[N] int64 in 0..num_classes -> [N, d]."""
        return self.table(labels)


class Modulation(nn.Module):
    """The condition to `pieces` vectors of shift, scale or gate, by one matrix that is `pieces` matrices stacked."""

    def __init__(self, width: int, pieces: int) -> None:
        super().__init__()
        self.pieces = pieces
        self.linear = nn.Linear(width, pieces * width)
        self.linear.matrix_splits = {"weight": (pieces,)}  # so that a matrix optimizer treats each piece alone

    def forward(self, condition: Tensor) -> tuple[Tensor, ...]:
        """[N, d] -> `pieces` tensors [N, 1, d]."""
        return self.linear(F.silu(condition)).unsqueeze(1).chunk(self.pieces, dim=-1)


class LowRankModulation(nn.Module):
    """`Modulation` by a matrix of low rank R: 7dR parameters in place of 6d²; added to one that all blocks share."""

    def __init__(self, width: int, pieces: int, rank: int) -> None:
        super().__init__()
        self.pieces = pieces
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, pieces * width)
        self.up.matrix_splits = {"weight": (pieces,)}

    def forward(self, condition: Tensor) -> tuple[Tensor, ...]:
        """[N, d] -> `pieces` tensors [N, 1, d]."""
        return self.up(self.down(F.silu(condition))).unsqueeze(1).chunk(self.pieces, dim=-1)


class TableModulation(nn.Module):
    """The same pieces for every condition; added to those that all blocks share (PixArt-α, arXiv 2310.00426)."""

    def __init__(self, width: int, pieces: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(pieces, width))

    def forward(self, _condition: Tensor) -> tuple[Tensor, ...]:
        """[N, d] -> `pieces` tensors [d]."""
        return self.table.unbind()


def block_modulation(config: ModelConfig) -> nn.Module:
    """The modulation of a block by ``config.adaln``: six pieces (shift, scale, gate, twice), or four without shifts."""
    if config.adaln == "lora":
        return LowRankModulation(config.width, 6, config.adaln_rank)
    if config.adaln == "single":
        return TableModulation(config.width, 6)
    return Modulation(config.width, 4 if config.adaln == "noshift" else 6)


def shared_modulation(config: ModelConfig) -> Modulation | None:
    """What the modulations of all blocks are added to, where they are light; None where each is whole."""
    return Modulation(config.width, 6) if config.adaln in ("lora", "single") else None
