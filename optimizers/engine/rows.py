"""The row step of matrices whose rows lie whole on this rank, in one walk over memory.

Done with lists of whole tensors, a row step allocates and walks several temporaries as large as the weights. Here
slices of rows go all the way from momentum to weight while they are in the cache; U exists for one slice at a time:

    M ← as in momentum.py                 S ← U                            formed in the scratch
    W ← (1 − η·λ)·W                       W_i ← W_i − (η·factor / ‖S_i‖₂)·S_i

No row knows of another, so the result does not depend on how they are cut into slices or over ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..sharding.layout import Layout
from .directions import row_factors
from .scratch import Scratch, as_rows, slices
from .update import decay_and_add

Advance = Callable[[list[Tensor], list[Tensor], list[Tensor]], object]
"""(buffers, gradients, out): update the buffers and form U in ``out``."""


def row_step(
    weights: Sequence[Tensor],
    buffers: Sequence[Tensor],
    gradients: Sequence[Tensor],
    layouts: Sequence[Layout],
    group: Mapping[str, Any],
    advance: Advance,
) -> None:
    """Update momentum and weights of one job in place: [rows, n] or [e, m, n] each."""
    alike: dict[tuple[int, torch.dtype, float], list[Sequence[Tensor]]] = defaultdict(list)
    for weight, buffer, gradient, layout in zip(weights, buffers, gradients, layouts, strict=True):
        for factor, members in _members(weight, buffer, gradient, layout, group):
            alike[weight.shape[-1], buffer.dtype, factor] += members
    if not alike:
        return
    scratch = Scratch(weights[0].device)
    for (n, dtype, factor), members in alike.items():
        for counts, (w, m, g) in slices(members, scratch.rows(n, dtype)):
            u = scratch.take(sum(counts), n, dtype)
            parts = [u] if len(counts) == 1 else list(u.split(counts))
            advance(m, g, parts)
            if dtype.itemsize < 4:
                u = u.float()
                parts = list(u.split(counts))
            _to_steps(u, group["lr"], factor)
            decay_and_add(w, parts, group)


def _members(
    weight: Tensor, buffer: Tensor, gradient: Tensor, layout: Layout, group: Mapping[str, Any]
) -> list[tuple[float, list[Sequence[Tensor]]]]:
    """What a parameter brings to the walk, by factor."""
    factors = row_factors(layout, group)
    if len(set(factors)) <= 1:  # by far the usual case: no need to take the tensor apart
        return [(factors[0], as_rows(weight, buffer, gradient))] if factors else []
    parts = zip(layout.views(weight), layout.views(buffer), layout.views(gradient), strict=True)
    return [(factor, as_rows(*part)) for factor, part in zip(factors, parts, strict=True)]


def _to_steps(u: Tensor, lr: float | Tensor, factor: float) -> None:
    """Turn rows of U into −η·factor·R in place; a zero row stays zero.

    The sums of squares are fp64, in whose range the squares of every fp32 number lie: neither 1e20 nor 1e-25 needs
    scaling first. Multiplying by the reciprocal is half the price of dividing.
    """
    norms = torch.linalg.vector_norm(u, dim=-1, keepdim=True, dtype=torch.float64)
    step = norms.clamp_min_(torch.finfo(u.dtype).tiny).reciprocal_()
    u.mul_(step.mul_(-factor * (lr.to(u.device) if isinstance(lr, Tensor) else lr)).to(u.dtype))
