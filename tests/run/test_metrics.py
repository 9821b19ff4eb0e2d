"""metrics.jsonl survives kills and resumes."""

import json

import torch

from dit_train.run import metrics
from dit_train.run.metrics import JsonLines, Stopwatch


def test_lines_after_the_checkpoint_are_dropped_on_resume(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    lines = JsonLines(path, keep_through=0)
    for step in range(1, 6):
        lines.write({"step": step})
    lines.close()
    again = JsonLines(path, keep_through=3)
    again.write({"step": 4, "new": True})
    again.close()
    assert [row["step"] for row in metrics.read(path)] == [1, 2, 3, 4]
    assert metrics.read(path)[-1]["new"]


def test_a_line_cut_off_by_a_kill_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1}) + "\n" + '{"step": 2, "lo')
    JsonLines(path, keep_through=9).close()
    assert path.read_text() == '{"step": 1}\n'


def test_lines_are_on_disk_as_soon_as_they_are_written(tmp_path):
    lines = JsonLines(tmp_path / "m.jsonl", keep_through=0)
    lines.write({"step": 1})
    assert len(metrics.read(tmp_path / "m.jsonl")) == 1
    lines.close()


def test_foreign_lines_are_passed_over(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('3\n[]\n{"step": "x"}\n{"step": 2}\n')
    assert metrics.read(path) == [{"step": 2}]


def test_a_stopwatch_that_never_ran_reads_zero():
    assert Stopwatch(torch.device("cpu")).milliseconds() == 0


def test_a_loss_that_is_not_finite_stays_valid_json(tmp_path):
    lines = JsonLines(tmp_path / "m.jsonl", keep_through=0)
    lines.write({"step": 1, "loss": float("nan"), "norm": float("inf"), "lr": 0.5})
    lines.close()

    def refuse(constant):
        raise ValueError(constant)

    text = (tmp_path / "m.jsonl").read_text()
    assert json.loads(text, parse_constant=refuse) == {"step": 1, "loss": None, "norm": None, "lr": 0.5}
