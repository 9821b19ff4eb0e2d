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
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .coefficients import NS5, AnyCoefficients, Schedule, is_gram, needs_full_precision, resolve
from .gram import check_gram, gram_flops, gram_iterate_
from .pieces import Pieces, copy_parts, load, norm_dtype, places

STACK_BYTES = 256 * 2**20
"""Largest stack that is orthogonalised at once, in the dtype of the iterations.

The transient memory, results included, is at most 3 times as much: the stack, its next iterate and a polynomial of its
Gram matrix, 2 + short side / long side (Gram sets, which need long ≥ 2·short: 2 + 2·short/long).
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
    stack = [Pieces.whole(matrix) for matrix in matrices.reshape(-1, *matrices.shape[-2:])]
    return _orthogonal(stack, schedule, eps, dtype).view(matrices.shape)


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
    result = list(matrices)

    def keep(members: Sequence[int], stack: Tensor) -> None:
        for i, matrix in zip(members, stack.unbind(), strict=True):
            result[i] = matrix

    whole = [Pieces.whole(matrix) for matrix in matrices]
    _in_stacks(whole, coefficients, steps, eps, dtype, STACK_BYTES, keep)
    return result


@torch.no_grad()
def orthogonalize_pieces(
    matrices: Sequence[Pieces],
    coefficients: AnyCoefficients = NS5,
    steps: int | None = None,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
    stack_bytes: int = STACK_BYTES,
) -> None:
    """Orthogonalise matrices where they lie, as ``orthogonalize_all`` does.

    Args:
        matrices: of one dtype on one device. Results are rounded to the dtype of the parts that they are written to.
        stack_bytes: a limit below ``STACK_BYTES``; a single matrix may be larger. The rest is as in ``orthogonalize``.
    """

    def write(members: Sequence[int], stack: Tensor) -> None:
        found = [pair for i, x in zip(members, stack.unbind(), strict=True) for pair in places(x, matrices[i].write)]
        copy_parts([(part, view) for view, part in found])

    _in_stacks(matrices, coefficients, steps, eps, dtype, min(stack_bytes, STACK_BYTES), write)


def _in_stacks(
    matrices: Sequence[Pieces],
    coefficients: AnyCoefficients,
    steps: int | None,
    eps: float,
    dtype: torch.dtype | None,
    stack_bytes: int,
    done: Callable[[Sequence[int], Tensor], None],
) -> None:
    """Orthogonalise equal shapes together; ``done`` is called with the places of some and their stack [k, m, n]."""
    if not matrices:
        return
    schedule, example = resolve(coefficients, steps), matrices[0].example
    dtype = compute_dtype(dtype, example.dtype, example.device, coefficients)
    by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, matrix in enumerate(matrices):
        by_shape[matrix.shape].append(i)
    for (m, n), members in by_shape.items():
        if m * n == 0:
            done(members, torch.empty(len(members), m, n, dtype=dtype, device=example.device))
            continue
        at_once = max(1, stack_bytes // (m * n * dtype.itemsize))
        for start in range(0, len(members), at_once):
            chunk = members[start : start + at_once]
            done(chunk, _orthogonal([matrices[i] for i in chunk], schedule, eps, dtype))


def _orthogonal(matrices: Sequence[Pieces], schedule: Schedule, eps: float, dtype: torch.dtype) -> Tensor:
    """The orthogonalised matrices of one shape, a contiguous stack [k, m, n] in ``dtype``."""
    k, (m, n) = len(matrices), matrices[0].shape
    short, long = sorted((m, n))
    x = torch.empty(k, short, long, dtype=dtype, device=matrices[0].example.device)
    y = torch.empty_like(x)
    load(matrices, x, y, eps)
    if short == 1:
        return x.view(k, m, n)
    found = (gram_iterate_ if _takes_gram(schedule, short, long) else iterate_)(x, schedule, y)
    if m <= n:
        return found
    free = y if found is x else x
    return free.view(k, m, n).copy_(found.mT)


def _takes_gram(schedule: Schedule, short: int, long: int) -> bool:
    """Below twice as long as wide, the Gram form gains nothing and needs more memory."""
    return schedule.gram and long >= 2 * short


def flops(schedule: Schedule, m: int, n: int) -> int:
    """FLOPs of the products that orthogonalise an m×n matrix; none if it is a row or a column."""
    short, long = sorted((m, n))
    if short <= 1:
        return 0
    if _takes_gram(schedule, short, long):
        return gram_flops(schedule, short, long)
    return sum(4 * short * short * long + 2 * short**3 * (c != 0) for _, _, c in schedule.rows)


def iterate_(x: Tensor, schedule: Schedule, y: Tensor | None = None) -> Tensor:
    """The iterations on ``x`` [k, s, l], s ≤ l; in one more buffer of its size, ``y`` if given, and one [k, s, s].

    Both are overwritten, and one of them is returned. Written into buffers because fresh ones would be paged in anew at
    every iteration.
    """
    y = torch.empty_like(x) if y is None else y
    z = x.new_empty(*x.shape[:2], x.shape[1])
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
    sums = torch.linalg.vector_norm(gram, 1, dim=-1, keepdim=True).to(norm_dtype(gram.dtype))
    # Not rsqrt: on CPU its vectorised form rounds differently from the scalar one, so stacks would not be alike.
    scale = torch.where(sums > 0, 1 / sums.sqrt(), 0).to(x.dtype)
    x.mul_(scale)
    gram.mul_(scale).mul_(scale.mT)


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
