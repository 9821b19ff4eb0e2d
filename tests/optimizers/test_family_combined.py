"""Every kind of step with every storage of its momentum, even neurons and MARS, against one rule with all of it."""

import math

import pytest
import torch
from torch import nn

from optimizers import AdamW8bit, Muon, Muon8bit, MuonBP, PeriodicRowMuon
from optimizers.engine.quantized_state import CODES, pack, unpack
from tests.optimizers.golden import ns5

F64 = torch.float64
ROWS, COLUMNS = 80, 64  # enough elements for 8 bits
KINDS = {
    "whole": (Muon, {}),
    "blocks": (MuonBP, {"period": 2, "block_grid": 2, "momentum_form": "ema"}),
    "rows": (PeriodicRowMuon, {"period": 2}),
    "blocks, staggered": (MuonBP, {"period": 2, "block_grid": 2, "momentum_form": "ema", "stagger": True}),
    "rows, staggered": (PeriodicRowMuon, {"period": 2, "stagger": True}),
}
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 1e-2, "int8": 1e-9, "dynamic8": 1e-9}
"""Largest error by storage, relative to how far the weights have gone; 16 bits also round inside a step."""
NEURONS = {"neuron_beta2": 0.9, "neuron_eps": 0.05}
MARS = {"mars_gamma": 0.1, "mars_clip": 0.5}
FEATURES = {"plain": {}, "neurons": NEURONS, "mars": MARS, "both": {**NEURONS, **MARS}}


def draw(seed, scale=1.0):
    rows = torch.logspace(0, -1, ROWS, dtype=F64)[:, None]
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed), dtype=F64) * rows * scale


def gradients():
    """Of norms below and above those that MARS clips."""
    return [draw(t, 10.0 ** (t - 3)) for t in range(1, 5)]


def stored(m, dtype):
    if dtype not in CODES:
        return m.to(dtype).to(F64)
    q, absmax = torch.zeros(m.shape, dtype=CODES[dtype].dtype), torch.zeros(len(m), 1)
    pack(m, q, absmax, CODES[dtype])
    return unpack(q, absmax, CODES[dtype], F64)


def with_less_variance(g, last, mars_gamma, mars_clip, **_):
    c = g + mars_gamma * 0.95 / 0.05 * (g - last)
    return c / max(1.0, c.norm().item() / mars_clip)


def even(o, v, neuron_beta2, neuron_eps, **_):
    v.mul_(neuron_beta2).add_(o.square().mean(1, keepdim=True), alpha=1 - neuron_beta2)
    o = o / (v.sqrt() + neuron_eps)
    return o * math.sqrt(min(o.shape)) / o.norm()


def written_out(kind, offset, dtype, features):
    w, m, last, v = draw(0), torch.zeros(ROWS, COLUMNS, dtype=F64), 0.0, torch.zeros(ROWS, 1, dtype=F64)
    for t, g in enumerate(gradients()):
        c = with_less_variance(g, last, **features) if "mars_gamma" in features else g
        m, last = 0.95 * m + 0.05 * c, g
        u = 0.05 * c + 0.95 * m
        w = w * (1 - 0.1 * 0.1)
        refresh = kind == "whole" or (t - offset) % 2 == 0
        if not refresh and kind.startswith("rows"):
            w = w - 0.1 * 0.2 * math.sqrt(COLUMNS) * u / u.norm(dim=1, keepdim=True)
        else:
            steps = []
            for x, of_rows in zip(*([u], [v]) if refresh else (u.chunk(2), v.chunk(2)), strict=True):
                o = ns5(x)
                o = even(o, of_rows, **features) if "neuron_beta2" in features else o
                steps.append(0.1 * 0.2 * math.sqrt(max(x.shape)) * o)
            w = w - torch.cat(steps)
        m = stored(m, dtype)
    return w


def taken(cls, options):
    weights = [nn.Parameter(draw(0)) for _ in range(2)]
    optimizer = cls(weights, lr=0.1, weight_decay=0.1, **options)
    for g in gradients():
        for w in weights:
            w.grad = g.clone()
        optimizer.step()
    return [w.detach() for w in weights]


@pytest.mark.parametrize("chosen", FEATURES)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_features_combine(kind, dtype, chosen):
    cls, options = KINDS[kind]
    features = FEATURES[chosen]
    found = taken(cls, {**options, **features, "momentum_dtype": dtype})
    offsets = (0, 1) if "staggered" in kind else (0, 0)
    expected = [written_out(kind, offset, dtype, features) for offset in offsets]
    errors = [
        max(((a - b).norm() / (b - draw(0)).norm()).item() for a, b in zip(order, expected, strict=True))
        for order in (found, found[::-1])  # which of two alike refreshes first is not said
    ]
    assert min(errors) < LIMITS[dtype], errors


def test_muon_of_8_bits_is_muon_that_keeps_its_momentum_so():
    for dtype in ("int8", "dynamic8"):
        expected = written_out("whole", 0, dtype, {})
        for w in taken(Muon8bit, {"momentum_dtype": dtype}):
            assert (w - expected).abs().max() < 1e-9


def test_adamw_of_8_bits_is_adamw_that_keeps_its_moments_so():
    w, m, v = draw(0), torch.zeros(ROWS, COLUMNS, dtype=F64), torch.zeros(ROWS, COLUMNS, dtype=F64)
    for t, g in enumerate(gradients(), 1):
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g.square()
        w = w * (1 - 0.1 * 0.1) - 0.1 * m / (1 - 0.9**t) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
        m, v = stored(m, "dynamic8"), stored(v, "dynamic8_unsigned")
    for found in taken(AdamW8bit, {}):
        assert (found - w).abs().max() < 1e-9
