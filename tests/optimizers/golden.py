"""The four steps of the golden vectors."""

import torch
from torch import nn

from optimizers.engine import variance
from optimizers.engine.momentum import ahead_of, form_of, update_momentum
from optimizers.engine.rows import to_steps
from optimizers.orthogonal.coefficients import NS5
from optimizers.orthogonal.newton_schulz import orthogonalize


def gradient(t, dtype=torch.float64):
    return torch.tensor(
        [
            [(((7 * i + 13 * j + 5 * i * j + 3 * t * (i + 2 * j) + 11 * t) % 17) - 8) / 8 for j in range(6)]
            for i in range(4)
        ],
        dtype=dtype,
    )


def initial_weight():
    return torch.tensor([[(((3 * i + 5 * j) % 7) - 3) / 10 for j in range(6)] for i in range(4)], dtype=torch.float64)


def unit_rows(x):
    unit = x.clone()
    to_steps(unit, 1.0, -1.0)
    return unit


def ns5(x):
    return orthogonalize(x, NS5, 5, 1e-7, torch.float64)


def four_steps(cls, transposed=False, absolute_eps=None, **options):
    """The weight after four steps; ``absolute_eps``: of Newton–Schulz, whose own is relative to the largest entry."""
    turn = (lambda x: x.T.contiguous()) if transposed else (lambda x: x)
    w = nn.Parameter(turn(initial_weight()).clone())
    optimizer = cls([w], lr=0.1, **{"weight_decay": 0.1, **options})
    for t in range(1, 5):
        w.grad = turn(gradient(t))
        if absolute_eps is not None:
            optimizer.param_groups[0]["eps"] = absolute_eps / largest_input(w, optimizer)
        optimizer.step()
    return w.detach()


def largest_input(w, optimizer):
    """max |U| of the next step."""
    (group,), state = optimizer.param_groups, optimizer.state[w]
    g = w.grad
    if group["mars_gamma"]:
        g = variance.corrected(g, state["last_gradient"], group)
        g = g / max(1, g.norm().item())
    m = state["momentum_buffer"].clone()
    (u,) = update_momentum([m], [g], group["momentum"], ahead_of(group), form_of(group))
    return u.abs().max().item()


def summary(x):
    return [x.sum().item(), x.norm().item(), x[0, 0].item(), x[-1, -1].item()]


def equal(first, second, limit=0.0):
    return (first - second).abs().max() <= limit
