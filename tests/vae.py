"""A tiny autoencoder with random weights, images to encode, and the command that does it."""

from pathlib import Path

from PIL import Image

from dit_train.data import shapes

SIDE, CLASSES, EACH = 16, 3, 20


SCALE, SHIFT = 3.0, 0.15
"""With which latents of this autoencoder have a standard deviation of about 1."""


def save_vae(folder: Path, *, seed: int = 0, **config) -> Path:
    """An AutoencoderKL of 2 x 2 pixels a latent cell."""
    import torch
    from diffusers import AutoencoderKL

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = AutoencoderKL(
            block_out_channels=(8, 8),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
            norm_num_groups=2,
            **{"scaling_factor": SCALE, "shift_factor": SHIFT, **config},
        )
    with torch.no_grad():
        vae.quant_conv.bias[4:].sub_(3)  # posteriors narrower than the spread of means
    vae.save_pretrained(folder)
    return folder


def save_images(folder: Path) -> Path:
    """EACH images of SIDE pixels of each class."""
    for index in range(CLASSES * EACH):
        path = folder / f"shape {index % CLASSES}" / f"{index:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(shapes.draw(index, SIDE, CLASSES).transpose(1, 2, 0)).save(path)
    return folder


def command(images: Path, vae: Path, out: Path, *more: str) -> list[str]:
    """Arguments of encode_latents.py."""
    words = [images, "--vae", vae, "--image-size", SIDE, "--out", out, "--device", "cpu", "--batch", 4, "--part", 9]
    return [*map(str, words), *more]
