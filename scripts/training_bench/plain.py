"""The same Diffusion Transformer written plainly, as its authors lay it out, to be measured against (arXiv 2212.09748).

A convolution cuts the patches, one matrix makes queries, keys and values, attention is torch's. Nothing of
`dit_train.model` is in it; `copy_weights` brings weights over, so that both can be shown to compute the same.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dit_train.model.dit import DiT


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """x [N, T, d]; shift and scale [N, d]."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class PlainAttention(nn.Module):
    """Full self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, d] -> [N, T, d]."""
        n, t, d = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)  # [N, heads, T, d/heads]
        return self.proj(x.transpose(1, 2).reshape(n, t, d))


class PlainBlock(nn.Module):
    """Attention and MLP with adaLN-zero."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.attn = PlainAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """x [N, T, d], c [N, d] -> [N, T, d]."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.adaLN_modulation(c).chunk(6, dim=1)  # [N, d] each
        x = x + gate_a.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift_a, scale_a))
        return x + gate_m.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_m, scale_m))


class PlainDiT(nn.Module):
    """Class-conditional DiT with a fixed sine-cosine table, which `copy_weights` fills."""

    def __init__(
        self, width: int, depth: int, heads: int, patch: int, channels: int, image_size: int, num_classes: int
    ) -> None:
        super().__init__()
        self.patch, self.channels, self.side = patch, channels, image_size // patch
        self.x_embedder = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)
        self.t_mlp = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.y_embedder = nn.Embedding(num_classes + 1, width)
        self.pos_embed = nn.Parameter(torch.zeros(1, self.side**2, width), requires_grad=False)
        self.blocks = nn.ModuleList(PlainBlock(width, heads) for _ in range(depth))
        self.norm_final = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.adaLN_final = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.linear = nn.Linear(width, patch * patch * channels)

    def embed_time(self, t: Tensor) -> Tensor:
        """t [N] in [0, 1] -> [N, d]."""
        frequencies = torch.exp(-math.log(10000) * torch.arange(128, device=t.device) / 128)
        angles = 1000 * t[:, None] * frequencies  # [N, 128]
        return self.t_mlp(torch.cat([angles.cos(), angles.sin()], dim=1))

    def unpatchify(self, x: Tensor) -> Tensor:
        """[N, T, p·p·C] -> [N, C, H, W]."""
        x = x.reshape(-1, self.side, self.side, self.patch, self.patch, self.channels)
        x = torch.einsum("nhwpqc->nchpwq", x)
        return x.reshape(-1, self.channels, self.side * self.patch, self.side * self.patch)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """x [N, C, H, W], t [N] in [0, 1], y [N] -> [N, C, H, W]."""
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed  # [N, T, d]
        c = self.embed_time(t) + self.y_embedder(y)  # [N, d]
        for block in self.blocks:
            x = block(x, c)  # [N, T, d]
        shift, scale = self.adaLN_final(c).chunk(2, dim=1)
        return self.unpatchify(self.linear(modulate(self.norm_final(x), shift, scale)))


def like(dit: DiT) -> PlainDiT:
    """The plain form of one of our models (of the published kind: no option but sizes), with its weights."""
    size = dit.config
    plain = PlainDiT(
        size.width, size.depth, size.heads, size.patch, dit.channels, dit.image_size, dit.num_classes
    )  # fmt: skip
    copy_weights(dit, plain)
    return plain


def laid_out(dit: DiT, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors (weights, or their gradients) by name -> those of a `PlainDiT` by its names."""
    patch, channels = dit.config.patch, dit.channels
    out = {
        "x_embedder.weight": values["patch_embedding.projection.weight"].unflatten(1, (channels, patch, patch)),
        "x_embedder.bias": values["patch_embedding.projection.bias"],
        "y_embedder.weight": values["label_embedding.table.weight"],
    }
    for kind in ("weight", "bias"):
        out[f"t_mlp.0.{kind}"] = values[f"time_embedding.in_proj.{kind}"]
        out[f"t_mlp.2.{kind}"] = values[f"time_embedding.out_proj.{kind}"]
        out[f"adaLN_final.1.{kind}"] = values[f"final_layer.modulation.linear.{kind}"]
        # ours is ordered as channel, row, column within a patch; the original as row, column, channel
        last = values[f"final_layer.linear.{kind}"].unflatten(0, (channels, patch, patch))
        out[f"linear.{kind}"] = last.movedim(0, 2).flatten(0, 2)
        for i in range(len(dit.blocks)):
            at = f"blocks.{i}."
            qkv = [values[f"{at}attention.{name}.{kind}"] for name in ("query", "key", "value")]
            out[f"{at}attn.qkv.{kind}"] = torch.cat(qkv)
            out[f"{at}attn.proj.{kind}"] = values[f"{at}attention.output.{kind}"]
            out[f"{at}mlp.0.{kind}"] = values[f"{at}mlp.up.{kind}"]
            out[f"{at}mlp.2.{kind}"] = values[f"{at}mlp.down.{kind}"]
            out[f"{at}adaLN_modulation.1.{kind}"] = values[f"{at}modulation.linear.{kind}"]
    return out


@torch.no_grad()
def copy_weights(dit: DiT, plain: PlainDiT) -> None:
    """Give the plain model our weights and our table of positions."""
    weights = laid_out(dit, dict(dit.named_parameters()))
    weights["pos_embed"] = dit.position.table.unsqueeze(0)
    plain.load_state_dict(weights)
