"""Images by their global index, dealt over ranks; and the one way from floats to uint8."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from eval.ranks import world

Images = Callable[[Tensor], Tensor]
"""int64 CPU tensor of global sample indices [B] to uint8 images [B, C, H, W]; row i depends on index i alone."""


def generate(
    images: Images,
    indices: Tensor,
    batch_size: int,
    group: dist.ProcessGroup | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's share of the images ``indices``, batch by batch.

    Batch k holds indices k·B … k·B + B - 1 of the list and goes to rank k mod W: a batch is composed alike for any
    number of ranks, so its pixels are too, to the last bit. Every rank calls ``images`` equally often with exactly
    ``batch_size`` indices, since the layers of a sharded model communicate: where indices run out, the list's first
    one fills up and what comes of it is dropped. Run the iterator to its end on every rank, and communicate only after.

    Args:
        images: the function to call.
        indices: int64 [N], the same on every rank; N need not be divisible by anything.
        batch_size: B.
        group: the ranks to deal over; None is the default group, or one rank where none was started.
        progress: called as ``progress(done, N)`` after each round, with the count over all ranks.

    Yields:
        (indices int64 [b], images uint8 [b, C, H, W]) with 1 ≤ b ≤ B.

    Raises:
        ValueError: N or B is 0, an index occurs twice, or ``images`` returned another shape.
        TypeError: indices are not int64, or ``images`` returned another dtype.
    """
    indices = _checked(indices, batch_size)
    rank, ranks = world(group)
    batches = indices.split(batch_size)
    for first in range(0, len(batches), ranks):
        mine = batches[first + rank] if first + rank < len(batches) else indices[:0]
        filler = indices[:1].expand(batch_size - len(mine))
        made = images(torch.cat((mine, filler)))
        _check_images(made, batch_size)
        if len(mine):
            yield mine, made[: len(mine)]
        if progress:
            progress(min((first + ranks) * batch_size, len(indices)), len(indices))


def quantize(x: Tensor) -> Tensor:
    """Float images in [-1, 1] to uint8 in 0..255, any shape: scale, clamp, round half up.

    The one rounding for sampling, saving and scoring. Clamping comes before the cast, which would wrap white to black.

    Raises:
        TypeError: ``x`` is not floating point.
        ValueError: NaN or infinity.
    """
    if not x.is_floating_point():
        raise TypeError(f"quantize takes floats in [-1, 1], not {x.dtype}")
    if not torch.isfinite(x).all():
        raise ValueError("images hold NaN or infinity")
    return (x.float() * 0.5 + 0.5).clamp(0, 1).mul(255).add(0.5).floor().to(torch.uint8)


def _checked(indices: Tensor, batch_size: int) -> Tensor:
    if indices.dtype != torch.int64 or indices.ndim != 1:
        raise TypeError(f"indices must be int64 [N], not {indices.dtype} {list(indices.shape)}")
    if batch_size < 1 or len(indices) < 1:
        raise ValueError(f"nothing to generate: {len(indices)} indices in batches of {batch_size}")
    if len(indices.unique()) != len(indices):
        raise ValueError("a sample index occurs twice: every image must be counted once")
    return indices.cpu()


def _check_images(made: Tensor, batch_size: int) -> None:
    if made.dtype != torch.uint8:
        raise TypeError(f"images(indices) must return uint8, not {made.dtype}; see eval.generate.quantize")
    if made.ndim != 4 or len(made) != batch_size:
        raise ValueError(f"images(indices) must return [{batch_size}, C, H, W], not {list(made.shape)}")
