"""Every kind of step with every storage of its momentum, even neurons and MARS, against one rule with all of it."""

import itertools
import math

import pytest
import torch
from torch import nn

from optimizers import Muon, MuonBP, PeriodicRowMuon
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
FEATURES = {"neuron_beta2": 0.9, "mars_gamma": 0.1}


def draw(seed, scale=1.0):
    rows = torch.logspace(0, -1, ROWS, dtype=F64)[:, None]
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed), dtype=F64) * rows * scale


def gradients():
    """Of norms below and above 1, where MARS clips."""
    return [draw(t, 10.0 ** (t - 3)) for t in range(1, 5)]


def stored(m, dtype):
    if dtype not in CODES:
        return m.to(dtype).to(F64)
    q, absmax = torch.zeros(m.shape, dtype=CODES[dtype].dtype), torch.zeros(ROWS, 1)
    pack(m, q, absmax, CODES[dtype])
    return unpack(q, absmax, CODES[dtype], F64)


def with_less_variance(g, last, gamma):
    c = g + gamma * 0.95 / 0.05 * (g - last)
    return c / max(1.0, c.norm().item())


def even(o, v, beta2):
    v.mul_(beta2).add_(o.square().mean(1, keepdim=True), alpha=1 - beta2)
    o = o / (v.sqrt() + 1e-8)
    return o * math.sqrt(min(o.shape)) / o.norm()


def written_out(kind, offset, dtype, features):
    w, m, last, v = draw(0), torch.zeros(ROWS, COLUMNS, dtype=F64), 0.0, torch.zeros(ROWS, 1, dtype=F64)
    for t, g in enumerate(gradients()):
        c = with_less_variance(g, last, features["mars_gamma"]) if "mars_gamma" in features else g
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
                o = even(o, of_rows, features["neuron_beta2"]) if "neuron_beta2" in features else o
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


@pytest.mark.parametrize("chosen", [(), *itertools.combinations(FEATURES, 1), tuple(FEATURES)], ids="-".join)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_features_combine(kind, dtype, chosen):
    cls, options = KINDS[kind]
    features = {name: FEATURES[name] for name in chosen}
    found = taken(cls, {**options, **features, "momentum_dtype": dtype})
    offsets = (0, 1) if "staggered" in kind else (0, 0)
    expected = [written_out(kind, offset, dtype, features) for offset in offsets]
    errors = [
        max(((a - b).norm() / (b - draw(0)).norm()).item() for a, b in zip(order, expected, strict=True))
        for order in (found, found[::-1])  # which of two alike refreshes first is not said
    ]
    assert min(errors) < LIMITS[dtype], errors
