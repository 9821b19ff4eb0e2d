import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch

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


def test_a_file_without_a_count_says_what_is_missing(tmp_path):
    np.savez(tmp_path / "plain.npz", mu=np.zeros(2), sigma=np.eye(2))
    with pytest.raises(ValueError, match=r"plain\.npz: no meta, n in it"):
        GaussianStats.load(tmp_path / "plain.npz")


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
