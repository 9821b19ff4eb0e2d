"""DINOv2 and CLIP from local folders of the HuggingFace layout, through the optional package ``transformers``.

A folder is named by the user; nothing is ever asked of the network. What is built depends on the extractor's name alone
and the folder must agree with it, so a name stands for one architecture.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eval.extractors import weights as weight_files
from eval.extractors.resize import unclamped_bicubic

PATCH = 14
_CLIP = "clip-vitl14-336"
_SIZES = {  # width, layers, heads
    "dinov2-vits14": (384, 12, 6),
    "dinov2-vitb14": (768, 12, 12),
    "dinov2-vitl14": (1024, 24, 16),
    "dinov2-vitg14": (1536, 40, 24),
    _CLIP: (1024, 24, 16),
}
NAMES = tuple(_SIZES)
_ARCHITECTURE = (  # the fields of either configuration that decide what is computed
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "patch_size", "image_size", "num_channels"),
    *("hidden_act", "layer_norm_eps", "intermediate_size", "projection_dim", "mlp_ratio", "qkv_bias", "use_swiglu_ffn"),
)


class VisionTransformer(nn.Module):
    """A network of ``transformers`` behind the resize and scaling that its published scores use."""

    image_shape = (3, None, None)

    def __init__(self, network: nn.Module, num_features: int, size: int, mean: list[float], std: list[float]):
        super().__init__()
        self.network = network
        self.num_features = num_features
        self.size = size
        self.resize = f"bicubic-antialias-{size}-unclamped"
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1))

    def scaled(self, pixels: Tensor) -> Tensor:
        """The network's input [N, 3, size, size] of fp32 pixels [N, 3, H, W] in 0..255."""
        return (unclamped_bicubic(pixels, self.size) / 255 - self.mean) / self.std


class DINOv2(VisionTransformer):
    """Oquab et al. 2023. The class token after the last norm, the features of FD-DINOv2 (Stein et al. 2023)."""

    def __init__(self, network: nn.Module):
        super().__init__(network, network.config.hidden_size, 224, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
        embeddings = network.embeddings
        embeddings.position_embeddings = nn.Parameter(resample(embeddings.position_embeddings.data, 224 // PATCH))

    def forward(self, pixels: Tensor) -> Tensor:
        """Features [N, width] of fp32 pixels [N, 3, H, W] in 0..255."""
        return self.network(pixel_values=self.scaled(pixels)).last_hidden_state[:, 0]


class CLIP(VisionTransformer):
    """Radford et al. 2021. The projected image embedding, not normalised, of which CMMD is made."""

    def __init__(self, network: nn.Module):
        mean, std = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
        super().__init__(network, network.config.projection_dim, network.config.image_size, mean, std)

    def forward(self, pixels: Tensor) -> Tensor:
        """Features [N, 768] of fp32 pixels [N, 3, H, W] in 0..255."""
        return self.network(pixel_values=self.scaled(pixels)).image_embeds


def resample(positions: Tensor, side: int) -> Tensor:
    """DINOv2's position embeddings [1, 1 + M·M, d], learned at 518 pixels, for a grid of ``side``: [1, 1 + side², d].

    As in the original code, with which the published scores were made: bicubic without antialiasing at the scale
    (side + 0.1) / M. ``transformers`` resamples at side / M, which gives other features.
    """
    before = round((positions.shape[1] - 1) ** 0.5)
    if before == side:
        return positions
    grid = positions[:, 1:].view(1, before, before, -1).permute(0, 3, 1, 2)
    scale = (side + 0.1) / before
    grid = F.interpolate(grid, scale_factor=(scale, scale), mode="bicubic")
    return torch.cat((positions[:, :1], grid.permute(0, 2, 3, 1).flatten(1, 2)), 1)


def read(name: str, folder: str | Path) -> tuple[VisionTransformer, str]:
    """The network ``name`` with the weights of ``folder``, and the SHA-256 of its weight file.

    The folder holds ``config.json`` and ``model.safetensors``, or ``pytorch_model.bin`` (of which nothing is executed).

    Raises:
        FileNotFoundError: no such folder, a file is missing in it, or ``transformers`` is not installed.
        ValueError: the folder holds another architecture, or weights are missing.
    """
    folder = Path(folder)
    config = _config(name)
    _check_folder(name, folder, config)
    state, digest = weight_files.read(_weight_file(folder))
    import transformers

    if name == _CLIP:  # the folder holds the text tower too; old files have a buffer of position numbers
        kept = ("vision_model.", "visual_projection.")
        state = {key: value for key, value in state.items() if key.startswith(kept) and "position_ids" not in key}
        network = _fill(transformers.CLIPVisionModelWithProjection, config, state, folder)
        return CLIP(network), digest
    return DINOv2(_fill(transformers.Dinov2Model, config, state, folder)), digest


def _config(name: str) -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        advice = "pip install transformers"
        raise FileNotFoundError(f"{name} needs the package transformers, which is not installed: {advice}") from error
    width, layers, heads = _SIZES[name]
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "patch_size": PATCH}
    if name == _CLIP:
        return transformers.CLIPVisionConfig(**sizes, intermediate_size=4 * width, image_size=336, projection_dim=768)
    return transformers.Dinov2Config(**sizes, image_size=518, use_swiglu_ffn=name == "dinov2-vitg14")


def _check_folder(name: str, folder: Path, wanted: Any) -> None:
    """Raise unless the folder's configuration describes the network that ``wanted`` builds."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{name} is read from a folder with config.json and model.safetensors; no {path}")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        kind = fields["model_type"]
        if name == _CLIP and kind == "clip":  # both towers, each with its own part
            fields = {**fields["vision_config"], "projection_dim": fields.get("projection_dim", 512)}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not the configuration of a network ({error!r})") from error
    kinds = ("clip", "clip_vision_model") if name == _CLIP else ("dinov2",)
    if kind not in kinds:
        raise ValueError(f"{path}: model_type {kind!r}, but {name} is {kinds[0]!r}")
    defaults = type(wanted)()  # what a file may leave out
    for key in _ARCHITECTURE:
        value, theirs = getattr(wanted, key, None), fields.get(key, getattr(defaults, key, None))
        if value != theirs:
            raise ValueError(f"{path}: {key} {theirs}, but {name} has {value}")


def _weight_file(folder: Path) -> Path:
    names = ("model.safetensors", "pytorch_model.bin")
    found = [folder / name for name in names if (folder / name).is_file()]
    if not found:
        raise FileNotFoundError(f"{folder}: neither {names[0]} nor {names[1]} in it; weights in parts are not read")
    return found[0]


def _fill(kind: Any, config: Any, state: dict[str, Tensor], folder: Path) -> nn.Module:
    """A network of ``kind`` in fp32 with the weights ``state``; every weight must be there.

    ``transformers`` fits the names, which differ between its versions. Attention is computed by plain products:
    fused kernels round otherwise for other batches.
    """
    state = {key: value.float() for key, value in state.items()}
    with _quiet():
        network, report = kind.from_pretrained(
            None,
            config=config,
            state_dict=state,
            attn_implementation="eager",
            ignore_mismatched_sizes=True,  # reported here
            output_loading_info=True,
        )
    reshaped = [key if isinstance(key, str) else key[0] for key in report["mismatched_keys"]]
    missing = [key for key in report["missing_keys"] if not key.endswith("mask_token")]  # of pretraining alone
    for names, what in ((reshaped, "of another shape"), (missing, "missing")):
        if names:
            wrong = f"{len(names)} tensors are {what}, first {sorted(names)[0]}"
            raise ValueError(f"{folder}: not the weights of {kind.__name__}: {wrong}")
    return network


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no reports of ``transformers`` inside."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
