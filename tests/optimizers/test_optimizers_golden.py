"""Published rules in fp64 against golden vectors that were computed independently of this package."""

import math

import pytest
import torch

from optimizers import AdamW, BlockMuon, Muon, MuonBP, PeriodicRowMuon, RowMuon
from optimizers.engine.scaling import row_scale, spectral_scale
from optimizers.orthogonal.coefficients import NS5
from optimizers.orthogonal.newton_schulz import orthogonalize, orthogonalize_all
from tests.optimizers.golden import equal, four_steps, gradient, initial_weight, ns5, summary, unit_rows


def polar(x):
    return orthogonalize(x, ((1.875, -1.25, 0.375),) * 40, None, 0.0, torch.float64)


def blocks_of(x, dim, normalise=ns5):
    return torch.cat([normalise(part) for part in x.chunk(2, dim)], dim)


@pytest.mark.parametrize(
    ("normalise", "expected"),
    [
        (ns5, [-1.0715259180, 1.9919388369, 0.3231658024, -0.3443616064]),
        (unit_rows, [-1.9578397168, 2, 0.2126643603, -0.4082482771]),
        (lambda x: blocks_of(x, 0, polar), [-2.1740190804, 2, 0.1466131233, -0.5204611033]),
        (lambda x: blocks_of(x, 0), [-2.0356175837, 1.6436830673, 0.1409439492, -0.4713774276]),
        (lambda x: blocks_of(x, 1), [-0.4100934791, 2.4163270759, 0.1965273186, -0.1746011944]),
    ],
    ids=["ns5", "row", "two polar row blocks", "two row blocks", "two column blocks"],
)
def test_normalisers_match_golden_vectors(normalise, expected):
    assert summary(normalise(gradient(1))) == pytest.approx(expected, abs=1e-7)


def test_ns5_singular_values():
    found = torch.linalg.svdvals(ns5(gradient(1))).tolist()
    assert found == pytest.approx([1.10498, 1.06484, 1.06440, 0.69282], abs=1e-5)


GOLDEN = [
    (AdamW, {}, [0.8469040072, 1.6081833106, -0.4890151365, 0.6666920515]),
    (Muon, {}, [0.1041922977, 1.0415809571, -0.3328940839, 0.3445008409]),
    (Muon, {"momentum_form": "heavy_ball"}, [0.1041923090, 1.0415809660, -0.3328940816, 0.3445008548]),
    (Muon, {"adjust_lr_fn": "original"}, [0.2126816371, 1.1833276451, -0.3794534879, 0.4031456815]),
    (Muon, {"nesterov": False}, [0.1191021527, 1.0416019292, -0.3132257990, 0.3443881244]),
    (MuonBP, {"period": 2, "block_grid": 2}, [0.1341517646, 1.0330370273, -0.3438953595, 0.3284355856]),
    (MuonBP, {"period": 2, "block_grid": (1, 2)}, [0.1336299268, 1.0238170262, -0.3274637217, 0.3414087817]),
    (MuonBP, {"period": 2, "block_grid": 2, "phase": 1}, [0.1320137557, 1.0383359015, -0.3296645900, 0.3597122883]),
    (BlockMuon, {"block_grid": (2, 1)}, [0.1619732112, 1.0291074391, -0.3406658678, 0.3436470191]),
    (BlockMuon, {"block_grid": (1, 2)}, [0.0990978942, 1.0199118320, -0.3190967751, 0.3295912717]),
    (PeriodicRowMuon, {}, [0.1107980408, 1.0330045789, -0.3306316490, 0.3447096402]),
    (PeriodicRowMuon, {"row_lr_ratio": 0.5}, [0.0992963713, 1.0001485150, -0.3231793869, 0.3319442237]),
    (PeriodicRowMuon, {"nesterov": False}, [0.1281927128, 1.0577191430, -0.3251924633, 0.3478356810]),
]


@pytest.mark.parametrize(("cls", "options", "expected"), GOLDEN, ids=lambda v: getattr(v, "__name__", None))
def test_four_steps_match_golden_vectors(cls, options, expected):
    assert summary(four_steps(cls, **options)) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(
    ("cls", "options", "expected"),
    [
        (Muon, {"momentum_form": "heavy_ball"}, [0.1041923090, 1.0415809660]),
        (PeriodicRowMuon, {}, [0.1470693667, 1.0313630506, -0.3315683051]),
        (MuonBP, {"period": 2, "block_grid": 2}, [0.1336299268, 1.0238170262, -0.3274637217, 0.3414087817]),
    ],
    ids=["Muon", "PeriodicRowMuon", "MuonBP"],
)
def test_four_steps_of_the_tall_weight_match_golden_vectors(cls, options, expected):
    assert summary(four_steps(cls, transposed=True, **options))[: len(expected)] == pytest.approx(expected, abs=1e-7)


# -- identities ---------------------------------------------------------------------------------------------------


def test_period_one_is_muon():
    muon = four_steps(Muon)
    assert equal(four_steps(PeriodicRowMuon, period=1), muon)
    assert equal(four_steps(MuonBP, period=1, momentum_form="ema"), muon)


def test_period_infinity_never_refreshes():
    blocks = four_steps(BlockMuon, block_grid=2)
    assert equal(four_steps(MuonBP, period=math.inf, block_grid=2, momentum_form="ema"), blocks)
    rows = four_steps(PeriodicRowMuon, period=math.inf)
    assert not equal(rows, four_steps(PeriodicRowMuon, period=10**6), 1e-3)


def test_one_block_is_the_whole_matrix():
    assert equal(four_steps(MuonBP, period=3), four_steps(Muon, momentum_form="heavy_ball"), 1e-14)


def test_ema_and_heavy_ball_give_the_same_steps():
    assert equal(four_steps(Muon), four_steps(Muon, momentum_form="heavy_ball"), 1e-12)


def test_rows_are_exact_blocks_of_one_row():
    assert equal(torch.cat([ns5(r) for r in gradient(1).split(1)]), unit_rows(gradient(1)), 1e-15)
    assert equal(four_steps(BlockMuon, block_grid=4), four_steps(RowMuon), 1e-14)
    for period in (2, 3):
        rows = four_steps(PeriodicRowMuon, period=period, row_lr_ratio=0.5)
        of_one = {"block_grid": 4, "block_lr_ratio": 0.5, "momentum_form": "ema"}
        assert equal(four_steps(MuonBP, period=period, **of_one), rows, 1e-14)


def test_block_lr_ratio_multiplies_block_steps_only():
    still = four_steps(MuonBP, period=math.inf, block_lr_ratio=0.0)
    assert equal(still, initial_weight() * (1 - 0.01) ** 4, 1e-15)
    assert equal(four_steps(MuonBP, period=1, block_lr_ratio=0.0), four_steps(MuonBP, period=1))


@pytest.mark.parametrize("m, n", [(4, 6), (6, 4), (5, 5), (1, 7), (7, 1), (64, 256), (256, 64)])
def test_scale_table(m, n):
    assert spectral_scale("original", m, n) == pytest.approx(math.sqrt(max(1, m / n)))
    assert spectral_scale("match_rms_adamw", m, n) == pytest.approx(0.2 * math.sqrt(max(m, n)))
    assert spectral_scale("spectral_unclamped", m, n) == pytest.approx(math.sqrt(m / n))
    assert row_scale("match_rms_adamw", m, n) == pytest.approx(0.2 * math.sqrt(n))
    for fn in ("original", "match_rms_adamw", "spectral_unclamped"):
        orthogonal_rms, row_rms = 1 / math.sqrt(max(m, n)), 1 / math.sqrt(n)
        assert row_scale(fn, m, n) * row_rms == pytest.approx(spectral_scale(fn, m, n) * orthogonal_rms)
    with pytest.raises(ValueError, match="'spectral' is none of original, match_rms_adamw"):
        spectral_scale("spectral", m, n)


# -- the kernel ---------------------------------------------------------------------------------------------------


def matrix(seed, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_ns_is_equivariant_under_transposes_and_rotations():
    x = matrix(0, 5, 9)
    p, q = torch.linalg.qr(matrix(1, 5, 5))[0], torch.linalg.qr(matrix(2, 9, 9))[0]
    assert equal(ns5(x.T), ns5(x).T, 1e-13)
    assert equal(
        orthogonalize(p @ x @ q, NS5, 5, 0.0, torch.float64), p @ orthogonalize(x, NS5, 5, 0.0, x.dtype) @ q, 1e-12
    )


def test_ns_keeps_the_singular_vectors():
    x = matrix(0, 5, 9)
    u, _, vt = torch.linalg.svd(x, full_matrices=False)
    inner = u.T @ ns5(x) @ vt.T
    assert equal(inner, inner.diag().diag(), 1e-10)


def test_zero_rows_change_nothing():
    x = matrix(0, 5, 9)
    padded = torch.cat([x, torch.zeros(3, 9, dtype=x.dtype)])
    assert equal(ns5(padded)[:5], ns5(x), 1e-14)
    assert ns5(padded)[5:].abs().max() == 0


ZOO = {
    "gaussian": matrix(0, 12, 20),
    "tall": matrix(1, 20, 12),
    "rank one": matrix(2, 12, 1) @ matrix(3, 1, 20),
    "ill conditioned": matrix(4, 12, 12) @ torch.diag(10.0 ** -torch.arange(12, dtype=torch.float64)),
    "orthogonal": torch.linalg.qr(matrix(5, 12, 12))[0],
    "one row": matrix(6, 1, 9),
    "one column": matrix(7, 9, 1),
    "single entry": matrix(8, 1, 1),
    "huge": matrix(9, 12, 20) * 1e20,
    "tiny": matrix(10, 12, 20) * 1e-25,
    "huge beside tiny": torch.cat([matrix(11, 4, 9) * 1e18, matrix(12, 4, 9) * 1e-18]),
    "zero": torch.zeros(12, 20, dtype=torch.float64),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ZOO)
def test_matrix_zoo(name, dtype):
    x = ZOO[name].float()
    before = x.clone()
    found = orthogonalize(x, NS5, 5, 1e-7, dtype)
    assert torch.equal(x, before)
    assert found.dtype == dtype and found.shape == x.shape
    values, scale = torch.linalg.svdvals(found.double()), torch.linalg.svdvals(ZOO[name])
    assert torch.isfinite(found).all() and values.max() < 1.35
    if name == "zero":
        assert found.abs().max() == 0
    else:
        large = scale > 0.02 * ZOO[name].norm()
        assert (values[large] > 0.6).all()
    if min(x.shape) == 1:
        assert values.max() == pytest.approx(1, abs=1e-6 if dtype != torch.bfloat16 else 1e-2)
    rows = unit_rows(x)
    assert torch.isfinite(rows).all()
    assert torch.allclose(rows.norm(dim=-1), (x.abs().amax(-1) > 0).float())


def test_stacking_does_not_change_fp32_results(monkeypatch):
    matrices = [
        matrix(i, *shape).float() for i, shape in enumerate([(3, 40), (40, 3), (3, 40), (16, 16), (3, 40), (0, 4)])
    ]
    together = orthogonalize_all(matrices, NS5, 5, 1e-7, torch.float32)
    monkeypatch.setattr("optimizers.orthogonal.newton_schulz.STACK_BYTES", 1)
    alone = orthogonalize_all(matrices, NS5, 5, 1e-7, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
