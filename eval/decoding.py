"""One image file: what its header says, what is refused, and its pixels as uint8."""

from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageColor

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
GREY_MODES = ("1", "L")
_ALPHA_MODES = ("LA", "PA", "RGBA", "La", "RGBa")
_EXIF_ORIENTATION = 0x0112


@dataclass(frozen=True)
class Reading:
    """How image files become pixels, as the caller stated it.

    Attributes:
        background: colour under transparent pixels, a name or ``#rrggbb``; None refuses transparency.
        center_crop_adm: side in pixels of ``center_crop``; None takes images as they are.
        lossy: whether files that lost pixels when they were written are taken.
    """

    background: str | None = None
    center_crop_adm: int | None = None
    lossy: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown colour or a side below 1."""
        if self.background is not None:
            try:
                ImageColor.getrgb(self.background)
            except ValueError as error:
                raise ValueError(f"background={self.background!r} is no colour; say e.g. white or #ffffff") from error
        if self.center_crop_adm is not None and self.center_crop_adm < 1:
            raise ValueError(f"a centre crop of {self.center_crop_adm} pixels holds nothing")


@dataclass(frozen=True)
class Header:
    """What an image file's first bytes tell, before any pixel is decoded."""

    size: tuple[int, int]  # height, width
    mode: str  # Pillow's
    alpha: bool
    deep: bool  # 16 bits a channel, which Pillow may cut to 8 without a word
    lossy: bool
    animated: bool
    rotated: bool  # an EXIF orientation other than upright


def read_header(file: BinaryIO) -> Header:
    """The header of an image file at its start. Raises whatever Pillow raises for one that it cannot open."""
    start = file.read(32)
    file.seek(0)
    with Image.open(file, formats=FORMATS) as image:
        png, webp = image.format == "PNG", image.format == "WEBP"
        return Header(
            size=(image.height, image.width),
            mode=image.mode,
            alpha=_has_alpha(image),
            deep=image.mode.startswith(("I", "F")) or (png and start[24] > 8),  # the bit depth stands in IHDR
            lossy=image.format in ("JPEG", "MPO") or (webp and start[12:16] != b"VP8L"),
            animated=(png or webp) and getattr(image, "is_animated", False),
            rotated="exif" in image.info and image.getexif().get(_EXIF_ORIENTATION, 1) != 1,
        )


def refusal(header: Header, how: Reading) -> str | None:
    """Why such a file must not be scored as it is, with the remedy; None where it may."""
    if header.deep:
        return "has 16 bits a channel; scores are of 8 bits: divide by 257, round, and save as 8-bit PNG"
    if header.animated:
        return "is animated: save the one frame that counts as PNG"
    if header.alpha and how.background is None:
        return "has transparency: say on which background it is seen, e.g. background='white'"
    if not header.alpha and header.mode not in (*GREY_MODES, "P", "RGB"):
        return f"has colours {header.mode}: convert it to RGB with its colour profile, and save it as PNG"
    if header.lossy and not how.lossy:
        return (
            "is a JPEG or WebP with loss, which raises a Fréchet distance by half even at quality 95: save generated "
            "images as PNG. For photographs that exist only so, say lossy=True"
        )
    return None


def conversions(header: Header, how: Reading) -> list[str]:
    """What ``decode`` changes in such a file, in words."""
    happens = {
        "1 bit to grey": header.mode == "1" and not header.alpha,
        "palette to RGB": header.mode in ("P", "PA"),
        f"transparency over {how.background}": header.alpha,
        "EXIF rotation ignored, as FID tools do": header.rotated,
        "stored with loss (JPEG or WebP)": header.lossy,
        f"ADM centre crop to {how.center_crop_adm}": how.center_crop_adm is not None,
        f"enlarged to {how.center_crop_adm}": min(header.size) < (how.center_crop_adm or 0),
    }
    return [what for what, so in happens.items() if so]


def decode(file: BinaryIO, grey: bool, how: Reading) -> np.ndarray:
    """Pixels uint8 [1, H, W] if ``grey``, else [3, H, W]. Raises whatever Pillow raises for a broken file."""
    with Image.open(file, formats=FORMATS) as opened:
        opened.load()
        image = _over(opened, how.background) if _has_alpha(opened) else opened
        image = image.convert("L" if grey else "RGB")
    if how.center_crop_adm is not None:
        image = center_crop(image, how.center_crop_adm)
    pixels = np.asarray(image)
    return pixels[None] if grey else pixels.transpose(2, 0, 1)


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """The central square, ``size`` pixels a side, as ImageNet was prepared by ADM (Dhariwal and Nichol, 2105.05233).

    Halve with a box filter while the short side is at least twice the size, then bicubic to the size, then cut. An
    FID reference made with another crop or resize is that of another metric.
    """
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))


def _has_alpha(image: Image.Image) -> bool:
    return image.mode in _ALPHA_MODES or "transparency" in image.info


def _over(image: Image.Image, background: str | None) -> Image.Image:
    if background is None:
        raise ValueError("transparency without a background")
    return Image.alpha_composite(Image.new("RGBA", image.size, background), image.convert("RGBA"))
