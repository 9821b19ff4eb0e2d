"""One pass over images: what it keeps, what it sums, and what it costs."""

import dataclasses
import gc
import json

import numpy as np
import pytest
import torch
from torch import nn

from eval import protocols
from eval.details import details
from eval.extractors import FeatureExtractor, Observation
from eval.extrapolate import fid_infinity
from eval.features import Features, extract, of_images
from eval.images import open_images
from eval.inception_score import InceptionSums
from eval.kernel import cmmd
from eval.protocols import PROTOCOLS, protocol
from eval.score import compare, score
from eval.statistics import GaussianStats


class Pixels(nn.Module):
    """The first pixels as features, others as spatial features and logits."""

    num_features, num_spatial, num_classes = 6, 3, 4
    image_shape = (3, None, None)
    resize = "none"

    def observe(self, pixels):
        flat = pixels.flatten(1) / 255
        return Observation(flat[:, :6], flat[:, 6:9], flat[:, 9:13] * 5)

    def forward(self, pixels):
        return self.observe(pixels).features


@pytest.fixture(scope="module")
def extractor():
    return FeatureExtractor("pixels", Pixels(), "0" * 64)


def drawn(indices):
    rows = [torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(int(i))) for i in indices]
    return (torch.stack(rows) * 255).to(torch.uint8)


def test_sums_take_all_images_and_features_are_kept_of_a_draw(extractor):
    found = extract(drawn, torch.arange(100, 150), extractor, 8, keep=20, labels=lambda i: i % 3)
    whole = extract(drawn, torch.arange(100, 150), extractor, 8)
    assert (len(found), len(found.kept), found.spatial.n) == (50, 20, 50)
    assert torch.equal(found.indices.sort().values, found.indices) and found.indices.min() >= 100
    assert torch.equal(found.kept, whole.kept[found.indices - 100])
    assert torch.equal(found.labels, found.indices % 3)
    assert torch.equal(found.stats.covariance, whole.stats.covariance)
    assert not torch.equal(found.indices, extract(drawn, torch.arange(100, 150), extractor, 8, keep=20, seed=1).indices)
    assert (found.meta["first_index"], found.meta["last_index"]) == (100, 149)


def test_a_file_brings_back_everything_a_reference_needs(extractor, tmp_path):
    made = extract(drawn, torch.arange(30), extractor, 8, labels=lambda i: i % 3, meta={"name": "noise"})
    made.save(tmp_path / "a.npz")
    back = Features.load(tmp_path / "a.npz")
    assert torch.equal(back.kept, made.kept) and torch.equal(back.labels, made.labels) and back.meta == made.meta
    for ours, theirs in ((back.stats, made.stats), (back.spatial, made.spatial)):
        assert ours.n == theirs.n and torch.allclose(ours.covariance, theirs.covariance, atol=1e-14)
    with np.load(tmp_path / "a.npz") as file:
        assert {"mu", "sigma", "mu_s", "sigma_s", "n"} <= set(file.files)
    assert compare(made, back)["value"] == pytest.approx(0, abs=1e-9)


def test_images_on_disk_are_seen_as_those_in_memory(extractor, tmp_path):
    images = drawn(range(20))
    np.savez(tmp_path / "a.npz", arr_0=images.permute(0, 2, 3, 1).numpy())
    stored = open_images(tmp_path / "a.npz")
    a = extract(stored, torch.arange(20), extractor, 8)
    b = of_images(images, extractor, 8, "memory")
    assert torch.equal(a.kept, b.kept) and a.meta["image_shape"] == [3, 4, 4]
    assert stored.sha256 == b.meta["images_sha256"]


def test_memory_of_a_pass_does_not_grow_with_the_number_of_images(extractor):
    image = torch.zeros(3, 4, 4, dtype=torch.uint8)

    def peak(n):
        """Most bytes of floats alive whenever a batch is asked for."""
        seen = []

        def images(indices):
            alive = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.is_floating_point()]
            seen.append(sum(x.nbytes for x in alive))
            return image.expand(len(indices), -1, -1, -1).clone()

        extract(images, torch.arange(n), extractor, 100, keep=0)
        return max(seen) - seen[0]

    assert peak(2000) == peak(20000) > 0


def test_an_inception_score_is_that_of_its_formula_split_by_split():
    logits = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    sums = InceptionSums(7, 50, 3)
    for part in order.split(8):  # in any order, as ranks come to them
        sums.update(part, logits[part])
    p = logits.double().softmax(1)
    scores = []
    for k in range(3):
        own = p[k * 50 // 3 : (k + 1) * 50 // 3]
        scores.append((own * (own.log() - own.mean(0).log())).sum(1).mean().exp())
    scores = torch.stack(scores)
    assert sums.score() == pytest.approx((scores.mean().item(), scores.std(correction=0).item()), rel=1e-12)


def test_sure_and_even_classes_score_their_number_and_a_constant_one():
    even, constant = InceptionSums(10, 100, 1), InceptionSums(10, 100, 1)
    positions = torch.arange(100)
    even.update(positions, 1000.0 * torch.nn.functional.one_hot(positions % 10, 10))
    constant.update(positions, torch.zeros(100, 10))
    assert even.score() == pytest.approx((10, 0)) and constant.score() == pytest.approx((1, 0))
    with pytest.raises(ValueError, match="5 images cannot be divided into 10 splits"):
        InceptionSums(10, 5, 10)


def test_features_that_are_not_finite_are_told_with_the_image(extractor):
    class Broken(Pixels):
        def observe(self, pixels):
            seen = super().observe(pixels)
            return seen._replace(features=seen.features / (pixels.flatten(1).sum(1, keepdim=True) > 0))

    with pytest.raises(ValueError, match="of 1 of 20 images hold NaN or infinity, first of the image with index 7"):
        extract(
            lambda i: drawn(i) * (i != 7)[:, None, None, None].byte(),
            torch.arange(20),
            FeatureExtractor("broken", Broken(), "1"),
            8,
        )


def test_images_of_two_shapes_are_refused(extractor):
    with pytest.raises(ValueError, match="different shapes"):
        extract(lambda i: drawn(i)[:, :, : 4 - int(i[0] > 7)], torch.arange(16), extractor, 8)


@pytest.mark.parametrize(("n", "deficient"), [(6, True), (7, False)])
def test_a_record_says_whether_features_outnumber_images(extractor, n, deficient):
    reference = extract(drawn, torch.arange(1000, 1000 + n), extractor, 8)
    record = score(drawn, torch.arange(n), reference, extractor, 8)
    assert (record["num_features"], record["rank_deficient"]) == (6, deficient)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("adm-imagenet256", {"sfid", "inception_score", "precision", "kid"}),
        ("edm", {"kid"}),
        ("torch-fidelity", {"inception_score", "precision", "kid"}),
        ("clean", {"kid"}),
        ("small", {"precision", "coverage", "kid"}),
    ],
)
def test_a_protocol_decides_what_a_record_holds(extractor, name, keys):
    ours = dataclasses.replace(PROTOCOLS[name], extractor=None)
    reference = extract(drawn, torch.arange(1000, 1040), extractor, 8)
    record = score(drawn, torch.arange(40), reference, extractor, 8, protocol=ours)
    optional = {"sfid", "inception_score", "precision", "recall", "density", "coverage", "kid"}
    found = optional & record.keys()
    assert found >= keys and (("sfid" in found) == ("sfid" in keys))
    assert ("inception_score" in found) == ("inception_score" in keys)
    assert ("precision" in found) == ("precision" in keys)
    assert record["protocol_reference"] == ours.reference in " ".join(protocols.__doc__.split())
    assert record["protocol"] == name and json.loads(json.dumps(record, allow_nan=False)) == record


def test_a_protocol_refuses_another_network_or_resize(extractor):
    reference = extract(drawn, torch.arange(1000, 1040), extractor, 8)
    with pytest.raises(ValueError, match="protocol adm-imagenet256 scores with inception-2015-12-05, not pixels"):
        score(drawn, torch.arange(40), reference, extractor, 8, protocol=protocol("adm-imagenet256"))
    with pytest.raises(ValueError, match="did you mean torch-fidelity"):
        protocol("torch-fidelty")


def test_statistics_of_another_tool_score_what_they_can(extractor, tmp_path):
    real = extract(drawn, torch.arange(1000, 1040), extractor, 8)
    np.savez(tmp_path / "adm.npz", mu=real.stats.mean, sigma=real.stats.covariance)
    theirs = Features.load(tmp_path / "adm.npz")
    assert theirs.stats.n is None and len(theirs.kept) == 0
    edm = dataclasses.replace(PROTOCOLS["edm"], extractor=None)
    record = score(drawn, torch.arange(40), theirs, extractor, 8, protocol=edm)
    assert record["value"] == pytest.approx(score(drawn, torch.arange(40), real, extractor, 8)["value"], rel=1e-9)
    assert record["n_ref"] is None and "kid" not in record and record["reference"] == "adm.npz"
    with pytest.raises(ValueError, match="does not say of how many images"):
        score(drawn, torch.arange(40), theirs, extractor, 8)
    with pytest.raises(RuntimeError, match="nothing can be added"):
        theirs.stats.update(real.kept)
    with pytest.raises(RuntimeError, match="nothing can be added"):
        GaussianStats(6).merge(theirs.stats)


def test_details_on_request():
    clip = FeatureExtractor("clip-x", Pixels(), "0" * 64)
    a, b = (extract(drawn, torch.arange(start, start + 200), clip, 50) for start in (0, 1000))
    found = details(a, b, infinity=True, intervals=True, training=b)
    assert found["cmmd"] == cmmd(a.kept, b.kept)
    assert found["infinity"] == fid_infinity(a.kept, b.stats).value
    assert found["value_low"] <= found["value_high"] and found["details_count"] == found["training_count"] == 200
    assert all(1000 <= index < 1200 for index in found["training"]) and max(found["generated"]) < 200
    with pytest.raises(ValueError, match="need classes on both sides"):
        details(a, b, classes=True)
    with pytest.raises(ValueError, match="must be held out from training"):
        same = dataclasses.replace(b, meta=b.meta | {"images_sha256": "0"})
        details(a, same, training=same)
    with pytest.raises(ValueError, match="through another resize"):
        details(a, b, training=dataclasses.replace(b, meta=b.meta | {"resize": "x"}))
