"""Low-rank steps and state per column: against a reference written out, at full rank, for low and for zero ranks."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from optimizers import Dion, census
from optimizers.engine.column_state import rank_of
from optimizers.engine.low_rank import independent, orthonormal
from tests.optimizers.golden import equal, gradient, initial_weight

F64 = torch.float64


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def basis(optimizer, w):
    return optimizer.state[w]["right_basis"]


def momentum(optimizer, w):
    return optimizer.state[w]["momentum_buffer"]


def stepped(w, optimizer, g):
    """How far a step of lr 1 without decay goes, and what it takes from M."""
    before, m = w.detach().clone(), momentum(optimizer, w) + g
    w.grad = g.clone()
    optimizer.step()
    return before - w.detach(), m - momentum(optimizer, w)


def alone(w, **options):
    return Dion([w], lr=1.0, **{"weight_decay": 0.0, **options})


def by_qr(w, m, q, g, options):
    """(W, M, Q) after a step, as published, of an m×n weight."""
    m = m + g
    p = torch.linalg.qr(m @ q)[0]
    r = m.T @ p
    q = r / r.norm(dim=0)
    scale = options["lr"] * math.sqrt(w.shape[0] / w.shape[1])
    w = w * (1 - options["lr"] * options["weight_decay"]) - scale * p @ q.T
    return w, m - (1 - options["momentum"]) * p @ r.T, q


@pytest.mark.parametrize("shape", [(12, 7), (7, 12), (9, 9)])
@pytest.mark.parametrize("fraction", [0.3, 1.0])
def test_steps_are_the_published_ones(shape, fraction):
    options = {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.9}
    w = nn.Parameter(draw(*shape))
    optimizer = Dion([w], rank_fraction=fraction, **options)
    state = (w.detach().clone(), torch.zeros(shape, dtype=F64), basis(optimizer, w).clone())
    for t in range(1, 5):
        w.grad = draw(*shape, seed=t)
        state = by_qr(*state, w.grad, options)
        optimizer.step()
    sign = (basis(optimizer, w) * state[2]).sum(0).sign()  # that of a column of P and of Q is free
    found = w.detach(), momentum(optimizer, w), basis(optimizer, w) * sign
    for one, expected in zip(found, state, strict=True):
        assert_close(one, expected, atol=1e-10, rtol=0)


def test_full_rank_steps_have_orthonormal_left_factors_and_right_ones_of_unit_norm():
    w = nn.Parameter(draw(8, 12))
    optimizer = alone(w)
    step, used = stepped(w, optimizer, draw(8, 12, seed=1))
    q = basis(optimizer, w)
    assert_close(q.norm(dim=0), torch.ones(8, dtype=F64))
    assert (q.T @ q - torch.eye(8, dtype=F64)).abs().max() > 0.05  # not orthogonal, unlike Muon's direction
    p = step @ torch.linalg.pinv(q.T) / math.sqrt(8 / 12)
    assert_close(p.T @ p, torch.eye(8, dtype=F64), atol=1e-10, rtol=0)
    assert_close(used, 0.05 * draw(8, 12, seed=1))  # P·Pᵀ = 1: all of M is used
    many = [stepped(w, optimizer, torch.zeros(8, 12, dtype=F64))[0] for _ in range(60)][-1]
    singular = torch.linalg.svdvals(many) / math.sqrt(8 / 12)
    assert_close(
        singular, torch.ones(8, dtype=F64), atol=1e-2, rtol=0
    )  # power iterations of one matrix: its polar factor


def test_a_momentum_of_rank_r_is_used_whole_and_of_more_in_part():
    g = draw(20, 3, seed=1) @ draw(3, 16, seed=2)
    w = nn.Parameter(torch.zeros(20, 16, dtype=F64))
    optimizer = alone(w, rank_fraction=3 / 16)
    step, used = stepped(w, optimizer, g)
    assert basis(optimizer, w).shape == (16, 3)
    assert_close(used, 0.05 * g) and torch.linalg.matrix_rank(step) == 3
    other = alone(nn.Parameter(torch.zeros(20, 16, dtype=F64)), rank_fraction=2 / 16)
    (v,) = other.param_groups[0]["params"]
    _, used = stepped(v, other, g)
    assert torch.linalg.matrix_rank(used) == 2
    left = momentum(other, v)
    assert torch.linalg.matrix_rank(left) == 3  # error feedback
    p = torch.linalg.svd(used)[0][:, 2:]
    assert_close(p.T @ left, p.T @ g)  # what was not used is there as it was


def test_what_was_not_used_accumulates_until_it_is():
    """Two directions, of which a rank of 1 can take but one at a time."""
    strong, weak = draw(6, 1, seed=1) @ draw(1, 6, seed=2), draw(6, 1, seed=3) @ draw(1, 6, seed=4)
    g = strong / strong.norm() + 0.1 * weak / weak.norm()
    w = nn.Parameter(torch.zeros(6, 6, dtype=F64))
    optimizer = alone(w, rank_fraction=0.1, momentum=0.5)
    for _ in range(200):
        step, _ = stepped(w, optimizer, g)
    taken = torch.linalg.svdvals(w.detach())
    assert torch.linalg.matrix_rank(step, rtol=1e-6) == 1 and taken[1] > 0.05 * taken[0] and taken[2] < 1e-9
    assert momentum(optimizer, w).norm() < 4  # bounded, as what is used goes


@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16])
def test_zero_gradients_change_nothing_and_a_later_one_finds_a_basis(dtype):
    w = nn.Parameter(draw(10, 6).to(dtype))
    optimizer = alone(w, rank_fraction=0.5)
    first = basis(optimizer, w).clone()
    for g in (None, torch.zeros(10, 6, dtype=dtype)):
        before, w.grad = w.detach().clone(), g
        optimizer.step()
        assert equal(basis(optimizer, w), first) and equal(w.detach(), before)
    step, _ = stepped(w, optimizer, draw(10, 6).to(dtype))
    assert step.isfinite().all() and step.norm() > 1 and not equal(basis(optimizer, w), first)


def test_columns_that_depend_on_others_are_left_out_and_keep_their_basis():
    for dtype in (torch.float32, F64):
        w = nn.Parameter(torch.zeros(12, 8, dtype=dtype))
        optimizer = alone(w, rank_fraction=1.0)
        first = basis(optimizer, w).clone()
        for t in range(3):
            step, _ = stepped(w, optimizer, (draw(12, 2, seed=5) @ draw(2, 8, seed=6 + t // 9)).to(dtype))
            singular = torch.linalg.svdvals(step.double()) / math.sqrt(12 / 8)
            assert singular[2] < 1e-4 and singular[0] < 1.5 and singular[1] > 0.1
        assert equal(basis(optimizer, w)[:, 2:], first[:, 2:])
        assert_close(basis(optimizer, w)[:, :2].norm(dim=0), torch.ones(2, dtype=dtype))


@pytest.mark.parametrize("scale", [1e20, 1e-25])
def test_steps_do_not_depend_on_the_size_of_gradients(scale):
    found = []
    for factor in (1.0, scale):
        w = nn.Parameter(torch.zeros(10, 6))
        optimizer = alone(w, rank_fraction=0.5)
        for t in range(3):
            stepped(w, optimizer, factor * draw(10, 6, seed=t).float())
        found.append(w.detach())
    assert_close(*found, atol=1e-5, rtol=0)


def test_products_are_of_full_precision_whatever_that_of_others(monkeypatch):
    seen, backend = [], torch.backends.mkldnn.matmul

    def watched(*args):
        seen.append(backend.fp32_precision)
        return independent(*args)

    monkeypatch.setattr("optimizers.engine.low_rank.independent", watched)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        w = nn.Parameter(draw(6, 4).float())
        stepped(w, alone(w), draw(6, 4, seed=1).float())
        assert seen == ["ieee"] and backend.fp32_precision == "bf16"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_nan_shows():
    w = nn.Parameter(draw(6, 4).float())
    optimizer = alone(w)
    stepped(w, optimizer, torch.full((6, 4), math.nan))
    assert w.detach().isnan().any()


def twice(p):
    q = orthonormal(p, p.T @ p, independent(p.T @ p, F64))
    return orthonormal(q, q.T @ q, (q.T @ q).diagonal().sign())


def test_cholesky_qr_is_orthonormal_to_rounding_and_that_of_gram_schmidt():
    p = draw(50, 6) @ torch.diag(torch.logspace(0, -5, 6, dtype=F64)) @ draw(6, 6, seed=1)
    q = twice(p)
    assert_close(q.T @ q, torch.eye(6, dtype=F64), atol=1e-14, rtol=0)
    expected, upper = torch.linalg.qr(p)
    assert_close(q, expected * upper.diagonal().sign(), atol=1e-8, rtol=0)


def test_a_zero_and_a_repeated_column_become_zero_and_the_others_are_orthonormal():
    p = draw(30, 7)
    p[:, 1], p[:, 3], p[:, 5] = 0, p[:, 0] + 1e-9 * p[:, 4], p[:, 2] - p[:, 0]
    q = twice(p)
    kept = [0, 2, 4, 6]
    assert not q[:, [1, 3, 5]].any()
    assert_close(q[:, kept].T @ q[:, kept], torch.eye(4, dtype=F64), atol=1e-13, rtol=0)


@pytest.mark.parametrize(
    ("fraction", "multiple", "shape", "rank"),
    [
        (1.0, 1, (6, 4), 4),
        (0.25, 1, (64, 100), 16),
        (0.1, 1, (30, 40), 3),
        (0.1, 8, (30, 40), 8),
        (0.9, 8, (30, 40), 30),
        (0.01, 1, (3, 5), 1),
    ],
)
def test_ranks(fraction, multiple, shape, rank):
    assert rank_of({"rank_fraction": fraction, "rank_multiple": multiple}, *shape) == rank


@pytest.mark.parametrize(
    ("shape", "split", "expected"),
    [
        ((8, 6), None, (6, 6)),
        ((3, 8, 6), None, (3, 6, 6)),
        ((8, 3, 2, 2), None, (3, 4, 8)),
        ((8, 6), (2,), (2, 6, 4)),
        ((8, 6), ("interleaved", 4), (4, 6, 2)),
        ((8, 6), (5, 2, 1), (3, 6, 5)),
        ((2, 8, 6), (2,), (2, 2, 6, 4)),
        ((8, 3, 2, 2), (4,), (4, 3, 4, 2)),
    ],
)
def test_logical_matrices_take_the_steps_of_matrices_of_their_own(shape, split, expected):
    w = nn.Parameter(draw(*shape))
    optimizer = Dion([{"params": [w], "matrix_splits": [split]}], lr=1.0)
    assert basis(optimizer, w).shape == expected
    (job,) = optimizer._jobs
    (layout,) = job.layouts
    bases = basis(optimizer, w).reshape(len(layout.matrices), -1, expected[-1])
    parts = [nn.Parameter(v.clone()) for v in layout.views(layout.select(w.detach()))]
    other = Dion(parts, lr=1.0)
    for part, q in zip(parts, bases, strict=True):
        other.state[part]["right_basis"].copy_(q[:, : min(part.shape)])
    for t in range(3):
        w.grad = draw(*shape, seed=t)
        for part, g in zip(parts, layout.views(layout.select(w.grad)), strict=True):
            part.grad = g.clone()
        optimizer.step()
        other.step()
    for found, part in zip(layout.views(layout.select(w.detach())), parts, strict=True):
        assert_close(found, part.detach(), atol=1e-12, rtol=0)


@pytest.mark.parametrize(("shape", "rank"), [((400, 300), 150), ((9, 9), 9), ((3, 5, 7), 3), ((6, 1), 1)])
def test_first_bases_are_orthonormal_and_differ_between_parameters(shape, rank):
    params = [nn.Parameter(torch.zeros(shape, dtype=F64)) for _ in range(2)]
    optimizer = Dion(params, rank_fraction=0.5 if rank == 150 else 0.6 if len(shape) == 3 else 1.0)
    first, second = (basis(optimizer, p) for p in params)
    assert first.shape == (*shape[:-2], shape[-1], rank)
    eye = torch.eye(rank, dtype=F64).expand(*shape[:-2], rank, rank)
    assert_close(first.mT @ first, eye, atol=1e-12, rtol=0)
    if rank > 1:
        assert not torch.equal(first, second)
        assert len(shape) == 2 or not torch.equal(first[0], first[1])
    if rank == 150:
        assert (first.T @ second).abs().max() < 0.4 and first.abs().max() < 0.1


@pytest.mark.parametrize("shape", [(24, 10), (2, 12, 10), (6, 3, 2, 2)])
def test_the_plan_knows_the_products(shape):
    w = nn.Parameter(draw(*shape).float())
    optimizer = Dion([w], rank_fraction=0.5)
    w.grad = draw(*shape).float()
    with census() as counted:
        optimizer.step()
    assert counted.flops == optimizer.plan.flops("other")[0] > 0
    assert "low-rank steps" in optimizer.plan.summary()


def test_more_waves_change_nothing(monkeypatch):
    found = []
    for limit in (2**28, 1):
        monkeypatch.setattr("optimizers.engine.low_rank.WAVE_BYTES", limit)
        params = [nn.Parameter(draw(*shape)) for shape in ((6, 4), (2, 5, 3), (4, 4))]
        optimizer = Dion(params)
        for t in range(2):
            for p in params:
                p.grad = draw(*p.shape, seed=t)
            optimizer.step()
        found.append([p.detach() for p in params])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_bf16_momentum_a_tensor_as_lr_and_mars_go_with_it():
    def trained(steps=10, **options):
        w = nn.Parameter(initial_weight().float())
        optimizer = Dion([w], **{"lr": 0.1, **options})
        for t in range(steps):
            w.grad = gradient(t).float()
            optimizer.step()
        return w.detach(), optimizer.state[w]

    plain, _ = trained()
    narrow, state = trained(momentum_dtype=torch.bfloat16)
    assert state["momentum_buffer"].dtype == torch.bfloat16 and 0 < (narrow - plain).norm() < 0.2 * plain.norm()
    assert_close(trained(lr=torch.tensor(0.1))[0], plain)
    assert_close(trained(mars_gamma=0.0)[0], plain, atol=0, rtol=0)
    assert (trained(mars_gamma=0.1)[0] - plain).norm() > 1e-3


def test_state_loads_and_goes_on_with_the_rank_that_was_saved():
    w, v = (nn.Parameter(draw(8, 6)) for _ in range(2))
    first, second = Dion([w], rank_fraction=0.5), Dion([v], rank_fraction=1.0)
    for t in range(4):
        if t == 2:
            v.data.copy_(w.detach())
            second.load_state_dict(first.state_dict())
            assert basis(second, v).shape == (6, 3)
        for p, optimizer in ((w, first), (v, second)):
            p.grad = draw(8, 6, seed=t)
            optimizer.step()
    assert torch.equal(w, v)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"rank_fraction": 0.0}, "rank_fraction is 0.0 but has to be a float in"),
        ({"rank_multiple": 0}, "rank_multiple is 0 but has to be an int >= 1"),
        ({"nesterov": True}, "unknown key 'nesterov' for algorithm 'dion'"),
        ({"matrix_splits": [(3,)]}, "asks for 3 equal parts, but there are 8 rows"),
        ({"matrix_splits": []}, "matrix_splits has to name a split or None for each of its 1 parameters"),
    ],
)
def test_bad_input_gets_one_line(group, message):
    with pytest.raises(ValueError, match=message) as error:
        Dion([{"params": [nn.Parameter(draw(8, 6))], **group}])
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="a 1-D parameter is no matrix"):
        Dion([nn.Parameter(draw(8))])
