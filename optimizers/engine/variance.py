"""Variance reduction of gradients (MARS, arXiv 2411.10438; MARS-M, arXiv 2510.21800).

    C ← G + γ·μ/(1−μ)·(G − G')          G': the gradient before; 0 on the first step
    C ← C / max(1, ‖C‖_F / clip)        of a whole parameter

C takes the place of G. In the approximate form G' is the last step's gradient; in the exact one it is taken at the last
weights and this step's batch (``Driver.at_previous_weights``). All norms of a step travel in one all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..sharding.layout import local
from .sums import Groups, Sums


def decay_of(group: Mapping[str, Any]) -> float:
    """μ, or β₁ of Adam."""
    return group["betas"][0] if "betas" in group else group["momentum"]


def corrected(gradient: Tensor, last: Tensor, group: Mapping[str, Any]) -> Tensor:
    """C before it is clipped, a new tensor in the dtype of ``last``."""
    mu = decay_of(group)
    gradient = gradient.to(last.dtype)
    return torch.add(gradient, gradient - last, alpha=group["mars_gamma"] * mu / (1 - mu))


def measured(gradient: Tensor, last: Tensor, group: Mapping[str, Any], groups: Groups, sums: Sums) -> Tensor:
    """‖C‖_F² of a parameter of which this rank has a part; whole, once ``sums`` have been reduced."""
    norm = torch.linalg.vector_norm(corrected(gradient, last, group), dtype=torch.float64)
    return sums.add(norm.square(), groups)


def corrections(
    gradients: Sequence[Tensor], last: Sequence[Tensor], squares: Sequence[Tensor | None], group: Mapping[str, Any]
) -> list[Tensor]:
    """C of every gradient, new tensors; ``last`` becomes what the next step compares with."""
    found = []
    for gradient, before, norm in zip(gradients, last, squares, strict=True):
        c = corrected(gradient, before, group)
        if norm is not None:
            c.div_((norm.sqrt() / group["mars_clip"]).clamp_min(1).to(c.dtype))
        before.copy_(gradient)
        found.append(c)
    return found


def swap_weights(group: Mapping[str, Any], state: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
    """Exchange this rank's part of the weights of a group with those of before its last step."""
    for p in group["params"]:
        if p.requires_grad:
            now, before = local(p.detach()), local(state[p]["last_weight"])
            kept = now.clone()
            now.copy_(before)
            before.copy_(kept)


def keep_weights(group: Mapping[str, Any], state: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
    """Copy this rank's part of the weights of a group, before its step changes them; of frozen ones too."""
    for p in group["params"]:
        if "last_weight" in state.get(p, {}):
            local(state[p]["last_weight"]).copy_(local(p.detach()))
