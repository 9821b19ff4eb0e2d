"""Periods and ratios that change from step to step."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from optimizers import MuonBP, PeriodicRowMuon, PeriodicSignMuon
from optimizers.engine.scaling import spectral_scale
from optimizers.engine.schedule import held, interpolated, stagger_offsets
from tests.optimizers.golden import four_steps, gradient, initial_weight


def rms_of_steps(cls, steps, optimizer=None, start=0, **options):
    """RMS of each step over lr, and the optimizer."""
    w = nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))
    optimizer = optimizer or cls([w], lr=0.1, weight_decay=0.0, **options)
    (w,) = optimizer.param_groups[0]["params"]
    found = []
    for t in range(start, start + steps):
        before, w.grad = w.detach().clone(), gradient(t + 1)
        optimizer.step()
        found.append((w.detach() - before).square().mean().sqrt().item() / 0.1)
    return found, optimizer


def test_a_period_holds_until_the_next_step_of_its_schedule():
    schedule = ((0, 1), (3, 2), (6, math.inf))
    assert [held(schedule, t) for t in range(8)] == [1, 1, 1, 2, 2, 2, math.inf, math.inf]
    found, _ = rms_of_steps(PeriodicRowMuon, 8, period=schedule, row_lr_ratio=0.0)
    assert [rms > 0 for rms in found] == [True, True, True, False, True, False, False, False]


def test_a_ratio_moves_linearly_and_keeps_its_last_value():
    schedule = ((0, 1.0), (4, 0.0), (6, 0.5))
    assert [interpolated(schedule, t) for t in range(8)] == [1, 0.75, 0.5, 0.25, 0, 0.25, 0.5, 0.5]
    options = {"period": math.inf}
    found, _ = rms_of_steps(PeriodicRowMuon, 8, row_lr_ratio=schedule, **options)
    whole, _ = rms_of_steps(PeriodicRowMuon, 8, **options)
    assert [a / b for a, b in zip(found, whole, strict=True)] == pytest.approx([1, 0.75, 0.5, 0.25, 0, 0.25, 0.5, 0.5])
    for cls, ratio in ((MuonBP, "block_lr_ratio"), (PeriodicSignMuon, "sign_lr_ratio")):
        found, _ = rms_of_steps(cls, 5, **options, **{ratio: schedule})
        whole, _ = rms_of_steps(cls, 5, **options, **{ratio: 1.0})
        assert [a / b for a, b in zip(found, whole, strict=True)] == pytest.approx([1, 0.75, 0.5, 0.25, 0])


def test_a_schedule_goes_on_where_a_checkpoint_was():
    options = {"period": [[0, 2], [4, 3]], "row_lr_ratio": [[0, 1], [10, 0.1]]}
    whole, _ = rms_of_steps(PeriodicRowMuon, 8, **options)
    first, optimizer = rms_of_steps(PeriodicRowMuon, 3, **options)
    _, other = rms_of_steps(PeriodicRowMuon, 0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    rest, _ = rms_of_steps(PeriodicRowMuon, 5, other, start=3)
    assert first + rest == pytest.approx(whole, abs=1e-14)


def test_one_value_from_step_0_is_that_number():
    assert torch.equal(four_steps(MuonBP, period=((0, 3),), block_lr_ratio=((0, 0.5),)),
                       four_steps(MuonBP, period=3, block_lr_ratio=0.5))  # fmt: skip


def test_a_period_that_never_ends_is_dealt_at_once():
    assert stagger_offsets([1, 3, 2], 10**15) == stagger_offsets([1, 3, 2], 3) == [2, 0, 1]


def test_staggered_matrices_refresh_once_in_every_period_of_a_schedule():
    assert stagger_offsets([1, 1, 1, 1], ((0, 2), (8, 4))) == stagger_offsets([1, 1, 1, 1], 4)
    params = [nn.Parameter(initial_weight()) for _ in range(4)]
    optimizer = PeriodicRowMuon(params, period=((0, 2), (8, 4)), stagger=True, row_lr_ratio=0.0, weight_decay=0.0)
    refreshed = []
    for t in range(16):
        before = [p.detach().clone() for p in params]
        for p in params:
            p.grad = gradient(t + 1)
        optimizer.step()
        refreshed.append([not torch.equal(p.detach(), b) for p, b in zip(params, before, strict=True)])
    for start, period in ((0, 2), (2, 2), (4, 2), (6, 2), (8, 4), (12, 4)):
        assert [sum(column) for column in zip(*refreshed[start : start + period], strict=True)] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "value", [(), ((1, 2),), ((0, 2), (0, 3)), ((0, 2), (5, 0)), ((0, 2), (3.5, 3)), ((0, 2, 1),), "auto"]
)
def test_what_is_no_schedule_is_refused(value):
    with pytest.raises(ValueError, match=r"group 0: period is .* has to be an int >= 1 or math.inf, or a schedule"):
        PeriodicRowMuon([nn.Parameter(initial_weight())], period=value)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 16), st.integers(1, 16))
def test_block_and_full_step_are_matched_within_the_theory_s_range(p, q, r, c):
    """arXiv 2510.16981: the ratio of the two learning rates lies in [1/√(rc), 1] under RMS matching."""
    ratio = spectral_scale("match_rms_adamw", p, q) / spectral_scale("match_rms_adamw", r * p, c * q)
    assert 1 / math.sqrt(r * c) - 1e-12 <= ratio <= 1 + 1e-12
