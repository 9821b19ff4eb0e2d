import json
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import eval.score
from dit_train.config import DataConfig
from dit_train.data import sources
from eval.extractors import Observation, load
from eval.features import extract, of_images
from eval.frechet import frechet
from eval.generate import generate
from eval.images import ImageSet
from eval.kernel import kid
from eval.manifold import prdc
from eval.ranks import gather
from eval.score import floor, score
from eval.statistics import GaussianStats
from tests.distributed.ranks import run

N, BATCH = 37, 8  # 5 batches: 3 ranks make 2, 2 and 1, and the last batch is short


@pytest.fixture(scope="module")
def digits():
    data = sources.load(DataConfig(source="digits"))
    return data.train.images(range(len(data.train))), data.heldout.images(range(len(data.heldout)))


@pytest.fixture(scope="module")
def extractor():
    return load("digits-cnn")


@pytest.fixture(scope="module")
def reference(digits, extractor):
    return of_images(digits[1], extractor, 128, "digits held out")


def drawn(indices):
    """Images that are functions of their index alone."""
    rows = [torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(int(i))) for i in indices]
    return (torch.stack(rows) * 255).to(torch.uint8)


def small_reference(extractor, group=None):
    return of_images(drawn(torch.arange(1000, 1000 + N)), extractor, BATCH, "noise", group=group)


def blurred(images, amount):
    kernel = torch.tensor([1.0, 2.0, 1.0]).outer(torch.tensor([1.0, 2.0, 1.0]))[None, None] / 16
    soft = F.conv2d(F.pad(images.float(), (1, 1, 1, 1), mode="replicate"), kernel)
    return images.float().lerp(soft, amount).round().to(torch.uint8)


def noisy(images, amount):
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return (images + noise * amount).clamp(0, 255).round().to(torch.uint8)


def share_of(rank):
    """Uneven shares; rank 2 holds nothing."""
    return (torch.arange(30), torch.arange(30, N), torch.arange(0))[rank]


def on_ranks():
    """What this rank finds among 2 of the 3 ranks, and among all."""
    warnings.simplefilter("error", FutureWarning)
    pair = dist.new_group([0, 1])
    found = {"all": in_group(None), "failures": failures(), "one batch": one_batch()}
    if dist.get_rank() < 2:
        found["pair"] = in_group(pair)
    return found


def one_batch(group=None):
    """The record of a single batch, of which all ranks but one get nothing."""
    extractor = load("digits-cnn")
    reference = of_images(drawn(torch.arange(1000, 1000 + BATCH)), extractor, BATCH, "noise", group=group)
    return score(drawn, torch.arange(BATCH), reference, extractor, BATCH, group)


UNEQUAL = (5, 0, 1, 24, 7)  # of N, by rank


def on_five_ranks():
    """Sums of unequal shares; then what rank 0 finds alone, while the others are past it."""
    rank, alone = dist.get_rank(), dist.new_group([0])
    mine = torch.arange(N).split(UNEQUAL)[rank]
    pooled = GaussianStats(6)
    pooled.update(features_of(mine))
    merged = GaussianStats(6)
    for share in torch.arange(N).split(UNEQUAL):
        merged.merge(GaussianStats.of(features_of(share)))
    pooled.all_reduce()
    features, _ = gather(features_of(mine), mine)
    found = {"stats": (pooled.n, pooled.mean.numpy(), pooled.covariance.numpy())}
    if rank == 0:
        found["alone"] = [frechet(pooled, GaussianStats.of(features + 1)), frechet(merged, pooled)]
        found["alone"] += kid(features, features + 1, 30, 10, 0)
        found["alone"] += prdc(features, features + 1)
        found["record"] = one_batch(alone)
    return found


def no_convergence(a, b):
    raise torch.linalg.LinAlgError("eigh did not converge\non this matrix")


def failures():
    """What this rank raises where a single one meets something bad. After each, all must be able to go on."""
    extractor, first_images = load("digits-cnn"), torch.arange(BATCH)
    reference = small_reference(extractor)
    few = of_images(drawn(torch.arange(1000, 1000 + BATCH)), extractor, BATCH, "few")

    def nan_for_image_12(images):
        features = extractor(images)
        features[(images == drawn([12])).flatten(1).all(1)] = float("nan")
        return features

    def dark_at_first(indices):
        return torch.where((indices < BATCH)[:, None, None, None], 1, drawn(indices)).to(torch.uint8)

    def error(*args):
        try:
            score(*args)
        except Exception as raised:
            return f"{type(raised).__name__}: {raised}"

    found = {}
    works, eval.score.frechet = eval.score.frechet, no_convergence  # only rank 0 comes to it
    try:
        found["linear algebra"] = error(drawn, torch.arange(N), reference, extractor, BATCH)
    finally:
        eval.score.frechet = works
    found["nan"] = error(drawn, torch.arange(N), reference, Replaced(extractor, nan_for_image_12), BATCH)
    found["shape"] = error(lambda i: drawn(i).repeat(1, 1, 2, 2), first_images, few, extractor, BATCH)
    broken = ImageSet("somewhere", N, (1, 8, 8), None, (), broken_at_12)
    found["broken file"] = error(broken, torch.arange(N), reference, extractor, BATCH)
    found["dark"] = error(dark_at_first, torch.arange(N), reference, extractor, BATCH)
    return found


def broken_at_12(rows):
    if 12 in rows:  # one rank alone reads it
        raise ValueError("somewhere: image 12 is damaged")
    return drawn(rows).numpy()


class Replaced:
    """An extractor that computes something else."""

    def __init__(self, extractor, function):
        self.__dict__.update(vars(extractor), function=function)

    def check(self, images):
        assert images.dtype == torch.uint8

    def observe(self, images):
        return Observation(self.function(images))


def in_group(group):
    calls = []

    def images(indices):
        calls.append(len(indices))
        return drawn(indices)

    extractor = load("digits-cnn")
    mine = list(generate(images, torch.arange(N), BATCH, group))
    share = share_of(dist.get_rank())
    stats = GaussianStats(6)
    stats.update(features_of(share))
    stats.all_reduce(group)
    return {
        "calls": calls,
        "indices": torch.cat([i for i, _ in mine]).tolist(),
        "images": torch.cat([x for _, x in mine]).numpy(),
        "stats": (stats.n, stats.mean.numpy(), stats.covariance.numpy()),
        "gathered": [x.numpy() for x in gather(features_of(share).flip(0), share.flip(0), group)],
        "record": score(drawn, torch.arange(N), small_reference(extractor, group), extractor, BATCH, group),
    }


def features_of(indices):
    rows = [torch.randn(6, generator=torch.Generator().manual_seed(int(i))) for i in indices]
    return torch.stack(rows) if rows else torch.empty(0, 6)


@pytest.fixture(scope="module")
def ranks():
    found = run(on_ranks, 3)
    return {"pair": [f["pair"] for f in found[:2]]} | {
        name: [f[name] for f in found] for name in ("all", "failures", "one batch")
    }


@pytest.mark.parametrize("name", ["pair", "all"])
def test_any_number_of_ranks_makes_the_same_images_with_equal_calls(ranks, name):
    found = ranks[name]
    assert len({tuple(f["calls"]) for f in found}) == 1 and set(found[0]["calls"]) == {BATCH}
    indices = [i for f in found for i in f["indices"]]
    assert sorted(indices) == list(range(N))
    np.testing.assert_array_equal(np.concatenate([f["images"] for f in found]), drawn(indices))


@pytest.mark.parametrize("name", ["pair", "all"])
def test_pooled_sums_are_those_of_one_rank_although_shares_differ(ranks, name):
    whole = GaussianStats(6)
    whole.update(features_of(range(N)))
    for found in ranks[name]:
        n, mean, covariance = found["stats"]
        assert n == N
        np.testing.assert_allclose(mean, whole.mean, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(covariance, whole.covariance, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["pair", "all"])
def test_gathered_features_come_in_the_order_of_their_indices(ranks, name):
    for found in ranks[name]:
        features, indices = found["gathered"]
        assert indices.tolist() == list(range(N))
        np.testing.assert_array_equal(features, features_of(range(N)))


@pytest.mark.parametrize("name", ["pair", "all"])
def test_the_record_does_not_depend_on_the_number_of_ranks(ranks, extractor, name):
    alone = score(drawn, torch.arange(N), small_reference(extractor), extractor, BATCH)
    assert alone["value"] > 0
    for found in ranks[name]:
        assert_same(found["record"], alone)


def assert_same(record, other):
    assert record.keys() == other.keys()
    for key, value in other.items():
        assert record[key] == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value), key


def test_ranks_without_any_image_get_the_record_of_one_rank(ranks):
    alone = one_batch()
    assert alone["n_gen"] == BATCH and alone["value"] > 0
    for record in ranks["one batch"]:
        assert_same(record, alone)


@pytest.fixture(scope="module")
def five():
    return run(on_five_ranks, 5, timeout=240)


def test_sums_of_five_unequal_shares_are_those_of_one_rank(five):
    whole = features_of(range(N)).double().numpy()
    for n, mean, covariance in (found["stats"] for found in five):
        assert n == N
        np.testing.assert_allclose(mean, whole.mean(0), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(covariance, np.cov(whole, rowvar=False), rtol=1e-9, atol=1e-12)


def test_one_rank_computes_distances_without_waiting_for_the_others(five):
    """A metric that synchronised in ``compute`` would hang here."""
    features = features_of(range(N))
    wanted = [frechet(GaussianStats.of(features), GaussianStats.of(features + 1)), 0.0]
    wanted += [*kid(features, features + 1, 30, 10, 0), *prdc(features, features + 1)]
    assert five[0]["alone"] == pytest.approx(wanted, rel=1e-6, abs=1e-9)
    assert_same(five[0]["record"], one_batch())


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        ("linear algebra", "RuntimeError: no distances: _LinAlgError: eigh did not converge"),
        ("nan", f"ValueError: features of 1 of {N} images hold NaN or infinity, first of the image with index 12"),
        ("shape", "ValueError: images are [1, 16, 16], the reference's [1, 8, 8]"),
        ("broken file", "ValueError: somewhere: image 12 is damaged"),
        ("dark", None),
    ],
)
def test_what_one_rank_meets_leaves_no_other_waiting(ranks, failure, error):
    found = [found[failure] for found in ranks["failures"]]
    assert found[0] == error and {text and text.replace("on rank 0: ", "") for text in found} == {error}


def test_an_error_of_linear_algebra_is_the_same_alone(monkeypatch, extractor):
    monkeypatch.setattr(eval.score, "frechet", no_convergence)
    with pytest.raises(RuntimeError, match=r"eigh did not converge$") as raised:
        score(drawn, torch.arange(N), small_reference(extractor), extractor, BATCH)
    assert isinstance(raised.value.__cause__, torch.linalg.LinAlgError)


def test_a_collapsed_model_gets_a_score_and_a_reference_of_zeros_and_ones_none(digits, reference, extractor):
    train, held_out = digits
    dark = torch.ones(len(held_out), 1, 8, 8, dtype=torch.uint8)
    real = floor(train, reference, extractor, 128)
    assert score(lambda i: dark[i], torch.arange(359), reference, extractor, 128)["value"] > real["value"]
    with pytest.raises(ValueError, match=r"held out: the brightest pixel is 1, .* 0..255, not 0..1"):
        of_images(held_out.clamp(max=1), extractor, 128, "held out")
    with pytest.raises(ValueError, match="training images: the brightest pixel is 1"):
        floor(train.clamp(max=1), reference, extractor, 128)
    one_dark_batch = torch.cat((held_out.clamp(max=1)[:128], held_out[128:]))
    assert len(of_images(one_dark_batch, extractor, 128, "some dark")) == 359


def test_a_reference_is_summed_and_decomposed_once(monkeypatch, extractor):
    calls, eigh = [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda x: calls.append(1) or eigh(x))
    reference = small_reference(extractor)
    first, second = (score(drawn, torch.arange(N), reference, extractor, BATCH) for _ in range(2))
    assert first == second
    assert len(calls) == 3


def test_a_record_survives_json_and_says_where_features_were_computed(extractor):
    record = score(drawn, torch.arange(N), small_reference(extractor), extractor, BATCH)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert (record["extractor_device"], record["batch_size"]) == ("cpu", BATCH)


def test_nothing_that_torch_deprecates_is_called():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        warnings.simplefilter("error", DeprecationWarning)
        extractor = load("digits-cnn")
        score(drawn, torch.arange(N), small_reference(extractor), extractor, BATCH)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_scores_like_the_cpu_and_computes_distances_itself():
    records = {}
    for device in ("cpu", "cuda"):
        extractor = load("digits-cnn", device=device)
        reference = small_reference(extractor)
        records[device] = score(drawn, torch.arange(N), reference, extractor, BATCH)
        assert reference.stats.root.device.type == records[device]["extractor_device"] == device
    near_zero = 0.01 * records["cpu"]["kid_standard_error"]
    for name in ("value", "kid", "kid_standard_error"):
        assert records["cuda"][name] == pytest.approx(records["cpu"][name], rel=1e-3, abs=near_zero)


def test_distance_grows_with_blur_and_noise_and_starts_near_the_floor(digits, reference, extractor):
    train, held_out = digits
    real = floor(train, reference, extractor, 128)

    def scores(change, amounts):
        images = [change(train[: len(held_out)], amount) for amount in amounts]
        return [score(lambda i, x=x: x[i], torch.arange(len(x)), reference, extractor, 128) for x in images]

    for change, amounts in ((blurred, (0.0, 0.5, 1.0)), (noisy, (0, 60, 120))):
        clean, middle, worst = scores(change, amounts)
        assert clean["value"] < 2 * real["value"]
        assert clean["value"] < middle["value"] < worst["value"] > 3 * real["value"]
        assert clean["kid"] < middle["kid"] < worst["kid"]


def test_the_floor_is_not_zero_while_its_kid_is(digits, reference, extractor):
    record = floor(digits[0], reference, extractor, 128)
    assert record["value"] > 0.5
    assert abs(record["kid"]) < 3 * record["kid_standard_error"]
    assert (record["n_gen"], record["n_ref"], record["metric"]) == (359, 359, "FD-digits-cnn")
    assert record["weights_sha256"] == extractor.weights_sha256 and record["protocol"] == "small"


def test_scoring_leaves_the_global_stream_alone(digits, reference, extractor):
    state = torch.get_rng_state()
    floor(digits[0], reference, extractor, 128)
    assert torch.equal(torch.get_rng_state(), state)


def test_unequal_numbers_are_not_compared(digits, reference, extractor):
    with pytest.raises(ValueError, match="358 images against 359"):
        score(lambda i: digits[0][i], torch.arange(358), reference, extractor, 128)
    few = of_images(digits[1][:3], extractor, 128, "three")
    with pytest.raises(ValueError, match="at least 4"):
        score(lambda i: digits[0][i], torch.arange(3), few, extractor, 128)
    with pytest.raises(ValueError, match="the floor needs 359"):
        floor(digits[0][:300], reference, extractor, 128)


def test_another_extractor_or_image_size_is_not_compared(digits, reference, extractor):
    with pytest.raises(ValueError, match="seen through digits-cnn"):
        score(drawn, torch.arange(359), reference, load("efficientnet-lite0"), 128)
    with pytest.raises(ValueError, match=r"images are \[1, 9, 9\]"):
        score(lambda i: torch.zeros(len(i), 1, 9, 9, dtype=torch.uint8), torch.arange(359), reference, extractor, 128)


def test_an_index_that_two_ranks_made_is_noticed():
    with pytest.raises(ValueError, match="twice"):
        gather(torch.zeros(3, 2), torch.tensor([4, 5, 4]))


def test_a_reference_resized_by_another_kernel_is_not_compared(extractor):
    reference = small_reference(extractor)
    reference.meta["resize"] = "bicubic"
    with pytest.raises(ValueError, match=f"the reference was resized by bicubic, not {extractor.resize}: make it anew"):
        score(drawn, torch.arange(N), reference, extractor, BATCH)


@pytest.mark.parametrize("name", ["digits-cnn", "efficientnet-lite0"])
def test_the_distance_does_not_depend_on_the_batch(digits, name):
    network, images = load(name), [half if name == "digits-cnn" else half[:24].expand(-1, 3, -1, -1) for half in digits]
    values = []
    for batch in (1, 64):
        real, made = (extract(lambda i, x=x: x[i], torch.arange(len(x)), network, batch).stats for x in images)
        values.append(frechet(made, real))
    assert values[0] == pytest.approx(values[1], rel=1e-3) and values[0] > 0.1


def test_features_flattened_to_one_row_are_noticed():
    with pytest.raises(ValueError, match=r"\[N, d\], not \[6\]"):
        gather(torch.zeros(6), torch.arange(6))
