"""The two ways in which published scores bring images to a network's input size. They give different scores."""

import torch
from torch import Tensor
from torch.nn import functional as F


def bicubic(pixels: Tensor, size: int) -> Tensor:
    """Antialiased bicubic to [N, C, size, size], clamped to 0..255, fp32 and not rounded.

    Equals Pillow's float bicubic, hence clean-fid's resize (Parmar et al. 2022), to a thousandth of a grey level.
    """
    return F.interpolate(pixels, (size, size), mode="bicubic", antialias=True, align_corners=False).clamp(0, 255)


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
