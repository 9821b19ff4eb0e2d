"""A network of the user's own as a feature extractor, and what holds for every extractor whatever its network."""

import socket
import weakref

import pytest
import torch
from torch import nn

from eval.extractors import FeatureExtractor, Observation, load

PRECISION = (
    torch.backends.cuda.matmul,
    torch.backends.cudnn.conv,
    torch.backends.mkldnn.matmul,
    torch.backends.mkldnn.conv,
)


class Own(nn.Module):
    """Records what surrounds it while it runs; dropout and batch norm show whether it trains."""

    num_features = 5

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Dropout(0.5))
        self.seen = None

    def forward(self, pixels):
        self.seen = {
            "dtype": pixels.dtype,
            "highest": pixels.max().item(),
            "deterministic": torch.backends.cudnn.deterministic,
            "benchmark": torch.backends.cudnn.benchmark,
            "precision": [backend.fp32_precision for backend in PRECISION],
            "autocast": torch.is_autocast_enabled("cpu"),
            "gradients": torch.is_grad_enabled(),
        }
        return self.layers(pixels)


@pytest.fixture
def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Own()


def noise(n):
    return torch.randint(256, (n, 3, 9, 7), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def test_own_networks_run_as_the_built_in_ones_do(network):
    before = network.layers[1].running_mean.clone()
    extractor = FeatureExtractor("mine", network.double(), "0" * 64)
    images, state = noise(4), torch.get_rng_state()
    deterministic, benchmark = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    precision = [backend.fp32_precision for backend in PRECISION]
    try:
        for backend in PRECISION:
            backend.fp32_precision = "tf32"
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = False, True
        with torch.autocast("cpu", dtype=torch.bfloat16):
            features = extractor(images)
        assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (False, True)
        assert [backend.fp32_precision for backend in PRECISION] == ["tf32"] * 4
    finally:
        for backend, value in zip(PRECISION, precision, strict=True):
            backend.fp32_precision = value
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = deterministic, benchmark
    assert network.seen == {
        "dtype": torch.float32,
        "highest": 255.0,
        "deterministic": True,
        "benchmark": False,
        "precision": ["ieee"] * 4,
        "autocast": False,
        "gradients": False,
    }
    assert features.dtype == torch.float32 and not features.requires_grad
    assert torch.equal(features, network.layers(images.float()).mean((2, 3)))  # a map is pooled
    assert torch.equal(network.layers[1].running_mean, before.float())
    assert torch.equal(torch.get_rng_state(), state)
    seen = extractor.observe(images)
    assert torch.equal(seen.features, features) and seen.spatial is None and seen.logits is None
    assert (extractor.name, extractor.weights_sha256, extractor.resize) == ("mine", "0" * 64, "own")


def test_settings_come_back_after_an_error_too(network):
    extractor = FeatureExtractor("mine", network)
    network.layers.append(nn.Linear(1, 1))  # of another width
    before = torch.backends.cudnn.deterministic, torch.backends.cuda.matmul.fp32_precision
    with pytest.raises(RuntimeError):
        extractor(noise(2))
    assert (torch.backends.cudnn.deterministic, torch.backends.cuda.matmul.fp32_precision) == before
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("shape", [(4,), (3, 4), (3, 9, 5), (2, 5), (3, 4, 2, 2)])
def test_features_of_another_shape_than_promised_are_an_error(shape):
    class Wrong(nn.Module):
        num_features = 5

        def forward(self, pixels):
            return torch.zeros(shape)

    with pytest.raises(ValueError, match=r"wrong gave features \[.*\], not \[3, 5\]"):
        FeatureExtractor("wrong", Wrong())(noise(3))


def test_maps_of_one_pixel_are_flattened():
    class OnePixel(nn.Module):
        num_features = 3

        def forward(self, pixels):
            return pixels.amax((2, 3), keepdim=True).half()

    features = FeatureExtractor("peaks", OnePixel())(noise(3))
    assert torch.equal(features, noise(3).amax((2, 3)).float())


def test_a_network_must_say_how_long_its_features_are():
    with pytest.raises(ValueError, match="Flatten needs num_features"):
        FeatureExtractor("mine", nn.Flatten())


def test_the_hash_of_own_weights_changes_with_them(network):
    first = FeatureExtractor("mine", network).weights_sha256
    assert len(first) == 64 and FeatureExtractor("mine", network).weights_sha256 == first
    network.layers[1].running_var[2] += 1e-6
    assert FeatureExtractor("mine", network).weights_sha256 != first


def test_own_networks_may_observe_more():
    class Observant(nn.Module):
        num_features, num_classes, image_shape = 3, 2, (3, 9, 7)

        def forward(self, pixels):
            return pixels.mean((2, 3))

        def observe(self, pixels):
            return Observation(pixels, logits=pixels[:, :2, 0, 0])

    extractor = FeatureExtractor("mine", Observant())
    seen = extractor.observe(noise(2))
    assert torch.equal(seen.features, extractor(noise(2))) and seen.logits.shape == (2, 2)
    assert extractor.num_classes == 2
    with pytest.raises(ValueError, match=r"shape \[N, 1 or 3, 9, 7\]"):
        extractor.observe(noise(2)[:, :, :8])
    with pytest.raises(TypeError, match="uint8"):
        extractor.observe(noise(2).float())


def test_close_frees_the_network():
    extractor = FeatureExtractor("mine", Own(), "0" * 64)
    gone = weakref.ref(extractor.network)
    extractor.close()
    extractor.close()
    with pytest.raises(RuntimeError, match="mine was closed"):
        extractor(noise(1))
    with pytest.raises(RuntimeError, match="mine was closed"):
        extractor.observe(noise(1))
    assert extractor.name == "mine" and extractor.num_features == 5
    assert gone() is None


def test_an_extractor_stays_outside_a_model_that_holds_it():
    model = nn.Linear(2, 2)
    names = list(model.state_dict())
    model.extractor = load("digits-cnn")
    assert list(model.state_dict()) == names and len(list(model.parameters())) == 2
    model.train()
    assert not any(module.training for module in model.extractor.network.modules())


def test_loading_asks_nothing_of_the_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for name in ("digits-cnn", "efficientnet-lite0"):
        load(name)
