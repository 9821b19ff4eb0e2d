"""``scripts/bench_eval.py``: what it writes; what it measures is never asserted."""

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from tests.docstrings import keys

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import bench_eval  # noqa: E402


def bench(*arguments):
    command = [sys.executable, "scripts/bench_eval.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_writes_every_key_of_its_docstring(tmp_path):
    done = bench("--json", tmp_path / "bench.json", "--smoke", "--batch", 4)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "bench.json").read_text(), parse_constant=pytest.fail)
    top, update, frechet = bench_eval.__doc__.partition("FILE holds")[2].split(";\n")
    assert result.keys() == keys(top) | {"update", "frechet"}
    assert (result["torch"], result["torchmetrics"]) == (torch.__version__, version("torchmetrics"))
    for row in result["update"].values():
        assert row.keys() == keys(update.partition(":")[2])
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]  # on a busy machine a difference may be negative
    for row in result["frechet"].values():
        assert row.keys() == keys(frechet.partition(":")[2]) and min(row.values()) > 0
    assert f"| {next(iter(result['update']))} |" in done.stdout


def test_the_readme_has_the_rows_that_the_command_prints():
    text = (ROOT / "eval" / "README.md").read_text()
    rows = [row[0] for row in re.findall(r"^\| (\d+) \|(.*)\|$", text, re.MULTILINE)]
    assert rows == [str(d) for d in bench_eval.SIZES]
