"""Every named Newton–Schulz set: golden vectors, output ranges, symmetries, hard inputs."""

import math

import pytest
import torch
from torch import nn

from optimizers import Muon
from optimizers.orthogonal.coefficients import NAMES, NS5, Schedule, resolve
from optimizers.orthogonal.gram import gram_iterate_
from optimizers.orthogonal.newton_schulz import iterate_, orthogonalize, orthogonalize_all

GRAM_NAMES = [name for name in NAMES if name.startswith("gram_")]
REFUSED = [*GRAM_NAMES, "cans"]  # in bf16
CUBIC5 = (
    (3.3656576, -3.3420992, 0),
    (2.5744352, -1.4957376, 0),
    (2.5368962, -1.4312570, 0),
    (2.4418906, -1.2764040, 0),
)
AOL = ((4.0098, -7.0585, 2.4635), (3.4585, -5.5479, 2.5959), (2.7573, -3.2939, 1.4254), (2.7215, -3.0494, 1.3169))


def matrix(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradient(t):
    rows = [
        [(((7 * i + 13 * j + 5 * i * j + 3 * t * (i + 2 * j) + 11 * t) % 17) - 8) / 8 for j in range(6)]
        for i in range(4)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def summary(x):
    return [x.sum().item(), x.norm().item(), x[0, 0].item(), x[-1, -1].item()]


def polar(x):
    u, _, vt = torch.linalg.svd(x, full_matrices=False)
    return u @ vt


def equal(first, second, limit=0.0):
    return (first - second).abs().max() <= limit


# -- golden vectors -----------------------------------------------------------------------------------------------

PE_GOLDEN = [-1.5466664968, 2.0043294370, 0.3337350890, -0.4664892117]


@pytest.mark.parametrize(
    ("coefficients", "steps", "expected"),
    [
        (NS5, None, [-1.0715259180, 1.9919388369, 0.3231658024, -0.3443616064]),
        ("ns5", 5, [-1.0715259180, 1.9919388369, 0.3231658024, -0.3443616064]),
        ("polar_express", None, PE_GOLDEN),
        (resolve("polar_express").rows, None, PE_GOLDEN),
        ("exact", 14, [-1.7795626431, 2, 0.3012486860, -0.5043460945]),
        ("polar_express", 12, [-1.7795626431, 2, 0.3012486860, -0.5043460945]),
    ],
)
def test_golden_vectors(coefficients, steps, expected):
    assert summary(orthogonalize(gradient(1), coefficients, steps)) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("width", [6, 12])  # with and without room for its buffers in that of the result
def test_gram_with_one_restart_is_polar_express(width):
    x = torch.zeros(1, 4, width, dtype=torch.float64)
    x[0, :, :6] = gradient(1) / (gradient(1).norm() + 1e-7)
    found = gram_iterate_(x, resolve("polar_express"), restarts=(2,))
    assert summary(found[0, :, :6]) == pytest.approx(PE_GOLDEN, abs=1e-7)


def test_four_steps_of_muon_with_polar_express():
    start = [[(((3 * i + 5 * j) % 7) - 3) / 10 for j in range(6)] for i in range(4)]
    w = nn.Parameter(torch.tensor(start, dtype=torch.float64))
    optimizer = Muon([w], lr=0.1, weight_decay=0.1, ns_coefficients="polar_express")
    for t in range(1, 5):
        w.grad = gradient(t)
        optimizer.step()
    expected = [0.1512058645, 1.0439923229, -0.3151899380, 0.3531847482]
    assert summary(w.detach()) == pytest.approx(expected, abs=1e-6)  # theirs adds eps to the absolute norm
    other = Muon([w], ns_coefficients="quintic")
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["ns_coefficients"] == "polar_express"


# -- ranges -------------------------------------------------------------------------------------------------------

RANGES = [  # f(1), range on σ ≥ 1e-2, range on σ ≥ 1e-3, f(1e-3), slope at 0
    ("ns5", 0.696, [0.682, 1.134], [0.470, 1.202], 0.470, 485),
    ("quintic", 0.978, [0.978, 1.032], [0.475, 1.145], 0.475, 493),
    ("polar_express", 1.029, [0.870, 1.124], [0.846, 1.124], 0.846, 976),
    ("polar_express_1.05", 1.019, [0.846, 1.124], [0.729, 1.124], 0.729, 804),
    ("polar_express_kj", 0.904, [0.859, 1.141], [0.847, 1.141], 0.847, 970),
    ("cans", 1.005, [0.884, 1.120], [0.884, 1.120], 0.887, 1049),
    ((*CUBIC5, (2.2230472, -0.9630650, 0)), 0.774, [0.774, 1.300], [0.119, 1.300], 0.119, 119),  # as published
    ("cubic5", 1.290, [0.791, 1.300], [0.116, 1.300], 0.116, 116),
    ("exact", 1.000, [1.000, 1.0005], [1.000, 1.0005], 1.000, 79000),
    ("turbo", 0.944, [0.941, 1.050], [0.147, 1.050], 0.147, 147),
]


@pytest.mark.parametrize(
    ("name", "one", "wide", "wider", "small", "slope"), RANGES, ids=[str(r[0])[:20] for r in RANGES]
)
def test_output_ranges(name, one, wide, wider, small, slope):
    rows = resolve(name).rows
    values = torch.cat([torch.logspace(-3, -2, 2001), torch.logspace(-2, 0, 8001)]).double().clamp(1e-3, 1)
    pairs = torch.stack([values, (1 - values**2).sqrt()], -1).diag_embed()  # singular values σ, √(1−σ²): norm 1
    found = orthogonalize(pairs, rows, eps=0.0)[:, 0, 0]
    assert found[-1].item() == pytest.approx(one, abs=6e-4)
    assert found[0].item() == pytest.approx(small, abs=6e-4)
    assert [found[2001:].min().item(), found[2001:].max().item()] == pytest.approx(wide, abs=6e-4)
    assert [found.min().item(), found.max().item()] == pytest.approx(wider, abs=6e-4)
    assert math.prod(row[0] for row in rows) == pytest.approx(slope, rel=1e-2)


@pytest.mark.parametrize("name", NAMES)
def test_more_steps_converge_to_the_polar_factor(name):
    x, steps = matrix(0, 6, 15), {"ns5": 5, "gram_ns5": 5}.get(name, 16)
    found = orthogonalize(x, name, steps)
    d = (x @ x.T).abs().sum(1).rsqrt() if name == "turbo" else torch.ones(6, dtype=x.dtype)
    limit = 0.32 if name.endswith("ns5") else 1e-10
    assert (found - polar(d[:, None] * x)).norm() / math.sqrt(6) <= limit


def test_turbo_tends_to_the_polar_factor_of_scaled_rows():
    u, v = torch.linalg.qr(matrix(0, 64, 64))[0], torch.linalg.qr(matrix(1, 256, 64))[0]
    x = u @ torch.diag(1 / torch.arange(1, 65, dtype=torch.float64)) @ v.T
    scaled = (x @ x.T).abs().sum(1).rsqrt()[:, None] * x
    assert torch.linalg.svdvals(scaled)[0] <= 1
    limit = orthogonalize(x, "turbo", 16)
    assert equal(limit, polar(scaled), 1e-10)
    assert (limit * polar(x)).sum() / 64 == pytest.approx(0.988, abs=2e-3)


def test_aol_reverses_large_singular_values():
    """Why the set published as "aol" is withheld: AOL scaling leaves orthogonal and rank-one matrices at σ = 1."""
    eye = torch.eye(4, dtype=torch.float64)[None]
    assert iterate_(eye / 2, Schedule(AOL, aol=True))[0].diagonal().max() < -0.9
    column = matrix(0, 4, 1) @ matrix(1, 1, 9)
    assert (iterate_((column / column.norm())[None], Schedule(AOL, aol=True))[0] * column).sum() < 0
    with pytest.raises(ValueError, match="take 'turbo'"):
        resolve("aol")


# -- symmetries ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_symmetries(name):
    x = matrix(0, 5, 11)
    p, q = torch.linalg.qr(matrix(1, 5, 5))[0], torch.linalg.qr(matrix(2, 11, 11))[0]
    found = orthogonalize(x, name, eps=0.0)
    assert torch.equal(orthogonalize(x * 2.0**70, name, eps=0.0), found)
    assert equal(orthogonalize(x * 3, name), found, 1e-6)
    assert equal(orthogonalize(x.T, name, eps=0.0), found.T, 1e-12)
    assert equal(orthogonalize(x @ q, name, eps=0.0), found @ q, 1e-12)
    if name != "turbo":  # whose row scaling depends on the basis of the short side
        assert equal(orthogonalize(p @ x, name, eps=0.0), p @ found, 1e-12)
    for pad in (torch.zeros(3, 11), torch.zeros(7, 11)):  # stays wide, becomes tall
        if pad.shape[0] == 3 or name != "turbo":
            padded = orthogonalize(torch.cat([x, pad.double()]), name, eps=0.0)
            assert equal(padded[:5], found, 1e-12) and not padded[5:].any()
    if name != "turbo":
        u, _, vt = torch.linalg.svd(x, full_matrices=False)
        inner = u.T @ found @ vt.T
        assert equal(inner, inner.diag().diag(), 1e-10)


@pytest.mark.parametrize("name", GRAM_NAMES)
def test_gram_equals_plain(name):
    for x in (matrix(0, 8, 32), matrix(1, 3, 32, 8), matrix(2, 8, 9)):
        assert equal(orthogonalize(x, name), orthogonalize(x, name.removeprefix("gram_")), 1e-12)


# -- hard inputs --------------------------------------------------------------------------------------------------

ZOO = {
    "gaussian": matrix(0, 12, 30),
    "tall": matrix(1, 30, 12),
    "square": matrix(2, 12, 12),
    "rank one": matrix(3, 12, 1) @ matrix(4, 1, 30),
    "ill conditioned": matrix(5, 12, 12) @ torch.diag(10.0 ** -torch.arange(12.0).double()) @ matrix(6, 12, 30),
    "orthogonal": torch.linalg.qr(matrix(7, 12, 12))[0],
    "one entry of many": torch.nn.functional.pad(torch.ones(1, 1), (0, 29, 0, 11)).double(),
    "one row": matrix(8, 1, 9),
    "one column": matrix(9, 9, 1),
    "huge": matrix(10, 12, 30) * 1e20,
    "tiny": matrix(11, 12, 30) * 1e-25,
    "huge beside tiny": torch.cat([matrix(12, 4, 20) * 1e18, matrix(13, 4, 20) * 1e-18]),
    "zero": torch.zeros(12, 30, dtype=torch.float64),
}


KERNELS = [(n, d) for n in NAMES for d in (torch.float32, torch.bfloat16) if d == torch.float32 or n not in REFUSED]


@pytest.mark.parametrize(("name", "dtype"), KERNELS)
def test_matrix_zoo(name, dtype):
    for kind, exact in ZOO.items():
        x = exact.float()
        before = x.clone()
        found = orthogonalize(x, name, dtype=dtype)
        assert torch.equal(x, before) and found.dtype == dtype and found.is_contiguous(), kind
        values = torch.linalg.svdvals(found.double())
        assert found.isfinite().all() and values.max() < 1.35, kind
        if kind == "zero":
            assert not found.any()
            continue
        scaled = exact / exact.abs().max()
        assert (found * scaled).sum() > 0.6 * scaled.norm(), kind  # a wrong sign would go uphill
        assert (values[torch.linalg.svdvals(scaled) > 0.02 * scaled.norm()] > 0.6).all(), kind
        if min(x.shape) == 1:
            assert values.max() == pytest.approx(1, abs=1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", NAMES)
def test_nan_spoils_its_own_matrix_only(name, value):
    x = matrix(0, 3, 4, 12, dtype=torch.float32)
    x[1, 2, 3] = value
    found = orthogonalize(x, name, dtype=torch.float32)
    assert found[1].isnan().all()
    assert torch.equal(found[::2], orthogonalize(x[::2], name, dtype=torch.float32))


@pytest.mark.parametrize(("name", "dtype"), KERNELS)
def test_small_matrices_keep_their_sign(name, dtype):
    """Rounding reversed some of these in bf16 before ``cubic5`` had a safety factor and ``cans`` was refused."""
    x = torch.cat([matrix(0, 2000, 2, 3), matrix(1, 2000, 2, 1) @ matrix(2, 2000, 1, 3)]).float()
    found = orthogonalize(x, name, dtype=dtype).float()
    assert ((found * x).sum((1, 2)) > 0.6 * x.norm(dim=(1, 2))).all()
    assert torch.linalg.matrix_norm(found, 2).max() < 1.35


@pytest.mark.parametrize(("name", "dtype"), KERNELS)
def test_results_do_not_depend_on_the_stack(name, dtype, monkeypatch):
    shapes = [(3, 40), (40, 3), (3, 40), (16, 16), (3, 40), (0, 4), (24, 100), (24, 100)]
    matrices = [matrix(i, *shape).float() for i, shape in enumerate(shapes)]
    together = orthogonalize_all(matrices, name, dtype=dtype)
    monkeypatch.setattr("optimizers.orthogonal.newton_schulz.STACK_BYTES", 1)
    alone = orthogonalize_all(matrices, name, dtype=dtype)
    for x, first, second in zip(matrices, together, alone, strict=True):
        assert first.is_contiguous() and first.dtype == dtype and torch.equal(first, second)
        assert torch.equal(first, orthogonalize(x, name, dtype=dtype))
        assert torch.equal(first, orthogonalize(x.T.contiguous().T[None, None], name, dtype=dtype)[0, 0])
