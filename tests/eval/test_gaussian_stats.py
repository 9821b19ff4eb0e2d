import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from eval.frechet import frechet
from eval.statistics import GaussianStats, fp64_device


def stats(*parts, d=6):
    s = GaussianStats(d)
    for part in parts:
        s.update(part)
    return s


@pytest.fixture
def x():
    return torch.randn(101, 6, generator=torch.Generator().manual_seed(0)) * 3 + 1


def test_mean_and_covariance_are_those_of_numpy(x):
    s = stats(x)
    np.testing.assert_allclose(s.mean, x.double().mean(0), rtol=1e-12)
    np.testing.assert_allclose(s.covariance, np.cov(x.double().numpy(), rowvar=False), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_shares_of_any_size_merge_to_the_whole(x, ranks):
    cuts = [0, *[round(len(x) * (r / ranks) ** 2) for r in range(1, ranks)], len(x)]
    merged = stats()  # an empty share takes part too
    for start, end in itertools.pairwise(cuts):
        merged.merge(stats(x[start:end]))
    whole = stats(x)
    assert merged.n == whole.n
    np.testing.assert_allclose(merged.mean, whole.mean, rtol=1e-9)
    np.testing.assert_allclose(merged.covariance, whole.covariance, rtol=1e-9, atol=1e-12)


def test_a_saved_file_reads_back_and_grows_on(x, tmp_path):
    s = stats(x[:60])
    s.save(tmp_path / "ref.npz", meta={"data": "digits", "count": 60})
    assert [p.name for p in tmp_path.iterdir()] == ["ref.npz"]
    with np.load(tmp_path / "ref.npz") as file:
        np.testing.assert_array_equal(file["mu"], s.mean)
        np.testing.assert_array_equal(file["sigma"], s.covariance)
    loaded = GaussianStats.load(tmp_path / "ref.npz")
    assert (loaded.n, loaded.meta) == (60, {"data": "digits", "count": 60})
    loaded.update(x[60:])
    np.testing.assert_allclose(loaded.covariance, stats(x).covariance, rtol=1e-9, atol=1e-12)


def test_wrong_shapes_and_nan_are_refused_and_leave_the_sums_alone(x):
    s = stats(x)
    before = s.covariance
    for wrong in (x[:, :5], x[0], x.flatten()):
        with pytest.raises(ValueError, match=r"\[N, 6\]"):
            s.update(wrong)
    with pytest.raises(ValueError, match="NaN"):
        s.update(torch.full((2, 6), float("nan")))
    with pytest.raises(ValueError, match="cannot merge"):
        s.merge(GaussianStats(5))
    assert torch.equal(s.covariance, before)


def test_too_few_features_have_no_covariance(x):
    with pytest.raises(ValueError, match="at least 2"):
        _ = stats(x[:1]).covariance
    with pytest.raises(ValueError, match="at least 1"):
        _ = stats().mean


def test_pooling_twice_is_refused(x):
    s = stats(x)
    s.all_reduce()
    with pytest.raises(RuntimeError, match="pooled"):
        s.all_reduce()
    with pytest.raises(RuntimeError, match="pooled"):
        s.update(x)


def test_sums_never_lie_on_a_device_without_fp64():
    assert fp64_device("mps") == torch.device("cpu")
    assert fp64_device("cuda:1") == torch.device("cuda:1")


def test_importing_eval_needs_neither_torch_nor_scipy_nor_the_trainer():
    code = "import sys, eval; assert 'torch' not in sys.modules; import eval.score; "
    code += "assert not {'scipy', 'sklearn', 'torchmetrics', 'dit_train', 'optimizers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_module_of_eval_imports_without_scipy():
    """Other FID tools broke with scipy 1.18; here it is made impossible to import."""
    code = "import sys; sys.modules['scipy'] = sys.modules['torchmetrics'] = None; import importlib, pkgutil, eval\n"
    code += (
        "names = [m.name for m in pkgutil.walk_packages(eval.__path__, 'eval.')]; assert 'eval.bootstrap' in names\n"
    )
    code += "names.remove('eval.plugged')  # is there for torchmetrics, which imports scipy\n"
    code += "for name in names: importlib.import_module(name)\n"
    code += "assert not {'sklearn', 'dit_train', 'optimizers'} & set(sys.modules)\n"
    code += "import torch; from eval.statistics import GaussianStats as Stats; from eval.frechet import frechet\n"
    code += "from eval.kernel import kid; from eval.manifold import prdc; x, y = torch.randn(2, 40, 3)\n"
    code += "frechet(Stats.of(x), Stats.of(y)); kid(x, y); prdc(x, y)"
    subprocess.run([sys.executable, "-W", "error::DeprecationWarning:numpy", "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("n", [7, 35])
def test_covariance_is_that_of_numpy_at_any_count(n):
    """Of unequal sides, too: nothing may assume that they are equal."""
    rows = torch.randn(n, 6, generator=torch.Generator().manual_seed(n))
    s = stats(rows[:3], rows[3:])
    np.testing.assert_allclose(s.covariance, np.cov(rows.double().numpy(), rowvar=False), rtol=1e-11, atol=1e-13)
    assert torch.equal(s.covariance, s.covariance.T)


def test_strips_and_blocks_make_up_the_whole(monkeypatch):
    monkeypatch.setattr("eval.statistics.STRIP", 5)
    monkeypatch.setattr("eval.statistics.ROWS", 16)
    rows = torch.randn(50, 13, generator=torch.Generator().manual_seed(1)).double()
    s = GaussianStats.of(rows)
    np.testing.assert_allclose(s.covariance, np.cov(rows.numpy(), rowvar=False), rtol=1e-11, atol=1e-13)
    assert s.n == 50
    with pytest.raises(ValueError, match="NaN"):
        s.update(torch.cat((rows, rows[:1] / 0)))
    with pytest.raises(ValueError, match=r"\[n, d\]"):
        GaussianStats.of(rows[0])


def peak_of(images):
    """Largest number of bytes of tensors alive at once while so many features stream in, beyond one batch."""
    s, batch = GaussianStats(64), torch.randn(100, 64)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        for _ in range(images // 100):
            s.update(batch)
    alive = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak


def test_memory_does_not_grow_with_the_number_of_images():
    few = peak_of(2_000)
    assert 100 * 64 * 8 <= few == peak_of(20_000)


def test_features_that_carry_gradients_leave_no_graph_behind():
    s = GaussianStats(6)
    s.update(torch.ones(4, 6, requires_grad=True) * 2)
    assert not s.sum.requires_grad and not s.outer.requires_grad


def test_statistics_without_a_count_compare_but_do_not_grow(x, tmp_path):
    whole = stats(x)
    bare = GaussianStats.given(whole.mean, whole.covariance)
    assert bare.n is None and frechet(bare, whole) < 1e-9
    assert frechet(bare, stats(x[:50])) == pytest.approx(frechet(whole, stats(x[:50])), rel=1e-9)
    for adding in (lambda: bare.update(x), lambda: bare.merge(whole), lambda: stats(x).merge(bare), bare.all_reduce):
        with pytest.raises(RuntimeError, match="without a count"):
            adding()
    bare.save(tmp_path / "bare.npz", meta={"of": "x"})
    again = GaussianStats.load(tmp_path / "bare.npz")
    assert again.n is None and again.meta == {"of": "x"} and torch.equal(again.covariance, bare.covariance)


def test_given_statistics_with_a_count_are_sums(x):
    whole = stats(x[:60])
    given = GaussianStats.given(whole.mean, whole.covariance, n=60)
    given.update(x[60:])
    np.testing.assert_allclose(given.covariance, stats(x).covariance, rtol=1e-10, atol=1e-12)
