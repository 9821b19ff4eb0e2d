"""Images by their global index, dealt over ranks; and the named ways from floats to uint8."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from eval.ranks import world

Images = Callable[[Tensor], Tensor]
"""int64 CPU tensor of global sample indices [B] to uint8 images [B, C, H, W]; row i depends on index i alone."""

QUANTIZERS: dict[str, Callable[[Tensor], Tensor]] = {
    # torchvision's save_image: round half up
    "round": lambda x: (x * 0.5 + 0.5).clamp(0, 1).mul(255).add(0.5),
    # Dhariwal and Nichol (2105.05233), DiT and SiT; equal to "round" but for the last bit of fp32
    "adm": lambda x: (127.5 * x + 128).clamp(0, 255),
    # Karras et al. (2206.00364, 2312.02696): the same formula, there in the fp64 of its sampler
    "edm": lambda x: (127.5 * x + 128).clamp(0, 255),
    # latent diffusion and VAR cut the fraction off: half a level darker on average, and images of whole levels change
    "truncate": lambda x: (x * 0.5 + 0.5).clamp(0, 1).mul(255),
}
"""Rules of ``quantize``: floats in [-1, 1] to floats in [0, 256) of which the integer part is the level."""


def generate(
    images: Images,
    indices: Tensor,
    batch_size: int,
    group: dist.ProcessGroup | None = None,
    progress: Callable[[int, int], None] | None = None,
    done: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's share of the images ``indices``, batch by batch.

    Batch k holds indices k·B … k·B + B - 1 of the list and goes to rank k mod W: a batch is composed alike for any
    number of ranks, so its pixels are too, to the last bit. Every rank calls ``images`` equally often with exactly
    ``batch_size`` indices, since the layers of a sharded model communicate: where indices run out, the list's first
    one fills up and what comes of it is dropped. Run the iterator to its end on every rank, and communicate only after.

    With ``done`` the batches of which every image is done are left out, and the others are dealt. They are composed as
    if nothing were done, so a generation in several goes, each on any number of ranks, makes the bits of one in one go.

    Args:
        images: the function to call.
        indices: int64 [N], the same on every rank; N need not be divisible by anything.
        batch_size: B.
        group: the ranks to deal over; None is the default group, or one rank where none was started.
        progress: called as ``progress(made, total)`` after each round; both count the images of all ranks that this
            call makes, without those done before, so that the time left can be told from them.
        done: int64 [any], indices that need not be made, the same on every rank; those not in ``indices`` are ignored.

    Yields:
        (indices int64 [b], images uint8 [b, C, H, W]) with 1 ≤ b ≤ B.

    Raises:
        ValueError: N or B is 0, an index occurs twice, or ``images`` returned another shape.
        TypeError: indices are not int64, or ``images`` returned another dtype.
    """
    indices = _checked(indices, batch_size)
    rank, ranks = world(group)
    batches = _batches_left(indices, batch_size, done)
    made_by_all, total = 0, sum(len(batch) for batch in batches)
    for first in range(0, len(batches), ranks):
        mine = batches[first + rank] if first + rank < len(batches) else indices[:0]
        filler = indices[:1].expand(batch_size - len(mine))
        made = images(torch.cat((mine, filler)))
        _check_images(made, batch_size)
        if len(mine):
            yield mine, made[: len(mine)]
        made_by_all += sum(len(batch) for batch in batches[first : first + ranks])
        if progress:
            progress(made_by_all, total)


def quantize(x: Tensor, rule: str = "round") -> Tensor:
    """Float images in [-1, 1] to uint8 in 0..255, any shape, by a rule of ``QUANTIZERS``.

    The one quantisation for sampling, saving and scoring; the rule belongs to a protocol. Every rule clamps before the
    cast, which would wrap white to black. Half precision is widened to fp32 first; fp64 stays.

    Raises:
        TypeError: ``x`` is not floating point.
        ValueError: NaN or infinity, or no such rule.
    """
    if rule not in QUANTIZERS:
        raise ValueError(f"no quantisation is named {rule!r}; known are {', '.join(QUANTIZERS)}")
    if not x.is_floating_point():
        raise TypeError(f"quantize takes floats in [-1, 1], not {x.dtype}")
    if not torch.isfinite(x).all():
        raise ValueError("images hold NaN or infinity")
    wide = x if x.dtype == torch.float64 else x.float()
    return QUANTIZERS[rule](wide).to(torch.uint8)  # the cast cuts the fraction off


def _batches_left(indices: Tensor, batch_size: int, done: Tensor | None) -> list[Tensor]:
    """The batches of the whole list that hold an index not in ``done``."""
    batches = indices.split(batch_size)
    if done is None:
        return list(batches)
    complete = torch.isin(indices, done.cpu()).split(batch_size)
    return [batch for batch, have in zip(batches, complete, strict=True) if not have.all()]


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
