"""The class-conditional Diffusion Transformer with adaLN-zero (Peebles & Xie, arXiv 2212.09748)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dit_train.config import ModelConfig
from dit_train.model.conditioning import LabelEmbedding, Modulation, TimeEmbedding, block_modulation, shared_modulation
from dit_train.model.layers import MLP, Attention, PatchEmbedding, SwiGLU, layer_norm, unpatchify
from dit_train.model.position import RotaryPosition, SinCosPosition
from dit_train.model.sizes import check_model


def modulate(x: Tensor, shift: Tensor | None, scale: Tensor) -> Tensor:
    """x [N, T, d] scaled by 1 + scale and shifted, [N, 1, d] each."""
    scaled = x * (1 + scale)
    return scaled if shift is None else scaled + shift


class Block(nn.Module):
    """Attention and MLP, each normalised, modulated by the condition and gated."""

    def __init__(self, config: ModelConfig, side: int) -> None:
        super().__init__()
        self.attention = Attention(config, side)
        self.mlp = SwiGLU(config) if config.swiglu else MLP(config)
        self.modulation = block_modulation(config)
        self.recompute: Callable[..., Tensor] | None = None
        """Calls a function and keeps less for the backward, see `dit_train.parallel.memory`; None keeps all."""

    def forward(self, tokens: Tensor, condition: Tensor, shared: tuple[Tensor, ...] | None) -> Tensor:
        """Tokens [N, T, d], condition [N, d], pieces [N, 1, d] that this block's are added to -> [N, T, d]."""
        if self.recompute is None or not torch.is_grad_enabled():
            return self._transform(tokens, condition, shared)
        return self.recompute(self._transform, tokens, condition, shared)

    def _transform(self, tokens: Tensor, condition: Tensor, shared: tuple[Tensor, ...] | None) -> Tensor:
        pieces = self.modulation(condition)  # each [N, 1, d], or [d]
        if shared is not None:
            pieces = tuple(own + common for own, common in zip(pieces, shared, strict=True))
        scale_a, gate_a, scale_m, gate_m = pieces if len(pieces) == 4 else (*pieces[1:3], *pieces[4:])
        shift_a, shift_m = (None, None) if len(pieces) == 4 else (pieces[0], pieces[3])
        tokens = tokens + gate_a * self.attention(modulate(layer_norm(tokens), shift_a, scale_a))
        return tokens + gate_m * self.mlp(modulate(layer_norm(tokens), shift_m, scale_m))


class FinalLayer(nn.Module):
    """Tokens to the values of a patch."""

    def __init__(self, width: int, values: int) -> None:
        super().__init__()
        self.modulation = Modulation(width, 2)
        self.linear = nn.Linear(width, values)

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:
        """Tokens [N, T, d], condition [N, d] -> [N, T, C_out·p·p]."""
        shift, scale = self.modulation(condition)  # each [N, 1, d]
        return self.linear(modulate(layer_norm(tokens), shift, scale))


class DiT(nn.Module):
    """Predicts the velocity noise − x0 of a noised image.

    Args:
        config: sizes and options.
        channels: C of the images or latents.
        image_size: their side, divisible by the patch.
        num_classes: K; labels run over 0..K−1, and K is the null class.

    The weights are torch's own until `dit_train.model.init.initialize` draws them. The caller may hold the weights in
    bf16 (FSDP2 with ``cast_forward_inputs=False`` on the root): x is cast here, t only after its frequencies.

    Raises `dit_train.config.ConfigError` where the settings do not fit together.
    """

    def __init__(self, config: ModelConfig, *, channels: int, image_size: int, num_classes: int) -> None:
        super().__init__()
        check_model(config, image_size)
        self.config = config
        self.channels, self.image_size, self.num_classes = channels, image_size, num_classes
        self.side = image_size // config.patch
        self.patch_embedding = PatchEmbedding(channels, config.patch, config.width)
        self.position = SinCosPosition(self.side, config.width) if config.position == "sincos" else nn.Identity()
        self.time_embedding = TimeEmbedding(config.width)
        self.label_embedding = LabelEmbedding(num_classes, config.width)
        self.modulation = shared_modulation(config)
        self.blocks = nn.ModuleList(Block(config, self.side) for _ in range(config.depth))
        self.final_layer = FinalLayer(config.width, self.out_channels * config.patch**2)

    @property
    def null_label(self) -> int:
        """The label that means no class."""
        return self.num_classes

    @property
    def out_channels(self) -> int:
        """C, or 2C with learned sigma; the first C are the velocity."""
        return self.channels * (2 if self.config.learn_sigma else 1)

    def refill_tables(self) -> None:
        """Compute the fixed position tables anew, as needed after ``to_empty``."""
        for module in self.modules():
            if isinstance(module, SinCosPosition | RotaryPosition):
                module.refill()

    def forward(self, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """x [N, C, H, W], t [N] fp32 in [0, 1], labels [N] int64 in 0..K -> [N, C or 2C, H, W] fp32."""
        tokens = self.position(self.patch_embedding(x))  # [N, T, d]
        condition = self.time_embedding(t) + self.label_embedding(labels)  # [N, d]
        shared = self.modulation(condition) if self.modulation is not None else None  # each [N, 1, d]
        for block in self.blocks:
            tokens = block(tokens, condition, shared)  # [N, T, d]
        patches = self.final_layer(tokens, condition)  # [N, T, C_out·p·p]
        return unpatchify(patches, self.config.patch, self.side).float()  # [N, C_out, H, W]


def parameter_count(model: DiT, *, fixed: bool = False) -> int:
    """Number of parameters; with `fixed` the sine-cosine table too, which the published figures count."""
    table = model.position.table.numel() if fixed and isinstance(model.position, SinCosPosition) else 0
    return sum(parameter.numel() for parameter in model.parameters()) + table
