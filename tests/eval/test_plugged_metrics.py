import math

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from torch import nn
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.inception import InceptionScore
from torchmetrics.image.kid import KernelInceptionDistance

from eval.extractors import load
from eval.frechet import frechet
from eval.plugged import PluggedMetric
from eval.statistics import GaussianStats
from tests.distributed.ranks import run

pytestmark = pytest.mark.filterwarnings("ignore:Metric .* will save all:UserWarning")


class Features(nn.Module):
    """The digits classifier as torchmetrics wants networks, with a dropout that only evaluation mode silences."""

    num_features = 64

    def __init__(self):
        super().__init__()
        self.network = load("digits-cnn").network
        self.dropout = nn.Dropout(0.5)
        self.autocast = None

    def forward(self, images):
        self.autocast = torch.is_autocast_enabled("cpu")
        pixels = images.to(self.network.head.weight.dtype)
        return self.dropout(self.network(pixels))


def digits(n, high, seed):
    return torch.randint(high, (n, 1, 8, 8), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


REAL, MADE = digits(50, 256, 0), digits(50, 200, 1)


def shown(metric, batch=16, seed=0):
    plugged = PluggedMetric(metric, seed=seed)
    for images, real in ((REAL, True), (MADE, False)):
        for part in images.split(batch):
            plugged.update(part, real)
    return plugged


def ours():
    extractor = load("digits-cnn")
    real, made = GaussianStats(64), GaussianStats(64)
    real.update(extractor(REAL))
    made.update(extractor(MADE))
    return frechet(made, real)


def test_torchmetrics_fid_agrees_with_ours_even_from_a_half_precision_network_in_training():
    metric = FrechetInceptionDistance(feature=Features().train().half())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plugged = shown(metric)
    found = plugged.compute()
    assert metric.inception.autocast is False and metric.real_features_sum.dtype == torch.float64
    rounded = FrechetInceptionDistance(feature=Features())  # weights as .half() left them
    rounded.inception.load_state_dict(metric.inception.state_dict())
    assert found == shown(rounded).compute()
    assert shown(FrechetInceptionDistance(feature=Features())).compute() == pytest.approx(ours(), rel=1e-6)


def test_kid_leaves_the_global_generator_alone_and_repeats_itself():
    state = torch.get_rng_state()
    first, again, other = (
        shown(KernelInceptionDistance(feature=Features(), subsets=5, subset_size=20), seed=seed).compute()
        for seed in (0, 0, 1)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert first == again != other and all(math.isfinite(x) for x in first)


class Draws(torchmetrics.Metric):
    """Draws a number at every update, as metrics with random crops do."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def update(self, images):
        self.drawn.append(torch.rand(()).item())

    def compute(self):
        return {"drawn": torch.tensor(self.drawn), "count": len(self.drawn)}


def test_updates_draw_other_numbers_each_and_the_same_in_another_run():
    state = torch.get_rng_state()
    first, again = (shown(Draws()).compute() for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert first == again and len(set(first["drawn"])) == first["count"] == 4  # of 50 generated images, no real ones


def test_a_metric_of_generated_images_alone_sees_no_real_ones():
    plugged = shown(InceptionScore(feature=Features(), splits=2))
    alone = PluggedMetric(InceptionScore(feature=Features(), splits=2))
    alone.update(MADE)
    assert not plugged.takes_real
    assert plugged.compute() == pytest.approx(alone.compute(), rel=1e-5)
    plugged.reset()
    with pytest.raises(ValueError, match="InceptionScore has seen no images"):
        plugged.compute()


def test_what_is_not_a_metric_of_uint8_images_is_refused():
    with pytest.raises(TypeError, match=r"torchmetrics.Metric is wanted, not Features"):
        PluggedMetric(Features())
    with pytest.raises(ValueError, match="normalize=True takes floats"):
        PluggedMetric(FrechetInceptionDistance(feature=Features(), normalize=True))
    plugged = PluggedMetric(FrechetInceptionDistance(feature=Features()))
    with pytest.raises(TypeError, match="uint8"):
        plugged.update(MADE.float())
    plugged.update(MADE)
    for wrong in (MADE[:, :, :4], MADE[0]):
        with pytest.raises(ValueError, match=r"are wanted"):
            plugged.update(wrong)


class NeedsImages(torchmetrics.Metric):
    """Cannot do with an empty batch."""

    def __init__(self):
        super().__init__()
        self.add_state("darkest", torch.tensor(255.0), dist_reduce_fx="min")

    def update(self, images):
        self.darkest = torch.minimum(self.darkest, images.float().min())

    def compute(self):
        return self.darkest


def on_ranks():
    """Rank 1 gets no image for FID, and for KID some real ones in fewer batches than rank 0."""
    rank, found = dist.get_rank(), []
    for metric, shares in (
        (FrechetInceptionDistance(feature=Features()), (50, 0)),
        (KernelInceptionDistance(feature=Features(), subsets=1, subset_size=50), (35, 15)),
    ):
        plugged = PluggedMetric(metric)
        mine = REAL.split(shares)[rank]
        for part in mine.split(16) if len(mine) else ():
            plugged.update(part, True)
        if rank == 0:
            plugged.update(MADE)
        found.append(plugged.compute())
    for wrong, has_images in ((NeedsImages(), rank == 1), (FrechetInceptionDistance(feature=Features()), False)):
        plugged = PluggedMetric(wrong)
        if has_images:
            plugged.update(MADE)
        with pytest.raises((RuntimeError, ValueError)) as error:
            plugged.compute()
        found.append(str(error.value).partition(":")[0])
    return found


def test_ranks_with_fewer_batches_or_none_pool_with_the_others():
    one_subset = KernelInceptionDistance(feature=Features(), subsets=1, subset_size=50)  # of all, in whatever order
    kid = shown(one_subset).compute()
    for fid, kid_found, *errors in run(on_ranks, 2, timeout=240):
        assert fid == pytest.approx(ours(), rel=1e-6)
        assert kid_found == pytest.approx(kid, rel=1e-4)
        assert errors == [
            "NeedsImages fails on a rank with fewer batches",
            "FrechetInceptionDistance has seen no images",
        ]
