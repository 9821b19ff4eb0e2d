"""The grid of learning rates grows until the best one lies inside it."""

import json
import math
import re
import sys
from pathlib import Path

import pytest

from tests.docstrings import keys
from tests.test_compare import write_run

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import sweep  # noqa: E402


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


def test_rates_that_differ_too_much_for_columns_stand_beside_their_losses():
    losses = {f"{i}.yaml": {lr * 1.5**i: 1.0 + (lr - 2) ** 2 for lr in (4, 1, 2)} for i in range(18)}
    lines = sweep.loss_table(losses).splitlines()
    assert lines[0] == "| optimizer | rate 1 | rate 2 | rate 3 |" and len(lines) == 20
    assert lines[2] == "| 0 | 1: 2.0000 | 2: **1.0000** | 4: 5.0000 |"
    losses["one.yaml"] = {3.0: math.inf}
    assert sweep.loss_table(losses).splitlines()[-1] == "| one | 3: **inf** |  |  |"


@pytest.mark.parametrize(
    "text", ["a.yaml=", "a.yaml=1,x", "a.yaml=1,-1", "a.yaml=1,1", "a.yaml=1,1.00001", "a.yaml=nan"]
)
def test_rates_that_are_none_are_one_line(text, tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        sweep.main(["configs/quickstart/base.yaml", "--optimizer", text, "--out", str(tmp_path)])
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.code == 2 and text in line and "FILE=LR,LR,..." in line


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["configs/optimizers/muon.yaml=1", "configs/optimizers/muon.yaml=2"], "muon.yaml stands twice; name it once"),
        (["configs/optimizers/muon.yaml", "configs/scale/muon.yaml"], "two files named muon would share a folder"),
    ],
)
def test_runs_of_two_optimizers_never_share_a_folder(files, said, tmp_path, capsys):
    words = [word for file in files for word in ("--optimizer", file)]
    assert sweep.main(["configs/quickstart/base.yaml", *words, "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and not list(tmp_path.iterdir())


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


def test_given_rates_are_those_that_are_trained(trained, tmp_path):
    words = [*trained[:-1], "configs/optimizers/sgd.yaml=0.005,0.01", "--optimizer", "configs/optimizers/lion.yaml"]
    assert sweep.main([*words, "--out", str(tmp_path), "--json", str(tmp_path / "found.json")]) == 0
    written = json.loads((tmp_path / "found.json").read_text())["losses"]
    assert [list(map(float, losses)) for losses in written.values()] == [[0.005, 0.01], [0.005, 0.01, 0.02]]
    assert sorted(path.name for path in (tmp_path / "sgd").iterdir()) == ["lr_0.005", "lr_0.01"]


@pytest.mark.parametrize("broken", ["floor", "place"])
def test_runs_or_a_place_that_do_not_fit_are_one_line(trained, tmp_path, capsys, monkeypatch, broken):
    if broken == "place":
        (tmp_path / "comparison.png").mkdir()
    else:
        monkeypatch.setitem(sweep.compare._NUMBERS, "score", ("floor_of_another_version",))
    assert sweep.main([*trained, "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sweep.py: ") and {"place": "comparison.png", "floor": "no floor_of"}[broken] in line


def test_the_comparison_of_the_family_has_every_config_and_so_has_its_table():
    """An optimizer that is added has to be compared as well."""
    files = {path.stem for path in (ROOT / "configs" / "optimizers").glob("*.yaml")}
    script = (ROOT / "scripts" / "family.sh").read_text().replace("\\\n", " ")
    named = [name for line in re.findall(r"^at \S+ (.*)$", script, re.MULTILINE) for name in line.split()]
    assert sorted(named) == sorted(files)
    table = (ROOT / "optimizers" / "README.md").read_text().split("| configs/optimizers/ |")[1].split("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)` ", table, re.MULTILINE)) == sorted(files)
