"""The learning rate over steps."""

import pytest

from dit_train.config import ScheduleConfig
from dit_train.run.schedule import factor


def test_warm_up_starts_above_zero_and_reaches_one():
    config = ScheduleConfig("cosine", warmup_steps=4)
    assert [factor(config, step, 100) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_cosine_falls_to_the_final_fraction_at_the_last_step():
    config = ScheduleConfig("cosine", warmup_steps=10, final_fraction=0.1)
    values = [factor(config, step, 100) for step in range(10, 100)]
    assert values == sorted(values, reverse=True)
    assert values[0] == 1 and values[-1] == pytest.approx(0.1)
    assert factor(config, 200, 100) == pytest.approx(0.1)


def test_constant_stays():
    assert {factor(ScheduleConfig("constant", warmup_steps=2), step, 10) for step in range(2, 50)} == {1.0}


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_run_shorter_than_its_warm_up(steps):
    config = ScheduleConfig("cosine", warmup_steps=3)
    assert all(0 < factor(config, step, steps) <= 1 for step in range(steps))


def test_no_warm_up():
    assert factor(ScheduleConfig("cosine", warmup_steps=0), 0, 10) == 1
