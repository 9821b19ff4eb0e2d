"""Newton–Schulz orthogonalisation of stacks of matrices.

    X ← U / ‖U‖_F                               (norm in fp32 or fp64, iterate on the wide orientation)
    AOL scaling, if the set asks for it:        X ← diag(d) X,  d_i = (Σ_j |X Xᵀ|_ij)^(-1/2)
    repeat for every (a, b, c) of the set:
        A ← X Xᵀ
        X ← a·X + (b·A + c·A²) X                σ ← a·σ + b·σ³ + c·σ⁵ on every singular value σ

Sources: Keller Jordan's Muon (2024) and "Muon is Scalable for LLM Training", arXiv 2502.16982; Turbo-Muon,
arXiv 2512.04632, for AOL scaling; coefficients.py and gram.py for the sets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .coefficients import NS5, AnyCoefficients, Schedule, is_gram, needs_full_precision, resolve
from .gram import check_gram, gram_iterate_

STACK_BYTES = 256 * 2**20
"""Largest stack that is orthogonalised at once, counted in the larger of norm and iteration dtype.

The transient memory, results included, is at most 3 times as much (2 + short side / long side when the iterations run
in fp32, 2 + 2·short/long for Gram sets, which need long ≥ 2·short), and about 1.5 times when they run in 16 bits.
"""


@torch.no_grad()
def orthogonalize(
    matrices: Tensor,
    coefficients: AnyCoefficients = NS5,
    steps: int | None = None,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Orthogonalise each matrix of a stack; the result does not depend on what else is in the stack.

    Args:
        matrices: ``[..., m, n]``, any real floating dtype. Read only: it is often the momentum buffer itself.
        coefficients: a name of ``coefficients.NAMES``, a triple (a, b, c), or a sequence of triples.
        steps: number of iterations; None is the set's own length, 5 for a triple.
        eps: added to the Frobenius norm, relative to the largest entry of the matrix.
        dtype: of the iterations and of the result; None chooses as ``compute_dtype`` does.

    Returns:
        ``[..., m, n]`` in ``dtype``, new and contiguous. A zero matrix gives zero. Rows and columns
        (``min(m, n) = 1``) are normalised exactly, because the quintic would map their one singular value 1 to 0.7.
        A NaN or an infinity makes its whole matrix NaN, and no other one.

    Raises:
        ValueError: for fewer than two dimensions, a dtype that is no real float, an unknown set (with the nearest
            name), steps that do not fit, or a Gram set in bf16 or, off CUDA, in fp16, or CANS in 16 bits.
    """
    schedule = resolve(coefficients, steps)
    if matrices.ndim < 2 or not matrices.is_floating_point():
        raise ValueError(
            f"matrices of shape {tuple(matrices.shape)} and {matrices.dtype} are not supported; "
            "they have to be real floats of shape [..., m, n]"
        )
    dtype = compute_dtype(dtype, matrices.dtype, matrices.device, coefficients)
    if matrices.numel() == 0:
        return torch.empty(matrices.shape, dtype=dtype, device=matrices.device)
    # Always 3-D: the 2-D matmul rounds differently from the batched one.
    stack = matrices.reshape(-1, *matrices.shape[-2:])
    owned = [stack.to(_norm_dtype(stack.dtype), copy=True, memory_format=torch.contiguous_format)]
    del stack
    return _consume(owned, schedule, eps, dtype).view(matrices.shape)


@torch.no_grad()
def orthogonalize_all(
    matrices: Sequence[Tensor],
    coefficients: AnyCoefficients = NS5,
    steps: int | None = None,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Orthogonalise matrices of mixed shapes, equal shapes together in stacks of at most ``STACK_BYTES``.

    Args:
        matrices: 2-D tensors of one dtype on one device, read only. The rest is as in ``orthogonalize``.

    Returns:
        2-D contiguous tensors in ``dtype``, in the same order.
    """
    if not matrices:
        return []
    schedule, norm_dtype = resolve(coefficients, steps), _norm_dtype(matrices[0].dtype)
    dtype = compute_dtype(dtype, matrices[0].dtype, matrices[0].device, coefficients)
    by_shape: dict[torch.Size, list[int]] = defaultdict(list)
    for i, matrix in enumerate(matrices):
        by_shape[matrix.shape].append(i)
    result = list(matrices)
    for shape, members in by_shape.items():
        if shape.numel() == 0:
            for i in members:
                result[i] = torch.empty(shape, dtype=dtype, device=matrices[i].device)
            continue
        at_once = max(1, STACK_BYTES // (shape.numel() * max(norm_dtype.itemsize, dtype.itemsize)))
        for start in range(0, len(members), at_once):
            chunk = members[start : start + at_once]
            owned = [torch.stack([matrices[i] for i in chunk]).to(norm_dtype)]
            for i, matrix in zip(chunk, _consume(owned, schedule, eps, dtype).unbind(), strict=True):
                result[i] = matrix
    return result


def _consume(owned: list[Tensor], schedule: Schedule, eps: float, dtype: torch.dtype) -> Tensor:
    """Orthogonalise the one contiguous stack [k, m, n] of the list, which is taken out so that it can be freed."""
    x = owned.pop()
    _unit_norm_(x, eps)
    tall = x.shape[-2] > x.shape[-1]
    x = x.to(dtype)
    if tall:  # turned in the dtype of the iterations, which is the smaller one, on the way in as on the way out
        x = x.mT.contiguous()
    short, long = x.shape[-2:]
    if short > 1:
        # Below twice as long as wide, the Gram form gains nothing and needs more memory.
        x = gram_iterate_(x, schedule.rows) if schedule.gram and long >= 2 * short else iterate_(x, schedule)
    return x.mT.contiguous() if tall else x


def iterate_(x: Tensor, schedule: Schedule) -> Tensor:
    """The iterations on ``x`` [k, s, l], s ≤ l, which is overwritten; in one more buffer of its size and one [k, s, s].

    Written into buffers because fresh ones would be paged in anew at every iteration.
    """
    y, z = torch.empty_like(x), x.new_empty(*x.shape[:2], x.shape[1])
    for i, (a, b, c) in enumerate(schedule.rows):
        corner = y.view(-1)[: z.numel()].view_as(z)
        gram = z if c == 0 else corner
        torch.bmm(x, x.mT, out=gram)
        if i == 0 and schedule.aol:
            _aol_scale_(x, gram)
        if c == 0:
            torch.baddbmm(x, gram, x, beta=a, alpha=b, out=y)
        else:
            torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=z)
            torch.baddbmm(x, z, x, beta=a, out=y)
        x, y = y, x
    return x


def _aol_scale_(x: Tensor, gram: Tensor) -> None:
    """Scale the rows of ``x`` so that ‖X‖_op ≤ 1, a tighter bound than ‖X‖_F = 1, and its Gram matrix with it.

    The result tends to polar(D·X), not to polar(X): cosine 0.988 on a power-law spectrum.
    """
    sums = torch.linalg.vector_norm(gram, 1, dim=-1, keepdim=True).to(_norm_dtype(gram.dtype))
    # Not rsqrt: on CPU its vectorised form rounds differently from the scalar one, so stacks would not be alike.
    scale = torch.where(sums > 0, 1 / sums.sqrt(), 0).to(x.dtype)
    x.mul_(scale)
    gram.mul_(scale).mul_(scale.mT)


def _unit_norm_(x: Tensor, eps: float) -> None:
    """Divide ``x`` [k, m, n] by its Frobenius norms in place, safe for entries of 1e-38 as of 1e38."""
    tiny = torch.finfo(x.dtype).tiny
    # Dividing by the largest entry first keeps the squares inside the range of fp32.
    x.div_(largest_entry(x, (-2, -1)).clamp_min(tiny))
    # Norm of the row norms: a single long reduction would be split over threads, differently for each stack size.
    norm = torch.linalg.vector_norm(torch.linalg.vector_norm(x, dim=-1), dim=-1)[:, None, None]
    exact = min(x.shape[-2:]) == 1
    x.div_((norm if exact else norm + eps).clamp_min(tiny))


def largest_entry(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """max |x| over ``dim``, which is kept with size 1; an order of magnitude faster on CPU than the infinity norm."""
    return torch.maximum(x.amax(dim, keepdim=True), -x.amin(dim, keepdim=True))


def _norm_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def compute_dtype(
    requested: torch.dtype | None, weight: torch.dtype, device: torch.device, coefficients: AnyCoefficients = NS5
) -> torch.dtype:
    """The dtype of the iterations: the requested one, fp64 for fp64 weights, bf16 where it is native, else fp32.

    A Gram set never runs in bf16: it takes fp16 on CUDA and fp32 elsewhere. CANS takes fp32 everywhere.

    Raises:
        ValueError: if a Gram set is requested in bf16 or, off CUDA, in fp16, or CANS in 16 bits.
    """
    _check_dtype(coefficients, requested, device.type)
    if requested is not None:
        return requested
    if weight == torch.float64:
        return torch.float64
    if needs_full_precision(coefficients):
        return torch.float32
    if is_gram(coefficients):
        return torch.float16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if _native_bf16(device.type) else torch.float32


def check_kernel(coefficients: AnyCoefficients, steps: int | None, dtype: torch.dtype | None) -> None:
    """Raise the ValueError that ``orthogonalize`` would raise on every device."""
    resolve(coefficients, steps)
    _check_dtype(coefficients, dtype)


def _check_dtype(coefficients: AnyCoefficients, dtype: torch.dtype | None, device_type: str | None = None) -> None:
    if is_gram(coefficients):
        check_gram(dtype, device_type)
    if dtype in (torch.bfloat16, torch.float16) and needs_full_precision(coefficients):
        raise ValueError(f"ns_coefficients {coefficients!r} diverges in {dtype}; set ns_dtype to float32 or None")


@lru_cache
def _native_bf16(device_type: str) -> bool:
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device_type == "cpu":
        features = torch.cpu.get_capabilities()
        return any(features.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))
    return False
