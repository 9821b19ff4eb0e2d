"""The rule that a period is chosen by, for whatever times, modelled or measured."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dit_train.planning.period import PERIODS, StepTimes, choose, overhead, smallest_period

seconds = st.floats(1e-6, 1e3)
all_times = st.builds(StepTimes, seconds, seconds, seconds, seconds, seconds)
budgets = st.floats(1e-3, 10)
checked = settings(derandomize=True, deadline=None, max_examples=500)


@checked
@given(all_times, budgets, st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 1e3)), min_size=1, max_size=6))
def test_a_slower_link_never_gives_a_smaller_period(times, budget, delays):
    """What a link slows down: the exchange of a refresh, and the passes of the model, each by any amount."""
    before = choose(times, budget)
    for of_refresh, of_model in delays:
        times = dataclasses.replace(times, refresh=times.refresh + of_refresh, waiting=times.waiting + of_model)
        now = choose(times, budget)
        assert now[0] >= before[0] and now[1] <= before[1]
        before = now


@checked
@given(all_times, st.floats(1e6, 1e12), st.lists(st.floats(1e6, 1e12), min_size=2, max_size=6), budgets)
def test_nor_does_a_smaller_bandwidth(times, sent, bandwidths, budget):
    def linked(bandwidth):
        of_model = max(0.0, 3 * sent / bandwidth - times.computing)  # as far as it hides behind nothing
        return dataclasses.replace(times, refresh=times.refresh + sent / bandwidth, waiting=of_model)

    periods = [choose(linked(bandwidth), budget)[0] for bandwidth in sorted(bandwidths, reverse=True)]
    assert periods == sorted(periods)


@checked
@given(all_times, budgets)
def test_it_is_the_smallest_within_the_budget_and_its_step_is_no_longer_than_that_allows(times, budget):
    period, fits = choose(times, budget)
    within = [overhead(times, p).against_hidden <= budget for p in PERIODS]
    assert fits == any(within) and period == (within.index(True) + 1 if fits else 64)
    assert smallest_period(times, budget) == (period if fits else None)
    one = overhead(times, period)
    adamw = times.computing + times.waiting + times.adamw
    steps = [times.refresh, *[times.between] * (period - 1)]
    mean = math.fsum(steps) / period + times.computing + times.waiting
    assert one.step_seconds == pytest.approx(mean) and one.against_adamw == pytest.approx(mean / adamw - 1, abs=1e-9)
    if fits:  # also of AdamW's step with its waiting
        assert one.against_adamw <= budget * (1 + 1e-9)


@pytest.mark.parametrize(
    ("refresh", "between", "expected"),
    [(1.5, 1.0, (1, True)), (2.0, 1.0, (1, True)), (2.1, 1.0, (2, True)), (11, 1.0, (10, True)), (99, 1, (64, False))],
)
def test_worked_examples(refresh, between, expected):
    # AdamW's step takes 10 s without links, so 10 % are a second
    assert choose(StepTimes(9, 90, 1, between, refresh), 0.1) == expected


def test_an_optimizer_that_is_always_too_slow_gets_the_longest():
    assert choose(StepTimes(9, 0, 1, 3, 3), 0.1) == (64, False)
