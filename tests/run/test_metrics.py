"""metrics.jsonl survives kills and resumes."""

import json
import resource
from contextlib import contextmanager

import pytest
import torch

from dit_train import overlays
from dit_train.run import metrics, tracking
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


def test_a_late_row_is_told_when_it_is_asked_for_and_once():
    told, asked = [], []
    late = metrics.LateRow(told.append, late=True)
    late.flush()
    for step in (1, 2, 3):
        late.hold({"step": step}, lambda step=step: asked.append(step) or {"ms": step})
        assert len(told) == len(asked) == step - 1
    late.flush()
    late.flush()
    assert told == [{"step": step, "ms": step} for step in (1, 2, 3)]
    at_once = metrics.LateRow(told.append, late=False)
    at_once.hold({"step": 4}, dict)
    assert told[-1] == {"step": 4}


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


@contextmanager
def no_file_above(size):
    """Files of this process cannot grow beyond `size` bytes: what a full disk looks like."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_line_is_lost_or_cut_by_a_disk_that_was_full_for_a_while(tmp_path):
    path = tmp_path / "m.jsonl"
    lines = JsonLines(path, keep_through=0)
    lines.write({"step": 1, "loss": 0.5})
    with no_file_above(path.stat().st_size + 7):
        for step in (2, 3):
            with pytest.raises(OSError):
                lines.write({"step": step, "loss": 0.5})
        assert len(path.read_text()) == 32  # the second line is cut
    lines.write({"step": 4, "loss": 0.5})
    lines.close()
    assert path.read_text() == "".join(f'{{"step": {step}, "loss": 0.5}}\n' for step in (1, 2, 3, 4))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own thread
def test_a_full_disk_costs_a_run_its_logs_and_pictures_only_and_is_said_now_and_then(tmp_path, capsys):
    config = overlays.read([], ["--run.folder", str(tmp_path), "--run.tensorboard", "true"])
    reporter = tracking.Reporter(config, 0, evaluated=True, enabled=True)
    row = {"loss": 0.5, "grad_norm": 1.0, "lr": 0.1, "step_ms": 1.0, "images_per_s": 8.0, "mfu": None}
    with no_file_above(0):
        for step in range(1, 5):
            reporter.step({"step": step, **row})
        reporter.evaluation({"step": 4, "heldout_loss": 0.5}, "held-out loss 0.5")
        reporter.picture(torch.zeros((1, 8, 8), dtype=torch.uint8), 4)
    shown = capsys.readouterr().err
    assert shown.count("metrics.jsonl could not be written") == 3  # at the 1st, 2nd and 4th time
    for what in ("scores.jsonl", "samples/"):
        assert shown.count(f"{what} could not be written") == 1
    reporter.step({"step": 5, **row})
    reporter.__exit__()
    assert [row["step"] for row in metrics.read(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
