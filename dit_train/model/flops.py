"""FLOPs of a DiT's forward and backward, counted from its shapes: what is done for each token, and once an image."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from dit_train.model.dit import DiT

_ONCE_AN_IMAGE = ("modulation", "time_embedding")
_NO_INPUT_GRADIENT = ("patch_embedding.projection", "time_embedding.in_proj")
"""They read images and times, which nothing is to be learnt about."""


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of forward and backward together for one image: 2·m·n a matrix and vector, and twice that back."""

    per_token: int
    """Of matrices that see each token, over all tokens: 6·N·T, less what the first layer does not send back."""
    per_image: int
    """Of matrices that see one vector an image (modulations, time): 6·N, less the same."""
    attention: int
    """Scores and their use: 12·L·T²·d. Kernels that recompute the scores in the backward do 2·L·T²·d more."""

    @property
    def total(self) -> int:
        """For one image."""
        return self.per_token + self.per_image + self.attention


def model_flops(dit: DiT) -> ModelFlops:
    """The FLOPs that a model's shapes ask for; recomputed activations are not among them.

    Equal to what ``torch.utils.flop_counter.FlopCounterMode`` counts with attention written out.
    """
    tokens, done = dit.side**2, {True: 0, False: 0}
    for name, module in dit.named_modules():
        if isinstance(module, nn.Linear):
            once = any(part in name for part in _ONCE_AN_IMAGE)
            passes = 2 if name in _NO_INPUT_GRADIENT else 3
            done[once] += 2 * passes * math.prod(module.weight.shape) * (1 if once else tokens)
    attention = 12 * dit.config.depth * tokens**2 * dit.config.width
    return ModelFlops(per_token=done[False], per_image=done[True], attention=attention)
