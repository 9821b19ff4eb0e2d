import pytest
import torch

from eval import bootstrap
from eval.bootstrap import frechet_interval, frechet_standard_error, kid_interval
from eval.frechet import frechet
from eval.kernel import mmd2
from eval.statistics import GaussianStats

D, SHIFT, SCALE = 6, 0.3, 1.5
DISTANCE = D * SHIFT**2 + D * (SCALE - 1) ** 2  # of N(shift, scale² I) to N(0, I)


def cloud(n, seed, shift=SHIFT, scale=SCALE, d=D):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale + shift


def exact():
    return GaussianStats.given(torch.zeros(D).double(), torch.eye(D).double())


def exact_of(intervals, truth):
    return sum(interval.low <= truth <= interval.high for interval in intervals) / len(intervals)


@pytest.fixture(scope="module")
def intervals():
    return [frechet_interval(cloud(300, seed), exact(), replicates=60) for seed in range(60)]


def test_the_value_is_the_frechet_distance():
    x = cloud(80, 0)
    assert frechet_interval(x, exact(), 20).value == pytest.approx(frechet(GaussianStats.of(x), exact()), rel=1e-9)
    few, reference = cloud(20, 1, d=40), GaussianStats.of(cloud(30, 2, 0.0, 1.0, d=40))
    expected = frechet(GaussianStats.of(few), reference)
    assert frechet_interval(few, reference, 20).value == pytest.approx(expected, rel=1e-6)


def test_a_replicate_is_the_distance_of_the_images_drawn_with_repeats():
    x, reference = cloud(50, 3), GaussianStats.of(cloud(70, 4, 0.0))
    weights = next(bootstrap._weights(50, 1, 5, torch.device("cpu")))
    repeated = x[torch.arange(50).repeat_interleave(weights.long())]
    assert len(repeated) == 50 and weights.max() > 1
    cloud_of = bootstrap.Cloud(x, x.mean(0), block=16)
    found = bootstrap._weighted_frechet(cloud_of, weights, reference).item()
    assert found == pytest.approx(frechet(GaussianStats.of(repeated), reference), rel=1e-9)


def test_intervals_hold_the_true_distance_as_often_as_they_promise(intervals):
    """95 % give or take the draw of 60; percentiles of the replicates hold it far less often, see the docstring."""
    assert exact_of(intervals, DISTANCE) >= 0.88
    narrow = [frechet_interval(cloud(300, seed), exact(), 40, confidence=0.5) for seed in range(40)]
    assert 0.25 < exact_of(narrow, DISTANCE) < 0.75


def test_where_the_bias_is_large_only_reflected_intervals_hold_the_distance():
    d, n, shift, scale = 16, 160, 0.2, 1.2
    distance = d * shift**2 + d * (scale - 1) ** 2
    reference = GaussianStats.given(torch.zeros(d).double(), torch.eye(d).double())
    found = [frechet_interval(cloud(n, seed, shift, scale, d), reference, 30) for seed in range(15)]
    assert exact_of(found, distance) >= 0.9
    half = [(interval.high - interval.low) / 2 for interval in found]
    for biases in (0, 1):  # about the score, and about the replicates as percentiles are
        middle = [interval.value + biases * interval.bias for interval in found]
        assert sum(abs(m - distance) <= h for m, h in zip(middle, half, strict=True)) / len(found) < 0.7


@pytest.mark.parametrize(("n", "d", "upper"), [(300, 6, 1.2), (96, 48, 1.5), (30, 48, 1.7)])
def test_the_standard_error_is_the_spread_of_fresh_images_even_for_few(n, d, upper):
    reference = GaussianStats.given(torch.zeros(d).double(), torch.eye(d).double())
    sets = [cloud(n, seed, 0.2, 1.3, d) for seed in range(80)]
    values = torch.tensor([frechet(GaussianStats.of(x), reference) for x in sets])
    errors = torch.tensor([frechet_standard_error(x, reference) for x in sets])
    assert 0.8 < errors.mean() / values.std() < upper


def test_the_influence_of_an_image_is_the_change_when_it_counts_more():
    x, reference = cloud(40, 10), GaussianStats.of(cloud(70, 11, 0.0))
    around, one = bootstrap.Cloud(x, x.mean(0)), torch.ones(40, dtype=torch.float64)
    changes = []
    for image in range(40):
        more, less = one.clone(), one.clone()
        more[image] += 1e-4
        less[image] -= 1e-4
        more, less = (bootstrap._weighted_frechet(around, w * 40 / w.sum(), reference) for w in (more, less))
        changes.append((more - less) / 2e-4 * 40)
    expected = (torch.stack(changes).var() / 40).sqrt().item()
    assert frechet_standard_error(x, reference) == pytest.approx(expected, rel=0.03)  # n - 1 against n


def test_bias_and_standard_error_are_those_of_fresh_images(intervals):
    values = torch.tensor([interval.value for interval in intervals])
    bias = values.mean().item() - DISTANCE
    errors, biases = (torch.tensor([getattr(i, name) for i in intervals]).mean() for name in ("standard_error", "bias"))
    assert 0.75 < errors / values.std() < 1.4
    assert biases == pytest.approx(bias, abs=3 * values.std().item() / len(values) ** 0.5)


def test_no_distance_is_negative_and_equal_distributions_reach_zero():
    held = [frechet_interval(cloud(300, seed, 0.0, 1.0), exact(), 30) for seed in range(10)]
    assert all(0 <= interval.low <= interval.high for interval in held)
    assert exact_of(held, 0) >= 0.8


def test_the_value_of_kid_is_the_unbiased_estimate_of_all_images_whatever_the_blocks():
    a, b = cloud(60, 6).float(), cloud(45, 7, 0.0).float()
    whole = kid_interval(a, b)
    assert whole.value == pytest.approx(mmd2(a.double(), b.double()).item(), rel=1e-12)
    for block in (1, 7, 44):
        assert kid_interval(a, b, block=block) == pytest.approx(whole, rel=1e-10)


def test_over_all_possible_draws_the_mean_kernel_within_a_set_is_unbiased():
    x = cloud(3, 12)
    draws = torch.cartesian_prod(*[torch.arange(3)] * 3)
    weights = torch.stack([torch.ones(3), *[torch.bincount(draw, minlength=3) for draw in draws]], 1).double()
    value, *found = bootstrap._mean_within(bootstrap.Cloud(x, torch.zeros(D).double(), block=2), weights)
    assert len(found) == 27 and torch.stack(found).mean().item() == pytest.approx(value.item(), rel=1e-12)


def test_intervals_of_kid_hold_the_true_discrepancy():
    """In one dimension the kernel is 1 + 3xy + 3x²y² + x³y³: squares of differences of moments."""
    m, s = 0.5, 1.2
    moments = (m, m**2 + s**2, m**3 + 3 * m * s**2)
    truth = sum(c * (got - normal) ** 2 for c, got, normal in zip((3, 3, 1), moments, (0, 1, 0), strict=True))
    pairs = [(cloud(200, seed, m, s, d=1), cloud(200, 1000 + seed, 0.0, 1.0, d=1)) for seed in range(60)]
    found = [kid_interval(*pair, replicates=100) for pair in pairs]
    values = torch.tensor([interval.value for interval in found])
    assert 0.75 < torch.tensor([interval.standard_error for interval in found]).mean() / values.std() < 1.4
    assert exact_of(found, truth) >= 0.85
    equal = [kid_interval(b, cloud(200, 2000 + i, 0.0, 1.0, d=1), 100) for i, (_, b) in enumerate(pairs)]
    assert exact_of(equal, 0) >= 0.9


def test_equal_calls_give_equal_intervals_and_leave_the_global_stream_alone():
    x, state = cloud(40, 8), torch.get_rng_state()
    for interval in (
        lambda seed: frechet_interval(x, exact(), 20, seed=seed),
        lambda seed: kid_interval(x, x + 1, seed=seed),
    ):
        assert interval(1) == interval(1) != interval(2)
    assert torch.equal(torch.get_rng_state(), state)


def test_bad_input_raises():
    x = cloud(10, 9)
    with pytest.raises(ValueError, match="20 replicates"):
        frechet_interval(x, exact(), 19)
    with pytest.raises(ValueError, match="2 images"):
        kid_interval(x, x[:1])
    with pytest.raises(ValueError, match="confidence"):
        kid_interval(x, x, confidence=95)
    with pytest.raises(ValueError, match="cannot compare 5 features with 6"):
        frechet_interval(x[:, :5], exact())
    with pytest.raises(ValueError, match="NaN"):
        frechet_interval(x * float("nan"), exact())
