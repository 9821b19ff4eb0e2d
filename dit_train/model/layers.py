"""Patches, attention and the MLP."""

from __future__ import annotations

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dit_train.config import ModelConfig
from dit_train.model.position import RotaryPosition
from dit_train.model.sizes import mlp_width

EPS = 1e-6
"""Of every norm in the model."""


def patchify(images: Tensor, patch: int) -> Tensor:
    """[N, C, H, W] -> [N, T, C·p·p], T = (H/p)·(W/p) in reading order; features ordered as a convolution's weight."""
    return rearrange(images, "n c (h p) (w q) -> n (h w) (c p q)", p=patch, q=patch)


def unpatchify(tokens: Tensor, patch: int, side: int) -> Tensor:
    """[N, T, C·p·p] -> [N, C, side·p, side·p], the inverse of `patchify` on a square image."""
    return rearrange(tokens, "n (h w) (c p q) -> n c (h p) (w q)", h=side, p=patch, q=patch)


def layer_norm(x: Tensor) -> Tensor:
    """LayerNorm over the last dimension, without gain and bias: adaLN brings its own."""
    return F.layer_norm(x, x.shape[-1:], eps=EPS)


class PatchEmbedding(nn.Module):
    """Patches to tokens: a convolution of stride p, written as a matrix."""

    def __init__(self, channels: int, patch: int, width: int) -> None:
        super().__init__()
        self.patch = patch
        self.projection = nn.Linear(channels * patch * patch, width)

    def forward(self, images: Tensor) -> Tensor:
        """[N, C, H, W] of any float type -> [N, T, d] in the weights' dtype."""
        return self.projection(patchify(images, self.patch).to(self.projection.weight.dtype))


class Attention(nn.Module):
    """Full self-attention with separate query, key and value matrices (each is one matrix to a matrix optimizer)."""

    def __init__(self, config: ModelConfig, side: int) -> None:
        super().__init__()
        width, self.head_width = config.width, config.width // config.heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.query_norm = nn.RMSNorm(self.head_width, eps=EPS) if config.qk_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(self.head_width, eps=EPS) if config.qk_norm else nn.Identity()
        self.rotate = RotaryPosition(side, self.head_width) if config.position == "rope" else nn.Identity()

    def _heads(self, x: Tensor) -> Tensor:
        # [N, T, d] -> [N, heads, T, d/heads]; under tensor parallelism a rank has some of the heads
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    def queries_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[N, T, d] -> queries and keys as they meet, normalised and turned, [N, heads, T, d/heads] each."""
        queries = self.rotate(self.query_norm(self._heads(self.query(x))))
        keys = self.rotate(self.key_norm(self._heads(self.key(x))))
        return queries, keys

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, d] -> [N, T, d]."""
        queries, keys = self.queries_keys(x)  # [N, heads, T, d/heads] each
        values = self._heads(self.value(x))  # [N, heads, T, d/heads]
        mixed = F.scaled_dot_product_attention(queries, keys, values)  # [N, heads, T, d/heads]
        return self.output(mixed.transpose(1, 2).flatten(2))  # [N, T, d]


class MLP(nn.Module):
    """Two matrices with a GELU (tanh) between."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, mlp_width(config))
        self.down = nn.Linear(mlp_width(config), config.width)

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, d] -> [N, T, d]."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class SwiGLU(nn.Module):
    """Three matrices, one of them a gate (Shazeer, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, mlp_width(config))
        self.up = nn.Linear(config.width, mlp_width(config))
        self.down = nn.Linear(mlp_width(config), config.width)

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, d] -> [N, T, d]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))
