"""``scripts/bench_checkpoint.py``: what it writes; what it measures is never asserted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def bench(*arguments):
    command = [sys.executable, "scripts/bench_checkpoint.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_writes_every_key_of_its_docstring_and_leaves_no_checkpoint(tmp_path):
    done = bench("--json", tmp_path / "bench.json", "--device", "cpu", "--smoke", "--rounds", 2)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "bench.json").read_text(), parse_constant=pytest.fail)
    ran = {"torch", "device", "ranks", "threads", "parameters", "megabytes", "rounds"}
    measured = {"blocked_ratio", "step", "step_beside", "slowdown", "lost_ratio", "sha256_gbps"}
    assert result.keys() == ran | measured | {"sync", "async"}
    assert result["megabytes"] * 1e6 > 16 * result["parameters"]
    for kind in ("sync", "async"):
        assert result[kind].keys() == {"blocked", "whole", "low", "high"}
        assert 0 < result[kind]["blocked"] <= result[kind]["whole"]
    assert not list((tmp_path / "bench.checkpoints").iterdir())
    assert "between them (ratio " in done.stdout


def test_an_unwritable_file_is_refused_before_anything_is_timed(tmp_path):
    done = bench("--json", tmp_path / "absent" / "bench.json")
    assert done.returncode == 2 and "cannot be written" in done.stderr
