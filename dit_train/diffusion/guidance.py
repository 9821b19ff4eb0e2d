"""Classifier-free guidance (Ho & Salimans, arXiv 2207.12598)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dit_train.diffusion.samplers import VelocityFn


def guided(
    model_fn: Callable[[Tensor, Tensor, Tensor], Tensor], labels: Tensor, null_label: int, scale: float
) -> VelocityFn:
    """The velocity under guidance: v(null) + scale·(v(labels) − v(null)), on all C channels.

    `model_fn` maps (x [N, C, ...], t [N], labels [N]) to [N, C or more, ...], of which the first C are kept. A scale
    of 1 is the conditional model by one forward of N; any other takes one forward of 2N.
    """

    def conditional(x: Tensor, t: Tensor) -> Tensor:
        return model_fn(x, t, labels)[:, : x.shape[1]]

    def mixed(x: Tensor, t: Tensor) -> Tensor:
        both = torch.cat([labels, torch.full_like(labels, null_label)])  # [2N]
        output = model_fn(torch.cat([x, x]), torch.cat([t, t]), both)[:, : x.shape[1]]  # [2N, C, ...]
        with_label, without = output.chunk(2)
        return without + scale * (with_label - without)

    return conditional if scale == 1 else mixed
