"""The momentum forms: what the buffer M keeps and which U is handed to the normaliser.

    ema         M ← μ·M + (1−μ)·G        U = M, or looking ahead by κ:  (1−κ)·G + κ·M
    heavy_ball  M ← μ·M + G              U = M, or looking ahead by κ:  G + κ·M

Nesterov's look-ahead is κ = μ. Lion's dual average, U = β₁·M + (1−β₁)·G with the M of before this step and μ = β₂, is
κ = β₁/β₂ in terms of the M of after it. From M = 0 the two forms differ by the constant factor 1−μ, which every
normaliser here removes again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from .scratch import Scratch, as_rows, slices

MomentumForm = Literal["ema", "heavy_ball"]
MOMENTUM_FORMS: tuple[str, ...] = get_args(MomentumForm)


def update_momentum(
    buffers: list[Tensor],
    grads: list[Tensor],
    mu: float,
    ahead: float | None,
    form: MomentumForm,
    out: list[Tensor] | None = None,
) -> list[Tensor]:
    """Update the buffers in place and return U, one tensor a buffer: ``out`` if given, else in the buffers' dtype.

    ``ahead`` is κ, None for U = M. Without it and ``out`` the buffers themselves are returned: whoever receives U must
    not write to it.
    """
    if not buffers:
        return []
    converted = _as_buffers(buffers, grads)
    if form == "ema":
        torch._foreach_lerp_(buffers, converted, 1 - mu)
    else:
        torch._foreach_mul_(buffers, mu)
        torch._foreach_add_(buffers, converted)
    return look_ahead(buffers, converted, ahead, form, out)


def ahead_of(group: Mapping[str, Any]) -> float | None:
    """κ of a group, None if U = M."""
    if "input_momentum" in group:  # β₁ of a dual average
        return group["input_momentum"] / group["momentum"] if group["momentum"] else None
    return group["momentum"] if group["nesterov"] else None


def form_of(group: Mapping[str, Any]) -> MomentumForm:
    """The form of a group; a dual average has but one."""
    return group.get("momentum_form", "ema")


def look_ahead(
    buffers: list[Tensor],
    grads: list[Tensor],
    ahead: float | None,
    form: MomentumForm,
    out: list[Tensor] | None = None,
) -> list[Tensor]:
    """U from buffers that have been updated by these gradients already."""
    if out is not None:
        if ahead is not None and form == "ema" and len(out) == 1 and out[0].dtype == buffers[0].dtype == grads[0].dtype:
            torch.lerp(grads[0], buffers[0], ahead, out=out[0])
            return out
        torch._foreach_copy_(out, buffers if ahead is None else grads)
        if ahead is not None and form == "ema":
            torch._foreach_lerp_(out, buffers, ahead)
        elif ahead is not None:
            torch._foreach_add_(out, buffers, alpha=ahead)
        return out
    if ahead is None or not buffers:
        return buffers
    grads = _as_buffers(buffers, grads)
    if form == "ema":
        return list(torch._foreach_lerp(grads, buffers, ahead))
    return list(torch._foreach_add(grads, buffers, alpha=ahead))


def advance_in(
    outs: Sequence[Tensor | None],
    buffers: list[Tensor],
    grads: list[Tensor],
    advance: Callable[..., object],
    take_compiled: Callable[[list[Sequence[Tensor]]], list[Sequence[Tensor]]] | None = None,
) -> None:
    """U in given tensors, formed slice by slice; in those of another dtype through a scratch, never as a whole.

    ``advance`` (buffers, gradients, out=…) updates the buffers and forms U in ``out``. Where ``outs`` is None, U is not
    wanted. ``take_compiled`` does so for some of the members (buffer, gradient, U) and returns the others.
    """
    scratch = Scratch(buffers[0].device)
    wanted, unwanted = [], []
    for m, g, out in zip(buffers, grads, outs, strict=True):
        (unwanted if out is None else wanted).extend(as_rows(*((m, g) if out is None else (m, g, out))))
    if take_compiled is not None:
        wanted = take_compiled(wanted)
    for rows in (*wanted, *unwanted):
        n, dtype = rows[0].shape[-1], rows[0].dtype
        for counts, (moment, gradient, *narrow) in slices([rows], scratch.rows(n, dtype)):
            if narrow and narrow[0][0].dtype == dtype:
                advance(moment, gradient, out=narrow[0])
                continue
            u = scratch.take(sum(counts), n, dtype)
            advance(moment, gradient, out=[u])
            for target in narrow:
                target[0].copy_(u)


def _as_buffers(buffers: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    return [g.to(m.dtype) for g, m in zip(grads, buffers, strict=True)]
