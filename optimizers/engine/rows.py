"""The row step in one walk over memory.

Done with lists of whole tensors, a row step allocates and walks several temporaries as large as the weights. Here
slices of rows go all the way from momentum to weight while they are in the cache; U exists for one slice at a time:

    M ← as in momentum.py                 S ← U                            formed in the scratch
    S_i ← S_i / max|S_i|                  on a CPU, so that squares neither overflow nor vanish
    W ← (1 − η·λ)·W                       W_i ← W_i − (η·factor / ‖S_i‖₂)·S_i

No row knows of another, so the result does not depend on how they are cut into slices or over ranks. Where ranks share
the rows themselves, ``across.py`` walks twice: for the sums of squares, and for the rest once those are whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..orthogonal.pieces import largest_entry
from ..sharding.layout import Layout
from .algorithm import ALGORITHMS
from .scaling import rate_on
from .scratch import Scratch, as_rows, slices
from .update import decay_and_add

FormInput = Callable[..., object]
"""(buffers, gradients, out=…): form U in the list ``out``, from buffers that it may have to update first."""

TakeCompiled = Callable[[Sequence[Sequence[Tensor]], float, Mapping[str, Any]], list[Sequence[Tensor]]]
"""(members, factor, group): update some of the members in another way and return the others; see ``compiled.py``."""

Kinds = Mapping[tuple[int, torch.dtype, float], list[Sequence[Tensor]]]
"""Members of a walk, tensors of one shape [rows, n] each, by n, dtype of U and factor."""


def row_step(
    weights: Sequence[Tensor],
    buffers: Sequence[Tensor],
    gradients: Sequence[Tensor],
    layouts: Sequence[Layout],
    group: Mapping[str, Any],
    advance: FormInput,
    take_compiled: TakeCompiled | None = None,
) -> None:
    """Update momentum and weights of one job in place: [rows, n] or [e, m, n] each. ``advance`` updates the buffers."""
    found = kinds(layouts, group, weights, buffers, gradients)
    if take_compiled is not None and not group.get("row_eps"):
        found = {kind: take_compiled(members, kind[-1], group) for kind, members in found.items()}
    for factor, u, parts, (w, _, _) in walk(found, advance):
        to_steps(u, group["lr"], factor, eps=group.get("row_eps", 0.0))
        decay_and_add(w, parts, group)


def kinds(layouts: Sequence[Layout], group: Mapping[str, Any], *columns: Sequence[Tensor]) -> Kinds:
    """The members of a walk over weights, buffers, gradients and what else has their shapes."""
    alike: dict[tuple[int, torch.dtype, float], list[Sequence[Tensor]]] = defaultdict(list)
    for layout, *tensors in zip(layouts, *columns, strict=True):
        factors = row_factors(layout, group)
        if len(set(factors)) <= 1:  # by far the usual case: no need to take the tensors apart
            found = [(factors[0], tensors)] if factors else []
        else:
            found = list(zip(factors, zip(*map(layout.views, tensors), strict=True), strict=True))
        for factor, part in found:
            alike[part[0].shape[-1], part[1].dtype, factor] += as_rows(*part)
    return alike


def walk(members_by_kind: Kinds, form: FormInput) -> Iterator[tuple[float, Tensor, list[Tensor], list[list[Tensor]]]]:
    """Slice by slice: the factor, U [rows, n] in at least fp32, its parts, and the parts of each of the columns.

    U is the caller's to write to, until the next slice takes its place.
    """
    scratch: Scratch | None = None
    for (n, dtype, factor), members in members_by_kind.items():
        if not members:
            continue
        scratch = scratch or Scratch(members[0][0].device)
        for counts, columns in slices(members, scratch.rows(n, dtype)):
            u = scratch.take(sum(counts), n, dtype)
            parts = _split(u, counts)
            form(columns[1], columns[2], out=parts)
            if dtype.itemsize < 4:
                u = u.float()
                parts = _split(u, counts)
            yield factor, u, parts, columns


def row_factors(layout: Layout, group: Mapping[str, Any]) -> list[float]:
    """The factor of the row step of every matrix of which this rank holds anything."""
    scale = ALGORITHMS[group["algorithm"]].unit_scale
    return [scale(group, *matrix.shape) for matrix, _, _ in layout.here]


def to_steps(u: Tensor, lr: float | Tensor, factor: float, sums: Tensor | None = None, eps: float = 0.0) -> None:
    """Turn rows of U into −η·factor·R in place; a zero row stays zero. ``eps`` is added to the norms.

    ``sums`` [rows, 1]: the sums of squares of whole rows in fp64, if U holds some of their columns only. In the range
    of fp64 lie the squares of every fp32 number: neither 1e20 nor 1e-25 needs scaling first. A CPU however takes fp64
    sums through a copy of U twice its size; there it is cheaper to divide by the largest entry.
    """
    if sums is not None:
        norms = sums.sqrt() + eps
    elif u.device.type == "cpu":
        scale = largest_entry(u, -1).clamp_min_(torch.finfo(u.dtype).tiny).reciprocal_()
        u.mul_(scale)
        norms = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
        norms = torch.add(norms, scale, alpha=eps) if eps else norms
    else:
        norms = torch.linalg.vector_norm(u, dim=-1, keepdim=True, dtype=torch.float64) + eps
    u.mul_(row_scales(norms, -factor * rate_on(lr, u.device), u.dtype))


def row_scales(norms: Tensor, scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """``scale`` / norm for every row, finite in ``dtype``: a zero row times its own stays zero."""
    most = torch.finfo(dtype).max
    return (norms.double().clamp_min(torch.finfo(dtype).tiny).reciprocal() * scale).clamp(-most, most).to(dtype)


def _split(u: Tensor, counts: list[int]) -> list[Tensor]:
    return [u] if len(counts) == 1 else list(u.split(counts))
