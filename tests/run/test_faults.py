"""Which steps update the weights: spikes by the last steps alone, an end to skipping, counters."""

import math

import numpy as np
import pytest

from dit_train.checkpoint.manifest import RunState
from dit_train.config import FaultsConfig
from dit_train.run import faults

SETTINGS = FaultsConfig(spike_sigmas=6.0, window=32)


def steps(state, losses, norm=1.0, settings=SETTINGS):
    return [faults.judge(state, settings, loss, norm) for loss in losses]


def noise(count, level=1.0, seed=0):
    return (level + 0.02 * np.random.default_rng(seed).standard_normal(count)).tolist()


def test_noise_is_sound_and_a_spike_of_either_number_is_not():
    state = RunState()
    assert set(steps(state, noise(200))) == {"sound"}
    assert faults.judge(state, SETTINGS, 1.5, 1.0) == "spike"
    assert faults.judge(state, SETTINGS, 1.0, 1.5) == "spike"
    assert faults.judge(state, SETTINGS, 0.1, 0.1) == "sound"  # downward
    assert (state.spikes, state.skipped, state.bad_in_a_row) == (2, 0, 0)


def test_nothing_is_a_spike_before_half_the_window_or_when_switched_off():
    assert set(steps(RunState(), [*noise(15), 100.0])) == {"sound"}
    assert steps(RunState(), [*noise(16), 100.0])[-1] == "spike"
    off = FaultsConfig(spike_sigmas=None)
    state = RunState()
    assert set(steps(state, [*noise(200), 1e9], settings=off)) == {"sound"} and not state.recent


def test_numbers_that_are_not_finite_are_counted_apart_and_not_remembered():
    state = RunState()
    steps(state, noise(40))
    before = state.recent
    for loss, norm in ((math.nan, 1.0), (1.0, math.inf), (math.inf, math.nan)):
        assert faults.judge(state, SETTINGS, loss, norm) == "not finite"
    assert (state.skipped, state.spikes, state.bad_in_a_row) == (3, 0, 3) and state.recent == before


def test_spikes_and_numbers_that_are_not_finite_count_together_until_a_step_is_sound():
    state = RunState()
    steps(state, noise(40))
    counts = []
    for loss in (9.0, 9.0, math.nan, 9.0, 1.0, 9.0):
        faults.judge(state, SETTINGS, loss, 1.0)
        counts.append(state.bad_in_a_row)
    assert counts == [1, 2, 3, 4, 0, 1]


@pytest.mark.parametrize("level", [1.5, 2.0])
def test_a_level_that_stays_up_is_sound_again_before_the_run_is_ended(level):
    state = RunState()
    steps(state, noise(200))
    verdicts = steps(state, noise(200, level, seed=1))
    assert verdicts[0] == "spike" and verdicts[-1] == "sound"
    assert verdicts.count("spike") < FaultsConfig().stop_after


def test_a_loss_that_hardly_varies_makes_no_spike_of_a_ripple():
    assert set(steps(RunState(), [1.0] * 60 + [1.01, 1.02])) == {"sound"}


def test_the_same_window_gives_the_same_verdict_whatever_came_before():
    old, new = RunState(), RunState()
    steps(old, [*noise(500, 7.0), *noise(32, seed=2)])
    new.recent = [list(pair) for pair in old.recent]
    assert len(old.recent) == 32
    for loss in np.linspace(0.9, 1.5, 50).tolist():
        assert faults.judge(old, SETTINGS, loss, 1.0) == faults.judge(new, SETTINGS, loss, 1.0)
        assert old.recent == new.recent


def test_what_was_remembered_is_never_changed_in_place():
    state = RunState()
    steps(state, noise(40))
    kept, copy = state.recent, list(state.recent)
    steps(state, noise(3))
    assert kept == copy
