"""The cheap parts of a step, done in slices, against their plain formulas, whatever the slices."""

import math

import pytest
import torch
from torch import nn

from optimizers import PeriodicRowMuon
from optimizers.engine import scratch
from optimizers.engine.momentum import advance_in, update_momentum

SHAPES = [(5, 7), (64, 33), (1, 40), (3, 4, 7), (2, 3, 3, 2), (300, 33)]


def parameters(seed=0, shapes=SHAPES, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_gradients(params, seed, scale=1.0):
    for p, g in zip(params, parameters(seed, [p.shape for p in params]), strict=True):
        p.grad = (g.detach() * scale).to(p.dtype)


def rows_only(params, **options):
    return PeriodicRowMuon(params, **{"period": math.inf, "lr": 0.02, **options})


def run(params, steps=3, **options):
    optimizer = rows_only(params, **options)
    optimizer.param_groups[0]["step"] = 1  # past the first refresh, were there one
    for step in range(steps):
        give_gradients(params, step + 1)
        optimizer.step()
    return [p.detach() for p in params]


def plain(params, steps=3, mu=0.95, lr=0.02, decay=0.1, nesterov=True, form="ema"):
    """The published formula in fp64, a matrix at a time."""
    weights = [p.detach().double().reshape(-1, p.shape[-1] if p.ndim == 3 else p[0].numel()) for p in params]
    buffers = [torch.zeros_like(w) for w in weights]
    for step in range(steps):
        give_gradients(params, step + 1)
        for p, w, m in zip(params, weights, buffers, strict=True):
            g, keep = p.grad.double().reshape(w.shape), 1 - mu if form == "ema" else 1.0
            m.mul_(mu).add_(g, alpha=keep)
            u = keep * g + mu * m if nesterov else m
            rms = 0.2 * math.sqrt(w.shape[1])
            w.mul_(1 - lr * decay).sub_(lr * rms * u / u.norm(dim=1, keepdim=True))
    return [w.view(p.shape) for w, p in zip(weights, params, strict=True)]


@pytest.mark.parametrize("form", ["ema", "heavy_ball"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_the_row_step_follows_its_formula(form, nesterov):
    found = run(parameters(), momentum_form=form, nesterov=nesterov)
    for w, expected in zip(found, plain(parameters(), form=form, nesterov=nesterov), strict=True):
        assert (w - expected).abs().max() < 1e-6


@pytest.mark.parametrize("lr", [0.02, torch.tensor(0.02)])
@pytest.mark.parametrize("size", [1, 200, 1000])
def test_slices_change_no_bit(size, lr, monkeypatch):
    whole = run(parameters(), lr=lr)
    monkeypatch.setattr(scratch, "CACHE_BYTES", size)
    assert all(map(torch.equal, whole, run(parameters(), lr=lr)))


def test_rows_of_any_magnitude_and_their_neighbours_do_not_disturb_each_other():
    """Squares of 1e20 overflow in fp32, those of 1e-25 vanish; an ordinary row beside them keeps its bits."""
    scales = torch.tensor([1.0, 1e20, 1e-25, 0.0, 1e-15, 1e18, 1.0]).unsqueeze(1)
    alone, together = parameters(shapes=[(7, 64)]), parameters(shapes=[(7, 64)])
    give_gradients(alone, 1)
    give_gradients(together, 1, scales)
    for params in (alone, together):
        params[0].data.zero_()
        rows_only(params).step()
    norms = together[0].detach().norm(dim=1) / (0.02 * 0.2 * 8)
    assert torch.allclose(norms, (scales[:, 0] > 0).float(), atol=1e-6)
    for row in (0, 6):
        assert torch.equal(alone[0][row], together[0][row])
    assert (alone[0] - together[0])[scales[:, 0] > 0].abs().max() < 1e-6


def test_a_zero_row_stays_zero_at_a_large_learning_rate():
    """The reciprocal of the smallest norm, times a step of more than 4, is no number of fp32."""
    params = parameters(shapes=[(3, 1024)])
    before = params[0].detach().clone()
    params[0].grad = torch.zeros(3, 1024)
    params[0].grad[1] = 1.0
    rows_only(params, lr=1.0, weight_decay=0.0).step()
    assert torch.equal(params[0][[0, 2]], before[[0, 2]])
    assert torch.allclose(before[1] - params[0][1], torch.tensor(0.2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_and_strides_take_the_same_step(dtype):
    params = parameters(dtype=dtype)
    expected = plain(params)
    for w, e in zip(run(parameters(dtype=dtype)), expected, strict=True):
        assert (w - e).abs().max() < (0.05 if dtype == torch.bfloat16 else 1e-12)
    turned = [p if p.ndim > 3 else nn.Parameter(p.detach().mT.contiguous().mT) for p in parameters(dtype=dtype)]
    assert all(map(torch.equal, run(turned), run(parameters(dtype=dtype))))


def test_a_missing_gradient_counts_as_zero():
    one, other = parameters(), parameters()
    for params, missing in ((one, True), (other, False)):
        optimizer = rows_only(params)
        for step in range(3):
            give_gradients(params, step + 1)
            params[1].grad = None if missing and step == 1 else params[1].grad * (step != 1)
            optimizer.step()
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("ahead", [0.95, None])
def test_inputs_of_a_refresh_exist_in_the_wire_dtype_alone(ahead, monkeypatch):
    """The fp32 form of U was twice what travels; rounding it slice by slice changes no bit."""
    buffers, gradients = ([p.detach() for p in parameters(seed)[:4]] for seed in (1, 2))
    expected_buffers = [m.clone() for m in buffers]
    expected = update_momentum(expected_buffers, gradients, 0.95, ahead, "ema")
    held = []

    def advance(m, g, out):
        held.append(sum(u.nbytes for u in out))
        update_momentum(m, g, 0.95, ahead, "ema", out)

    monkeypatch.setattr(scratch, "CACHE_BYTES", 1000)
    found = [torch.empty(m.shape, dtype=torch.bfloat16) for m in buffers[1:]]
    advance_in([None, *found], buffers, gradients, advance)  # of the first, the momentum alone is wanted
    assert max(held) <= 1000
    assert all(map(torch.equal, found, [u.bfloat16() for u in expected[1:]]))
    assert all(map(torch.equal, buffers, expected_buffers))


def test_inputs_in_the_dtype_of_the_momentum_need_no_scratch(monkeypatch):
    buffers, gradients = ([p.detach() for p in parameters(seed)[:4]] for seed in (1, 2))
    expected = update_momentum([m.clone() for m in buffers], gradients, 0.95, 0.95, "ema")
    found = [torch.empty_like(m) for m in buffers]
    monkeypatch.setattr(scratch.Scratch, "take", None)
    advance_in(found, buffers, gradients, lambda m, g, out: update_momentum(m, g, 0.95, 0.95, "ema", out))
    assert all(map(torch.equal, found, expected))
