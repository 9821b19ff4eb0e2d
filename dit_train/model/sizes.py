"""Named sizes of the Diffusion Transformer, and which settings fit together. Imports nothing heavy."""

from __future__ import annotations

from typing import Any

from dit_train.config import ConfigError, ModelConfig

SIZES: dict[str, dict[str, Any]] = {
    # Peebles & Xie, arXiv 2212.09748, table 1
    "S": {"width": 384, "depth": 12, "heads": 6},
    "B": {"width": 768, "depth": 12, "heads": 12},
    "L": {"width": 1024, "depth": 24, "heads": 16},
    "XL": {"width": 1152, "depth": 28, "heads": 16},
    # Heads of 128, and every block matrix divides by 128 rows; without QK-norm such sizes are prone to diverge
    "1.3B": {"width": 1664, "depth": 26, "heads": 13, "qk_norm": True},
    "2.3B": {"width": 2048, "depth": 30, "heads": 16, "qk_norm": True},
    "4B": {"width": 2560, "depth": 34, "heads": 20, "qk_norm": True},
    "9B": {"width": 3840, "depth": 34, "heads": 30, "qk_norm": True},
    "15B": {"width": 4608, "depth": 39, "heads": 36, "qk_norm": True},
}
"""Name to the fields of `ModelConfig` that it fixes."""

_MOST_BLOCKS = 1000
_FAR = 10_000  # so that the search ends for any number


def sized(name: str, **fields: Any) -> ModelConfig:
    """The settings of a named size, with any other field of `ModelConfig` beside: ``sized("XL", patch=4)``.

    Raises `ConfigError` for a name that `SIZES` does not hold.
    """
    if name not in SIZES:
        raise ConfigError(f"no model size {name!r}: choose one of {', '.join(SIZES)}")
    return ModelConfig(**{**SIZES[name], **fields})


def mlp_width(config: ModelConfig) -> int:
    """Hidden size of a block's MLP.

    SwiGLU has three matrices where GELU has two, so it takes two thirds (Shazeer, arXiv 2002.05202), rounded to a
    multiple of 8 for the hardware's sake.
    """
    hidden = config.mlp_ratio * config.width
    return 8 * max(1, round(hidden * 2 / 3 / 8)) if config.swiglu else int(hidden)


def check_model(config: ModelConfig, image_size: int) -> None:
    """Raise `ConfigError`, one line that names the fix, where no model of these settings can be built.

    `image_size` is the side of what the model sees, in pixels or latent cells.
    """
    for name in ("width", "depth", "heads", "patch", "adaln_rank"):
        if getattr(config, name) < 1:
            raise ConfigError(f"model.{name}: must be at least 1, not {getattr(config, name)}")
    if config.depth > _MOST_BLOCKS:
        raise ConfigError(f"model.depth: at most {_MOST_BLOCKS} blocks, not {config.depth}; the largest DiTs have 40")
    if mlp_width(config) < 1:
        raise ConfigError(f"model.mlp_ratio: {config.mlp_ratio} leaves the MLP empty; 4 is usual")
    if not 0.0 <= config.label_dropout <= 1.0:
        raise ConfigError(f"model.label_dropout: must lie in [0, 1], not {config.label_dropout}")
    if config.width % config.heads:
        fitting = _nearest_divisor(config.width, config.heads)
        raise ConfigError(f"model.heads: {config.heads} does not divide model.width {config.width}; {fitting} does")
    if config.position == "sincos" and config.width % 4:
        raise ConfigError(f"model.position: sincos needs model.width divisible by 4, not {config.width}")
    if config.position == "rope" and config.width // config.heads % 4:
        raise ConfigError(
            f"model.position: rope needs width/heads divisible by 4, not {config.width}/{config.heads} = "
            f"{config.width // config.heads}; change model.heads or take sincos"
        )
    if image_size % config.patch:
        fitting = _nearest_divisor(image_size, config.patch)
        raise ConfigError(f"model.patch: {config.patch} does not divide the image size {image_size}; {fitting} does")


def _nearest_divisor(number: int, wanted: int) -> int:
    return min(divisors_around(number, wanted), key=lambda d: (abs(d - wanted), d))


def divisors_around(number: int, wanted: int) -> tuple[int, int]:
    """The largest divisor of `number` up to `wanted` and the smallest from it on; 1 and `number` if none is near."""
    wanted = min(number, wanted)
    lower = range(wanted, max(0, wanted - _FAR), -1)
    upper = range(wanted, min(number, wanted + _FAR) + 1)
    return next((d for d in lower if number % d == 0), 1), next((d for d in upper if number % d == 0), number)
