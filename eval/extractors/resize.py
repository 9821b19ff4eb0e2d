"""The ways in which published scores bring images to a network's input size. They give different scores."""

from functools import lru_cache

import torch
from torch import Tensor


def bicubic(pixels: Tensor, size: int) -> Tensor:
    """Antialiased bicubic to [N, C, size, size], clamped to 0..255, fp32 and not rounded.

    Equals Pillow's float bicubic, hence clean-fid's resize (Parmar et al. 2022), to a ten-thousandth of a grey level.
    """
    return unclamped_bicubic(pixels, size).clamp(0, 255)


def unclamped_bicubic(pixels: Tensor, size: int) -> Tensor:
    """``bicubic`` whose overshoot at edges stays, so values may lie outside 0..255.

    So do the codes that published FD-DINOv2 (Karras et al. 2024, EDM2) and CMMD (Jayasumana et al. 2024). It is not
    ``interpolate(mode="bicubic", antialias=True)``, which finds its weights in fp32: up to 0.005 grey levels away.
    """
    height, width = pixels.shape[2:]
    rows, columns = (_bicubic_weights(length, size, pixels.device) for length in (height, width))
    return rows @ (pixels @ columns.T)


@lru_cache(maxsize=16)
def _bicubic_weights(length: int, size: int, device: torch.device) -> Tensor:
    """What each of ``length`` pixels adds to each of ``size``: Keys' kernel (1981) with a = -1/2, fp32 [size, length].

    The kernel is stretched by the factor that an image shrinks by. Beyond the border nothing is counted.
    """
    scale = length / size
    centres = (torch.arange(size, dtype=torch.float64)[:, None] + 0.5) * scale
    x = ((torch.arange(length, dtype=torch.float64) + 0.5 - centres) / max(scale, 1.0)).abs()
    inner = 1 - 2.5 * x**2 + 1.5 * x**3
    outer = 2 - 4 * x + 2.5 * x**2 - 0.5 * x**3
    weights = torch.where(x < 1, inner, torch.where(x < 2, outer, 0.0))
    return (weights / weights.sum(1, keepdim=True)).float().to(device)


def tensorflow1_bilinear(pixels: Tensor, size: int) -> Tensor:
    """TensorFlow 1's ``resize_bilinear`` (``align_corners=False``) to [N, C, size, size], fp32.

    Output pixel i samples the source at i * (source size / size): corners coincide, not pixel centres, and nothing
    is antialiased. The FID network of 2015-12-05 does this to its input inside its graph.
    """
    for dim in (2, 3):
        length = pixels.shape[dim]
        position = torch.arange(size, device=pixels.device, dtype=torch.float32) * (length / size)
        left = position.floor().long().clamp(max=length - 1)
        right = (left + 1).clamp(max=length - 1)
        weight = (position - left).view(-1, *[1] * (3 - dim))
        before, after = pixels.index_select(dim, left), pixels.index_select(dim, right)
        pixels = before + (after - before) * weight
    return pixels
