"""The comparison: right numbers in the table, and no table of what cannot be compared."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dit_train import overlays
from tests.docstrings import keys

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import compare as compare_script  # noqa: E402


def write_run(folder: Path, optimizer: str, values: list[float], **changed) -> Path:
    folder.mkdir(parents=True)
    steps = str(10 * len(values))
    config = overlays.to_dict(overlays.read([], ["--optimizer.name", optimizer, "--train.steps", steps]))
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    steps = [
        {"step": i + 1, "optimizer_ms": 8.0 if i % 3 == 0 else 2.0, "step_ms": 900 if i == 20 else 10.0}
        | {"wire_bytes": 3000 if i % 3 == 0 else 0}
        for i in range(30)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    common = {"metric": "FD-digits-cnn", "n_gen": 359, "floor": 3.5, "floor_kid": 0.0012, "kid": 0.5}
    rows = [
        {"step": 10 * i + 10, "kind": "score", "train_seconds": i, "value": value, "kid_standard_error": 0.01} | common
        for i, value in enumerate(values)
    ]
    rows = [row | changed for row in rows]
    rows.append({"step": 30, "kind": "held-out", "train_seconds": 3, "heldout_loss": 0.25, "heldout_count": 359})
    (folder / "scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def compare(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, "scripts/compare.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_table_and_pictures(tmp_path):
    runs = [
        write_run(tmp_path / "a", "adamw", [30.0, 12.5, 14.0]),
        write_run(tmp_path / "b", "periodic_row_muon", [20.0, 9.0, 8.0]),
    ]
    shown = compare(*runs, "--out", tmp_path / "out", "--json", tmp_path / "found.json")
    assert shown.returncode == 0, shown.stderr
    found = json.loads((tmp_path / "found.json").read_text())[str(runs[1])]
    assert found.keys() == keys(compare_script.__doc__, "by run folder:")
    assert (found["best"]["value"], found["heldout_loss"], found["optimizer_ms"]) == (8.0, 0.25, 4.0)
    assert (found["score"]["step"], found["wire_bytes"], found["lr"]) == (30, 1000, 0.001)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.stdout.splitlines() if "|" in line]
    assert lines[2] == ["adamw", "0.001", "12.5 at 20", "14.0", "0.50 ± 0.01", "0.2500", "2.0", "10.0", "1.0"]
    # every third step of 8 ms counts in the mean of a period, though no median would show it; one hiccup does not
    assert lines[3][0] == "periodic_row_muon (period 3)" and lines[3][2] == "8.0 at 30"
    assert lines[3][6:] == ["4.0", "10.0", "1.0"]
    assert lines[4][:5] == ["floor (real)", "", "3.5", "3.5", "0.00"]
    for name in ("comparison.png", "samples.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "changed", [{"n_gen": 100}, {"metric": "FID"}, {"guidance": 2.0}, {"weights_sha256": "0"}, {"sample_seed": 9}]
)
def test_scores_that_were_not_taken_alike_are_refused(tmp_path, changed):
    runs = [write_run(tmp_path / "a", "adamw", [3.0]), write_run(tmp_path / "b", "muon", [2.0], **changed)]
    shown = compare(*runs, "--out", tmp_path / "out")
    assert shown.returncode == 2 and next(iter(changed)) in shown.stderr
    assert not (tmp_path / "out").exists()


def test_another_batch_or_seed_is_refused(tmp_path):
    runs = [write_run(tmp_path / "a", "adamw", [3.0]), write_run(tmp_path / "b", "muon", [2.0])]
    config = yaml.safe_load((runs[1] / "config.yaml").read_text())
    config["train"]["seed"] = 5
    (runs[1] / "config.yaml").write_text(yaml.safe_dump(config))
    shown = compare(*runs, "--out", tmp_path / "out")
    assert shown.returncode == 2 and "train.seed 0 but" in shown.stderr


def test_runs_on_different_numbers_of_ranks_share_scores_but_no_times(tmp_path):
    runs = [write_run(tmp_path / "a", "adamw", [3.0], ranks=1), write_run(tmp_path / "b", "muon", [2.0], ranks=2)]
    shown = compare(*runs, "--out", tmp_path / "out")
    assert shown.returncode == 0 and "different numbers of ranks" in shown.stdout and "step ms" not in shown.stdout


@pytest.mark.parametrize("missing", ["config.yaml", "scores.jsonl"])
def test_a_folder_that_is_no_finished_run(tmp_path, missing):
    run = write_run(tmp_path / "a", "adamw", [3.0])
    (run / missing).unlink()
    shown = compare(run, "--out", tmp_path / "out")
    assert shown.returncode == 2 and str(run) in shown.stderr and len(shown.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("scores.jsonl", '"floor": 3.5, ', "", "step 10 has no floor;"),
        ("scores.jsonl", '"value": 3.0', '"value": null', "step 10 has None as value;"),
        ("scores.jsonl", '"metric": "FD-digits-cnn", ', "", "no metric"),
        ("scores.jsonl", '"heldout_loss": 0.25, ', "", "step 30 has no heldout_loss;"),
        ("scores.jsonl", '"kind": "score", ', "", "scores.jsonl lacks rows"),
        ("metrics.jsonl", '"step_ms": 10.0, ', "", "step 1 has no step_ms;"),
        ("config.yaml", "optimizer:", "optimiser:", "optimiser: no such setting"),
        ("config.yaml", "lr: 0.001", "lr: null", "lr"),
    ],
)
def test_a_run_that_lacks_something_is_named_with_it(tmp_path, file, old, new, said):
    run = write_run(tmp_path / "a", "adamw", [3.0])
    text = (run / file).read_text()
    assert old in text
    (run / file).write_text(text.replace(old, new, 1))
    with pytest.raises(compare_script.Incomparable, match=re.escape(said)) as refused:
        compare_script.read(run)
    assert str(run) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("taken", ["comparison.md", "comparison.png", "samples.png"])
def test_a_place_that_cannot_be_written_is_one_line(tmp_path, taken, capsys):
    run = write_run(tmp_path / "a", "adamw", [3.0])
    (tmp_path / "out" / taken).mkdir(parents=True)
    assert compare_script.main([str(run), "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("compare.py: ") and taken in line


def test_the_period_of_a_run_with_auto_is_the_one_that_it_chose(tmp_path):
    run = write_run(tmp_path / "a", "periodic_row_muon", [3.0])
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("period: 3\n", "period: auto\n"))
    with pytest.raises(compare_script.Incomparable, match=re.escape("period.json: missing or damaged")):
        compare_script.read(run)
    (run / "period.json").write_text('{"period": 3}')
    found = compare_script.read(run)
    assert found.name == "periodic_row_muon (period 3)"
    assert compare_script.summary(found)["optimizer_ms"] == pytest.approx((8 + 2 + 2) / 3)


def test_an_unfinished_run_has_no_final_score(tmp_path):
    run = write_run(tmp_path / "a", "adamw", [3.0])
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["train"]["steps"] = 99
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    shown = compare(run, "--out", tmp_path / "out")
    assert shown.returncode == 2 and "not finished" in shown.stderr


def test_a_diverged_run_is_shown_as_such(tmp_path):
    run = write_run(tmp_path / "a", "adamw", [3.0])
    rows = (run / "scores.jsonl").read_text().replace('"heldout_loss": 0.25', '"heldout_loss": null')
    (run / "scores.jsonl").write_text(rows)
    shown = compare(run, "--out", tmp_path / "out")
    assert shown.returncode == 0 and "diverged" in shown.stdout
