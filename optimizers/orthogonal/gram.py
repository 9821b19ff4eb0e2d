"""Newton–Schulz on the small Gram matrix: the long side is touched only at the start, at restarts and at the end.

    Every iterate is X_k = Q_k X with Q_k a polynomial in R = X Xᵀ [s, s], s the short side.

    R ← X Xᵀ,  Q ← I
    repeat:
        Z ← b·R + c·R²
        Q ← Q (a·I + Z)
        R ← (a·I + Z) R (a·I + Z)                the Gram matrix of the new iterate
    X ← Q X                                      at a restart, which begins anew with the true R, and at the end

Rounding makes eigenvalues of R negative that are zero, and every iteration magnifies them by a²: hence the restarts,
and hence no bf16 (errors of 0.1 to 5, against 1e-2 in fp16). In units of 2s³ FLOPs, five iterations with one restart
cost 14 + 4·l/s instead of 5 + 10·l/s.

Source: Dao-AILab/gram-newton-schulz.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .coefficients import Coefficients, Schedule


def gram_iterate_(
    x: Tensor, schedule: Schedule, y: Tensor | None = None, restarts: Sequence[int] | None = None
) -> Tensor:
    """Iterate on the Gram matrices of a stack.

    Args:
        x: ``[k, s, l]`` with s ≤ l and singular values of at most 1; overwritten. Any dtype ``check_gram`` allows.
        schedule: (a, b, c) of each iteration.
        y: a buffer like ``x``; None makes one.
        restarts: increasing numbers of iterations after which to restart; None is 2, 5, 8, …

    Returns:
        ``x`` or ``y``, which holds the result.
    """
    k, s, long = x.shape
    rows, y = schedule.rows, torch.empty_like(x) if y is None else y
    restarts = _RESTARTS if restarts is None else restarts
    q, t = x.new_empty(k, s, s), x.new_empty(k, s, s)
    for start, stop in _segments(len(rows), restarts):
        # Between two products with the long side, the buffer of the next iterate is free for R and Z.
        spare = y.view(-1)[: 2 * k * s * s] if long >= 2 * s else x.new_empty(2 * k * s * s)
        r, z = spare.view(2, k, s, s).unbind()
        torch.bmm(x, x.mT, out=r)
        torch.bmm(_left_factor_(r, z, q, t, rows[start:stop]), x, out=y)
        x, y = y, x
    return x


_RESTARTS = range(2, 100, 3)


def gram_flops(schedule: Schedule, s: int, long: int) -> int:
    """FLOPs of the products of ``gram_iterate_`` on one matrix."""
    count = 0
    for start, stop in _segments(len(schedule.rows), _RESTARTS):
        rows = schedule.rows[start:stop]
        small = sum(c != 0 for _, _, c in rows) + 3 * (len(rows) - 1)  # Z; Q except at first, R twice except at last
        count += 2 * (2 * s * s * long) + small * 2 * s**3
    return count


def _segments(iterations: int, restarts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last iteration between restarts."""
    return pairwise((0, *(r for r in restarts if r < iterations), iterations))


def _left_factor_(r: Tensor, z: Tensor, q: Tensor, t: Tensor, rows: Sequence[Coefficients]) -> Tensor:
    """Q [k, s, s] such that Q X is X after the iterations, from R = X Xᵀ; all four tensors are overwritten."""
    for i, (a, b, c) in enumerate(rows):
        if c == 0:
            torch.mul(r, b, out=z)
        else:
            torch.baddbmm(r, r, r, beta=b, alpha=c, out=z)
        if i == 0:
            q.copy_(z).diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            torch.baddbmm(q, q, z, beta=a, out=t)
            q, t = t, q
        if i + 1 < len(rows):
            torch.baddbmm(r, r, z, beta=a, out=t)
            torch.baddbmm(t, z, t, beta=a, out=r)
    return q


def check_gram(dtype: torch.dtype | None, device_type: str | None = None) -> None:
    """Raise a ValueError for a dtype in which the Gram iteration is wrong or pointless; None leaves the choice open."""
    if dtype == torch.bfloat16:
        raise ValueError("Gram Newton–Schulz diverges in bfloat16; set ns_dtype to float32, or float16 on CUDA")
    if dtype == torch.float16 and device_type not in (None, "cuda"):
        raise ValueError(
            f"Gram Newton–Schulz runs in float16 on CUDA only, not on {device_type}; set ns_dtype to float32"
        )
