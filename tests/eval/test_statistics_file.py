import os
import pickle
import zipfile

import numpy as np
import pytest
import torch

from eval.features import Features
from eval.frechet import frechet
from eval.statistics import GaussianStats
from eval.statistics_file import OnlyImagesError

D, SPATIAL = 5, 7


def pair(d, seed):
    x = np.random.default_rng(seed).normal(size=(50, d))
    return x.mean(0), np.cov(x, rowvar=False)


MU, SIGMA = pair(D, 0)
MU_S, SIGMA_S = pair(SPATIAL, 1)
IMAGES = np.zeros((9, 4, 4, 3), np.uint8)


def load(folder, name="ref.npz", **arrays):
    np.savez(folder / name, **arrays)
    return GaussianStats.load(folder / name)


def test_a_plain_pair_has_no_count(tmp_path):
    """pytorch-fid, clean-fid, EDM."""
    found = load(tmp_path, mu=MU, sigma=SIGMA)
    assert found.n is None and found.meta == {}
    np.testing.assert_array_equal(found.mean, MU)
    np.testing.assert_allclose(found.covariance, SIGMA, rtol=1e-15)
    single = load(tmp_path, mu=MU.astype(np.float32), sigma=SIGMA.astype(">f4"))
    assert single.mean.dtype == single.covariance.dtype == torch.float64
    np.testing.assert_allclose(single.covariance, SIGMA, rtol=1e-6)


def test_the_statistics_of_an_adm_file_win_over_its_images(tmp_path):
    found = load(tmp_path, arr_0=IMAGES, mu=MU, sigma=SIGMA, mu_s=MU_S, sigma_s=SIGMA_S)
    assert found.n is None, "the images' count is not that of mu and sigma"
    np.testing.assert_array_equal(found.mean, MU)
    assert "not used" in found.meta["arr_0"]
    spatial = GaussianStats.load(tmp_path / "ref.npz", spatial=True)
    np.testing.assert_array_equal(spatial.mean, MU_S)
    assert spatial.n is None and spatial.meta["layout"] == "NHWC"


def test_the_images_beside_statistics_are_never_read(tmp_path, monkeypatch):
    """In ADM's ImageNet file they are 2 GB."""
    read, get = [], np.lib.npyio.NpzFile.__getitem__
    monkeypatch.setattr(np.lib.npyio.NpzFile, "__getitem__", lambda self, key: read.append(key) or get(self, key))
    load(tmp_path, arr_0=IMAGES, mu=MU, sigma=SIGMA)
    assert sorted(read) == ["mu", "sigma"]


def test_images_alone_are_told_from_other_files(tmp_path):
    with pytest.raises(OnlyImagesError, match=r"ref\.npz: no mu, sigma in it, only images .*extract"):
        load(tmp_path, arr_0=IMAGES)
    for arrays in ({"mu": MU}, {"mu": MU, "arr_0": IMAGES}, {"features": MU}):
        with pytest.raises(ValueError, match="in it, but") as raised:
            load(tmp_path, **arrays)
        assert not isinstance(raised.value, OnlyImagesError)
    np.savez(tmp_path / "plain.npz", mu=MU, sigma=SIGMA)
    with pytest.raises(ValueError, match="no mu_s, sigma_s in it"):
        GaussianStats.load(tmp_path / "plain.npz", spatial=True)


def spatial_stats(maps, layout):
    """Of maps [N, 7, h, w], flattened in that order."""
    ordered = maps if layout == "NCHW" else maps.permute(0, 2, 3, 1)
    stats = GaussianStats.of(ordered.flatten(1))
    stats.meta["layout"] = layout
    return stats


def test_spatial_features_in_another_order_are_not_compared():
    """sFID came out as 299 instead of 6 where one side was flattened NCHW and the other NHWC."""
    scale = torch.arange(1.0, 8)[:, None, None]
    maps = [torch.randn(400, 7, 2, 2, generator=torch.Generator().manual_seed(s)) * scale + scale for s in (0, 1)]
    right, other = (spatial_stats(x, "NHWC") for x in maps)
    wrong = spatial_stats(maps[1], "NCHW")
    with pytest.raises(ValueError, match="different orders: NCHW and NHWC"):
        frechet(right, wrong)
    assert frechet(right, right) < 1e-9
    silent = GaussianStats.given(wrong.mean, wrong.covariance)  # as a file that does not tell
    assert frechet(right, silent) > 10 * frechet(right, other)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_of_edm2_has_a_pair_for_each_metric(tmp_path, protocol):
    content = {
        "fid": {"mu": MU, "sigma": SIGMA},
        "fd_dinov2": {"mu": MU_S, "sigma": SIGMA_S},
        "num_images": np.int64(50),
    }
    (tmp_path / "ref.pkl").write_bytes(pickle.dumps(content, protocol))
    found = GaussianStats.load(tmp_path / "ref.pkl")
    np.testing.assert_allclose(found.mean, MU, rtol=1e-14)
    np.testing.assert_allclose(found.covariance, SIGMA, rtol=1e-12)
    assert (found.n, found.meta) == (50, {"metric": "fid"})
    other = GaussianStats.load(tmp_path / "ref.pkl", metric="fd_dinov2")
    assert other.num_features == SPATIAL and other.meta == {"metric": "fd_dinov2"}
    with pytest.raises(ValueError, match="no statistics for 'is'; it holds fid, fd_dinov2"):
        GaussianStats.load(tmp_path / "ref.pkl", metric="is")


@pytest.mark.parametrize(("ours", "theirs"), [(b"numpy._core", b"numpy.core"), (b"numpy.core", b"numpy._core")])
def test_pickles_of_numpy_1_and_2_are_read_by_either(tmp_path, ours, theirs):
    content = pickle.dumps({"fid": {"mu": MU, "sigma": SIGMA}}, 0).replace(ours, theirs)  # protocol 0 has no lengths
    assert theirs in content and ours not in content
    (tmp_path / "ref.pkl").write_bytes(content)
    found = GaussianStats.load(tmp_path / "ref.pkl")
    np.testing.assert_allclose(found.mean, MU, rtol=1e-14)
    assert found.n is None


class Runs:
    def __reduce__(self):
        return os.mkdir, ("run-by-a-pickle",)


def test_a_pickle_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for bad in (Runs(), {"fid": {"mu": MU, "sigma": Runs()}}, {"fid": {"mu": torch.zeros(2), "sigma": SIGMA}}):
        (tmp_path / "bad.pkl").write_bytes(pickle.dumps(bad))
        with pytest.raises(ValueError, match=r"bad\.pkl: not a pickle of plain numpy arrays .*wants to load") as raised:
            GaussianStats.load(tmp_path / "bad.pkl")
        assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.pkl"]
    np.savez(tmp_path / "objects.npz", mu=np.array([Runs()], dtype=object), sigma=SIGMA)
    with pytest.raises(ValueError, match="not an npz file of plain arrays"):
        GaussianStats.load(tmp_path / "objects.npz")
    assert not (tmp_path / "run-by-a-pickle").exists()


@pytest.mark.parametrize("content", [b"", b"nonsense", pickle.dumps([1, 2]), pickle.dumps({"fid": 3})])
def test_other_pickles_and_damaged_ones_are_refused(tmp_path, content):
    (tmp_path / "ref.pkl").write_bytes(content)
    with pytest.raises(ValueError, match=r"ref\.pkl: (not a pickle|no statistics for 'fid')"):
        GaussianStats.load(tmp_path / "ref.pkl")


def test_damaged_and_other_npz_files_are_refused_in_one_line(tmp_path):
    path = tmp_path / "ref.npz"
    np.savez(path, mu=MU, sigma=SIGMA)
    whole = path.read_bytes()
    np.save(tmp_path / "one.npy", MU)
    other_zip = tmp_path / "other.zip"
    with zipfile.ZipFile(other_zip, "w") as file:
        file.writestr("mu.npy", "text")
        file.writestr("sigma.npy", "text")
    for content in (
        b"",
        whole[: len(whole) // 2],
        b"nonsense",
        b"?" + whole[1:],
        (tmp_path / "one.npy").read_bytes(),
        other_zip.read_bytes(),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"ref\.npz: ") as raised:
            GaussianStats.load(path)
        assert "\n" not in str(raised.value) and "unsafe" not in str(raised.value)
    for missing in ("absent.npz", "absent.pkl"):
        with pytest.raises(FileNotFoundError, match="absent"):
            GaussianStats.load(tmp_path / missing)


def test_numbers_that_are_no_mean_and_covariance_are_refused(tmp_path):
    skew = SIGMA.copy()
    skew[0, 1] += 1
    for mu, sigma, reason in (
        (MU[:-1], SIGMA, r"sigma \[d, d\]"),
        (np.float64(0), np.float64(0), r"sigma \[d, d\]"),  # features flattened to one number
        (MU * np.nan, SIGMA, "NaN"),
        (MU, skew, "not symmetric"),
        (MU, SIGMA - 10 * np.eye(D), "negative variance"),
        (MU.astype(complex), SIGMA, "real numbers"),
    ):
        with pytest.raises(ValueError, match=reason):
            load(tmp_path, mu=mu, sigma=sigma)
    with pytest.raises(ValueError, match="no spatial"):
        (tmp_path / "ref.pkl").write_bytes(pickle.dumps({"fid": {"mu": MU, "sigma": SIGMA}}))
        GaussianStats.load(tmp_path / "ref.pkl", spatial=True)


@pytest.mark.parametrize("count", [0, 1, -3, 97.5, np.nan, "97", [97, 1]])
def test_a_count_that_is_no_number_of_images_is_refused(tmp_path, count):
    with pytest.raises(ValueError, match=r"ref\.npz: n, the number of images, must be whole and 2 or more"):
        load(tmp_path, mu=MU, sigma=SIGMA, n=np.array(count))
    (tmp_path / "ref.pkl").write_bytes(pickle.dumps({"fid": {"mu": MU, "sigma": SIGMA}, "num_images": count}))
    with pytest.raises(ValueError, match=r"ref\.pkl: n, the number of images"):
        GaussianStats.load(tmp_path / "ref.pkl")


@pytest.mark.parametrize(
    "meta",
    [
        "",
        "null",
        "[1]",
        '{"a":',
        '{"extractor": 3}',
        '{"image_shape": 3}',
        '{"image_shape": ["x"]}',
        '{"floor": NaN}',
        '{"floor": null}',
    ],
)
def test_provenance_that_is_damaged_is_refused_before_any_work(tmp_path, meta):
    with pytest.raises(ValueError, match=r"ref\.npz: its meta is damaged") as raised:
        load(tmp_path, mu=MU, sigma=SIGMA, meta=np.array(meta))
    assert "\n" not in str(raised.value)


def test_a_symmetric_matrix_that_is_no_covariance_gives_no_distance(tmp_path):
    flat = np.zeros((D, D))
    flat[0, 1] = flat[1, 0] = 5
    stats = load(tmp_path, mu=MU, sigma=flat)
    with pytest.raises(ValueError, match=r"sigma is no covariance: it has the eigenvalues -5 and 5"):
        frechet(stats, stats)
    halved = load(tmp_path, mu=MU, sigma=np.ones((D, D)).astype(np.float16) * np.float16(0.1))
    assert frechet(halved, halved) == pytest.approx(0, abs=1e-3)


FEATURES = {"features": np.ones((4, D), np.float32), "indices": np.arange(4), "labels": np.arange(4)}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"features": np.ones((4, D), int)}, r"floats \[4, {d}\]"),
        ({"features": np.ones((4, D + 1), np.float32)}, r"floats \[4, {d}\]"),
        ({"features": np.ones(4, np.float32)}, r"floats \[4, {d}\]"),
        ({"features": np.full((4, D), np.nan, np.float32)}, "NaN"),
        ({"features": np.array([None] * 4)}, "allow_pickle"),
        ({"features": np.array(["a"] * 4)}, "str"),
        ({"indices": np.zeros(4, int)}, "rise"),
        ({"indices": np.arange(4.0)}, "int64"),
        ({"indices": np.int64(3)}, "floats"),
        ({"labels": np.arange(4.0)}, "labels must be int64"),
        ({"labels": np.arange(3)}, "labels must be int64"),
        ({"labels": -np.arange(4)}, "0 or more"),
    ],
)
def test_kept_features_that_are_damaged_are_refused(tmp_path, wrong, reason):
    np.savez(tmp_path / "ref.npz", mu=MU, sigma=SIGMA, n=4, **FEATURES)
    assert len(Features.load(tmp_path / "ref.npz").kept) == 4
    np.savez(tmp_path / "ref.npz", mu=MU, sigma=SIGMA, n=4, **FEATURES | wrong)
    with pytest.raises(ValueError, match=r"ref\.npz: damaged .*" + reason.format(d=D)):
        Features.load(tmp_path / "ref.npz")


def test_a_constant_feature_may_have_a_variance_of_rounding(tmp_path):
    x = torch.cat((torch.full((97, 1), 50.3), torch.randn(97, 2, generator=torch.Generator().manual_seed(0))), 1)
    for n in range(3, 97, 7):
        GaussianStats.of(x[:n]).save(tmp_path / "ours.npz")
        assert GaussianStats.load(tmp_path / "ours.npz").n == n
        GaussianStats.of(x[:n, :1]).save(tmp_path / "alone.npz")
        assert GaussianStats.load(tmp_path / "alone.npz").n == n
