"""Quintic Newton–Schulz orthogonalisation of stacks of matrices.

    X ← U / ‖U‖_F                               (norm in fp32 or fp64, iterate on the wide orientation)
    repeat ns_steps times:
        A ← X Xᵀ
        X ← a·X + (b·A + c·A²) X                σ ← a·σ + b·σ³ + c·σ⁵ on every singular value σ

Source: Keller Jordan's Muon (2024) and "Muon is Scalable for LLM Training", arXiv 2502.16982.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .coefficients import Coefficients

STACK_BYTES = 256 * 2**20
"""Largest stack handed to one batched matmul. Bounds the transient memory (about three times as much)."""


def newton_schulz(matrices: Tensor, coefficients: Coefficients, steps: int, eps: float, dtype: torch.dtype) -> Tensor:
    """Orthogonalise each matrix of a stack.

    Args:
        matrices: ``[..., m, n]``, any floating dtype. Read only: it is often the momentum buffer itself.
        coefficients: (a, b, c) of the quintic.
        steps: number of iterations.
        eps: added to the Frobenius norm, relative to the largest entry of the matrix.
        dtype: dtype of the iterations and of the result.

    Returns:
        ``[..., m, n]`` in ``dtype``; a zero matrix gives zero. Rows and columns (``min(m, n) = 1``) are normalised
        exactly, because the quintic would map their one singular value 1 to 0.7.
    """
    if matrices.numel() == 0:
        return matrices.to(dtype)
    shape = matrices.shape
    x = matrices.reshape(-1, *shape[-2:])  # always 3-D: the 2-D matmul rounds differently from the batched one
    tall = shape[-2] > shape[-1]
    x = _unit_norm(x, eps)
    x = (x.mT if tall else x).to(dtype, memory_format=torch.contiguous_format)
    if x.shape[-2] > 1:
        a, b, c = coefficients
        for _ in range(steps):
            gram = x @ x.mT
            gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.baddbmm(x, gram, x, beta=a)
    return (x.mT if tall else x).reshape(shape)


def _unit_norm(x: Tensor, eps: float) -> Tensor:
    """A copy of ``x`` [k, m, n] divided by its Frobenius norms, safe for entries of 1e-38 as of 1e38."""
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    tiny = torch.finfo(work).tiny
    x = x.to(work)
    # Dividing by the largest entry first keeps the squares inside the range of fp32.
    x = x / largest_entry(x, (-2, -1)).clamp_min(tiny)
    # Norm of the row norms: a single long reduction would be split over threads, differently for each stack size.
    norm = torch.linalg.vector_norm(torch.linalg.vector_norm(x, dim=-1), dim=-1)[:, None, None]
    exact = min(x.shape[-2:]) == 1
    return x.div_((norm if exact else norm + eps).clamp_min(tiny))


def largest_entry(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """max |x| over ``dim``, which is kept with size 1; an order of magnitude faster on CPU than the infinity norm."""
    return torch.maximum(x.amax(dim, keepdim=True), -x.amin(dim, keepdim=True))


def orthogonalise(
    matrices: Sequence[Tensor], coefficients: Coefficients, steps: int, eps: float, dtype: torch.dtype
) -> list[Tensor]:
    """Orthogonalise matrices of mixed shapes, equal shapes together in stacks of at most ``STACK_BYTES``.

    Args:
        matrices: 2-D tensors, read only.

    Returns:
        2-D tensors in ``dtype``, in the same order.
    """
    by_shape: dict[torch.Size, list[int]] = defaultdict(list)
    for i, matrix in enumerate(matrices):
        by_shape[matrix.shape].append(i)
    result = list(matrices)
    for shape, members in by_shape.items():
        at_once = max(1, STACK_BYTES // max(1, shape.numel() * dtype.itemsize))
        for start in range(0, len(members), at_once):
            chunk = members[start : start + at_once]
            stack = torch.stack([matrices[i] for i in chunk]) if len(chunk) > 1 else matrices[chunk[0]][None]
            for i, matrix in zip(chunk, newton_schulz(stack, coefficients, steps, eps, dtype).unbind(), strict=True):
                result[i] = matrix
    return result


def compute_dtype(requested: torch.dtype | None, weight: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the iterations: the requested one, fp64 for fp64 weights, bf16 where it is native, else fp32."""
    if requested is not None:
        return requested
    if weight == torch.float64:
        return torch.float64
    return torch.bfloat16 if _native_bf16(device.type) else torch.float32


@lru_cache
def _native_bf16(device_type: str) -> bool:
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device_type == "cpu":
        features = torch.cpu.get_capabilities()
        return any(features.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))
    return False
