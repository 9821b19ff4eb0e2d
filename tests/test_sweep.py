"""The grid of learning rates grows until the best one lies inside it."""

import json
import math
import re
import sys
from pathlib import Path

import pytest

from tests.docstrings import keys
from tests.test_compare import write_run

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


LOSSES = {0.005: 0.3, 0.01: 0.25, 0.02: math.inf}


@pytest.fixture
def trained(monkeypatch):
    """Training is left out: a run's folder is there at once."""

    def run(self, optimizer, lr):
        write_run(self.folder(optimizer, lr), Path(optimizer).stem, [9.0, 7.0])
        return LOSSES[lr]

    monkeypatch.setattr(sweep.Sweep, "run", run)
    words = ["configs/quickstart/base.yaml", "--start", "0.01", "--jobs", "1"]
    return [*words, "--optimizer", "configs/optimizers/muon.yaml"]


def test_the_numbers_are_written_as_the_docstring_says(trained, tmp_path):
    found = tmp_path / "numbers" / "found.json"
    assert sweep.main([*trained, "--out", str(tmp_path), "--json", str(found)]) == 0
    written = json.loads(found.read_text(), parse_constant=pytest.fail)
    assert written.keys() == set(re.findall(r"(\w+):", sweep.__doc__.partition("FILE holds")[2]))
    (name,) = written["losses"]
    assert name == "configs/optimizers/muon.yaml"
    assert {float(lr): loss for lr, loss in written["losses"][name].items()} == LOSSES | {0.02: None}
    assert written["runs"][name].keys() == keys(sweep.compare.__doc__, "by run folder:")
    assert written["runs"][name]["score"]["value"] == 7.0
    assert "**0.2500**" in (tmp_path / "sweep.md").read_text()


@pytest.mark.parametrize("broken", ["floor", "place"])
def test_runs_or_a_place_that_do_not_fit_are_one_line(trained, tmp_path, capsys, monkeypatch, broken):
    if broken == "place":
        (tmp_path / "comparison.png").mkdir()
    else:
        monkeypatch.setitem(sweep.compare._NUMBERS, "score", ("floor_of_another_version",))
    assert sweep.main([*trained, "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sweep.py: ") and {"place": "comparison.png", "floor": "no floor_of"}[broken] in line
