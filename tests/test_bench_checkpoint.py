"""``scripts/bench_checkpoint.py``: what it writes; what it measures is never asserted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docstrings import keys

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import bench_checkpoint  # noqa: E402


def test_writes_every_key_of_its_docstring_and_leaves_no_checkpoint(tmp_path):
    arguments = ["--json", str(tmp_path / "bench.json"), "--device", "cpu", "--smoke", "--rounds", "2"]
    command = [sys.executable, "scripts/bench_checkpoint.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "bench.json").read_text(), parse_constant=pytest.fail)
    lines = bench_checkpoint.__doc__.partition("FILE holds")[2].splitlines()
    names = [keys(line.partition(":")[0]) for line in lines if ":" in line]
    (of_each,) = [found for found in names if "blocked" in found]
    assert result.keys() == set().union(*names) - of_each | {"sync", "async"}
    assert result["megabytes"] * 1e6 > 16 * result["parameters"]
    for kind in ("sync", "async"):
        assert result[kind].keys() == of_each and 0 < result[kind]["blocked"] <= result[kind]["whole"]
    assert not list((tmp_path / "bench.checkpoints").iterdir())
    assert "between them (ratio " in done.stdout
