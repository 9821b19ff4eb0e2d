"""``scripts/bench_eval.py``: what it writes; what it measures is never asserted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def bench(*arguments):
    command = [sys.executable, "scripts/bench_eval.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_writes_every_key_of_its_docstring(tmp_path):
    done = bench("--json", tmp_path / "bench.json", "--smoke", "--batch", 4)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "bench.json").read_text(), parse_constant=pytest.fail)
    settings = {"torch", "torchmetrics", "device", "threads", "batch", "rounds", "updates"}
    assert result.keys() == settings | {"update", "frechet"}
    for row in result["update"].values():
        assert row.keys() == {"our_ms", "their_ms", "ratio", "ratio_low", "ratio_high"}
        assert 0 < row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    for row in result["frechet"].values():
        assert row.keys() == {"first", "next"} and min(row.values()) > 0
    assert f"| {next(iter(result['update']))} |" in done.stdout


def test_an_unwritable_file_is_refused_before_anything_is_timed(tmp_path):
    done = bench("--json", tmp_path / "absent" / "bench.json")
    assert done.returncode == 2 and "cannot be written" in done.stderr
