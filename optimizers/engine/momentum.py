"""The momentum forms: what the buffer M keeps and which U is handed to the normaliser.

    ema         M ← μ·M + (1−μ)·G        U = M, or with Nesterov  (1−μ)·G + μ·M
    heavy_ball  M ← μ·M + G              U = M, or with Nesterov  G + μ·M

From M = 0 the two differ by the constant factor 1−μ, which every normaliser here removes again.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

MomentumForm = Literal["ema", "heavy_ball"]
MOMENTUM_FORMS: tuple[str, ...] = get_args(MomentumForm)


def update_momentum(
    buffers: list[Tensor], grads: list[Tensor], mu: float, nesterov: bool, form: MomentumForm
) -> list[Tensor]:
    """Update the buffers in place and return U, one tensor a buffer, in the dtype of the buffers.

    Without Nesterov the buffers themselves are returned: whoever receives U must not write to it.
    """
    if not buffers:
        return []
    grads = [g.to(m.dtype) for g, m in zip(grads, buffers, strict=True)]
    if form == "ema":
        torch._foreach_lerp_(buffers, grads, 1 - mu)
        return list(torch._foreach_lerp(grads, buffers, mu)) if nesterov else buffers
    torch._foreach_mul_(buffers, mu)
    torch._foreach_add_(buffers, grads)
    return list(torch._foreach_add(grads, buffers, alpha=mu)) if nesterov else buffers
