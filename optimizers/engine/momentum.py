"""The momentum forms: what the buffer M keeps and which U is handed to the normaliser.

    ema         M ← μ·M + (1−μ)·G        U = M, or with Nesterov  (1−μ)·G + μ·M
    heavy_ball  M ← μ·M + G              U = M, or with Nesterov  G + μ·M

From M = 0 the two differ by the constant factor 1−μ, which every normaliser here removes again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from .scratch import Scratch, as_rows, slices

MomentumForm = Literal["ema", "heavy_ball"]
MOMENTUM_FORMS: tuple[str, ...] = get_args(MomentumForm)


def update_momentum(
    buffers: list[Tensor],
    grads: list[Tensor],
    mu: float,
    nesterov: bool,
    form: MomentumForm,
    out: list[Tensor] | None = None,
) -> list[Tensor]:
    """Update the buffers in place and return U, one tensor a buffer: ``out`` if given, else in the buffers' dtype.

    Without Nesterov and ``out`` the buffers themselves are returned: whoever receives U must not write to it.
    """
    if not buffers:
        return []
    converted = _as_buffers(buffers, grads)
    if form == "ema":
        torch._foreach_lerp_(buffers, converted, 1 - mu)
    else:
        torch._foreach_mul_(buffers, mu)
        torch._foreach_add_(buffers, converted)
    return look_ahead(buffers, converted, mu, nesterov, form, out)


def look_ahead(
    buffers: list[Tensor],
    grads: list[Tensor],
    mu: float,
    nesterov: bool,
    form: MomentumForm,
    out: list[Tensor] | None = None,
) -> list[Tensor]:
    """U from buffers that have been updated by these gradients already."""
    if out is not None:
        if nesterov and form == "ema" and len(out) == 1 and out[0].dtype == buffers[0].dtype == grads[0].dtype:
            torch.lerp(grads[0], buffers[0], mu, out=out[0])
            return out
        torch._foreach_copy_(out, grads if nesterov else buffers)
        if nesterov and form == "ema":
            torch._foreach_lerp_(out, buffers, mu)
        elif nesterov:
            torch._foreach_add_(out, buffers, alpha=mu)
        return out
    if not nesterov or not buffers:
        return buffers
    grads = _as_buffers(buffers, grads)
    if form == "ema":
        return list(torch._foreach_lerp(grads, buffers, mu))
    return list(torch._foreach_add(grads, buffers, alpha=mu))


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
