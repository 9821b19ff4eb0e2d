"""``compile=True``: passes over large matrices as kernels that ``torch.compile`` writes at their first use.

The row step is two:

    s_i ← −η·factor / ‖U_i‖₂              reads M and G; neither the new M nor U is kept
    M ← as in momentum.py                 forms both again, while M and G are in the cache,
    W_i ← (1 − η·λ)·W_i + s_i·U_i         and writes M and W

Memory is read three times and written twice, where Adam reads four and writes three. As one kernel it would need no
second look at M and G, but the C++ generator of torch 2.14 fails on a reduction followed by two updates in place.

On a refresh, M and G are read once, and the new M and U, in the dtype in which it travels, are written.

What a scheduler may change are 0-d fp64 tensors on the host, and sizes are dynamic, so that neither compiles anew.
One kernel writes all that a slice changes: if its compilation fails, the slice has not been touched.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .momentum import ahead_of, form_of
from .rows import row_scales
from .scratch import KERNEL_BYTES

Members = Sequence[Sequence[Tensor]]

BACKEND = "inductor"

CACHE_BYTES = 4 * 2**20
"""A slice of one tensor on a CPU. Larger than that of the eager walk: a call costs more, and there is no scratch."""

LEAST_BYTES = 2**20
"""Smaller matrices stay with the eager walk, where many share a slice: a call here costs about 0.05 ms."""


def scales_of_rows(m: Tensor, g: Tensor, mu: Tensor, ahead: Tensor | None, scale: Tensor, form: str) -> Tensor:
    """``scale`` / ‖U_i‖₂ [rows, 1] for momentum and gradient [rows, n], neither of which is changed."""
    _, u = _advanced(m, g, mu, ahead, form)
    return row_scales(u.double().square().sum(-1, keepdim=True).sqrt(), scale, u.dtype)


def update_rows(
    w: Tensor, m: Tensor, g: Tensor, scales: Tensor, mu: Tensor, ahead: Tensor | None, keep: Tensor, form: str
) -> None:
    """M ← its next value, W_i ← ``keep``·W_i + scales_i·U_i in place, all [rows, n]; 16-bit ones are rounded once."""
    advanced, u = _advanced(m, g, mu, ahead, form)
    m.copy_(advanced)
    w.copy_(w.to(_wide(w.dtype)) * keep + u * scales)


def advance_into(m: Tensor, g: Tensor, out: Tensor, mu: Tensor, ahead: Tensor | None, form: str) -> None:
    """M ← its next value in place, and U into ``out`` of any dtype, all [rows, n]."""
    advanced, u = _advanced(m, g, mu, ahead, form)
    m.copy_(advanced)
    out.copy_(u)


def _advanced(m: Tensor, g: Tensor, mu: Tensor, ahead: Tensor | None, form: str) -> tuple[Tensor, Tensor]:
    """The next M, and U, both in at least fp32."""
    m, g = m.to(_wide(m.dtype)), g.to(_wide(m.dtype))
    fresh = 1 - mu if form == "ema" else torch.ones_like(mu)
    m = m + (g - m) * fresh if form == "ema" else m * mu + g
    if ahead is None:
        return m, m
    return m, (g * (1 - ahead) if form == "ema" else g) + m * ahead


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class Kernels:
    """The compiled kernels of one optimizer, until the first failure, of which a warning tells.

    Members are lists of tensors [rows, n]. Those that are not worth a call, and parts that failed, are returned.
    """

    def __init__(self) -> None:
        self.working = True
        self._functions: dict[str, Callable[..., Any]] = {}

    def row_step(self, members: Members, factor: float, group: Mapping[str, Any]) -> list[Sequence[Tensor]]:
        """Take the row step of members (weight, momentum, gradient)."""
        form = form_of(group)

        def take(w: Tensor, m: Tensor, g: Tensor) -> None:
            mu, ahead = _momenta(group)
            keep, scale = _rates(group, factor, w.device)
            scales = self._call(scales_of_rows, m, g, mu, ahead, scale, form)
            self._call(update_rows, w, m, g, scales, mu, ahead, keep, form)

        return self._each(members, take)

    def advance(self, members: Members, group: Mapping[str, Any]) -> list[Sequence[Tensor]]:
        """Update the momentum of members (momentum, gradient, out) and form U in ``out``, of any dtype."""
        how = (*_momenta(group), form_of(group))
        return self._each(members, lambda m, g, out: self._call(advance_into, m, g, out, *how))

    def _each(self, members: Members, take: Callable[..., None]) -> list[Sequence[Tensor]]:
        if _get_current_dispatch_mode() is not None:  # a counter around this step, under which nothing compiles
            return list(members)
        left: list[Sequence[Tensor]] = []
        for member in members:
            size = max(t.nbytes for t in member)
            if size < LEAST_BYTES or not all(t.is_contiguous() for t in member):
                left.append(member)
                continue
            count = ceil(size / (CACHE_BYTES if member[0].device.type == "cpu" else KERNEL_BYTES))
            for part in zip(*(t.chunk(count) for t in member), strict=True):
                # Of a view, its base would be compiled in as well, and another shape of that compile anew.
                if not self._taken(take, [t.data for t in part]):
                    left.append(part)
            torch.autograd.graph.increment_version(member[0])
        return left

    def _taken(self, take: Callable[..., None], part: Sequence[Tensor]) -> bool:
        if self.working:
            try:
                take(*part)
            except Exception as error:
                self.working = False
                said = [line.strip() for line in str(error).splitlines() if line.strip()]  # the second names the cause
                warnings.warn(
                    f"compile=True failed, steps go on without it ({type(error).__name__}: {' '.join(said[:2])})",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return self.working

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        name = function.__name__
        if name not in self._functions:
            self._functions[name] = _compile(function)
        return self._functions[name](*args)


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend=BACKEND, dynamic=True, fullgraph=True)


def _momenta(group: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """μ and κ as 0-d fp64 tensors on the host."""
    ahead = ahead_of(group)
    return _on_host(group["momentum"]), None if ahead is None else _on_host(ahead)


def _rates(group: Mapping[str, Any], factor: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """1 − η·λ and −η·factor as 0-d fp64 tensors; an lr on a device stays on it, all else on the host."""
    lr = group["lr"]
    if isinstance(lr, Tensor):
        lr = lr.double() if lr.device.type == "cpu" else lr.to(device, torch.float64)
    else:
        lr = _on_host(lr)
    return 1 - lr * group["weight_decay"], -factor * lr


def _on_host(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
