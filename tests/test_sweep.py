"""The grid of learning rates grows until the best one lies inside it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import sweep


def measured(loss):
    asked = []

    def measure(lrs):
        asked.extend(lrs)
        return [loss(lr) for lr in lrs]

    return measure, asked


@pytest.mark.parametrize("best", [0.25, 0.5, 1.0, 2.0, 16.0])
def test_the_best_is_never_at_the_edge_and_nothing_runs_twice(best):
    measure, asked = measured(lambda lr: abs(lr / best - 1) + (lr != best))
    found = sweep.grow(measure, 1.0, 2.0)
    assert min(found, key=found.get) == best
    assert min(found) < best < max(found)
    assert len(asked) == len(set(asked)) == len(found)


def test_a_diverged_run_is_an_edge_like_another():
    measure, _ = measured(lambda lr: float("inf") if lr > 1 else 1 / lr)
    assert list(sweep.grow(measure, 1.0, 2.0)) == [0.5, 1.0, 2.0]


def test_the_table_marks_the_best():
    text = sweep.loss_table({"configs/a.yaml": {1.0: 0.5, 2.0: 0.25, 4.0: 0.75}, "b.yaml": {2.0: 1.0}})
    assert text.splitlines()[2] == "| a | 0.5000 | **0.2500** | 0.7500 |"
    assert text.splitlines()[3] == "| b |  | **1.0000** |  |"
