"""``scripts/bench_period.py``: what it writes; what it measures is never asserted."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.docstrings import keys

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import bench_period  # noqa: E402

from dit_train.planning.period import StepTimes  # noqa: E402

ROWS = ["configs/quickstart/base.yaml", "configs/optimizers/periodic_row_muon.yaml"]
SMALL = "--model.width 32 --model.depth 1 --model.heads 2 --train.batch 8 --parallel.device cpu".split()


def test_writes_every_key_of_its_docstring(tmp_path):
    out = tmp_path / "bench.json"
    arguments = [*ROWS, "--json", str(out), "--steps", "4", "--optimizer.period", "auto", *SMALL]
    command = [sys.executable, "scripts/bench_period.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text(), parse_constant=pytest.fail)
    assert found.keys() == keys(bench_period.__doc__, "FILE holds ", "\nand measured_over") | {"measured_over_budget"}
    assert found["steps"] % found["period"] == 0 and found["steps"] >= max(4, 3 * found["period"])
    assert f"period {found['period']}" in done.stdout and "measured " in done.stdout


def test_the_overhead_is_the_mean_over_a_period_of_the_medians_of_its_kinds_of_step():
    between = [[1.0, 1.1], [1.0, 1.1], [5.0, 9.9], [1.0, 1.1]]  # one hiccup
    seconds = np.array([[1.0, 1.7], *between[:2], [1.0, 1.7], *between[2:]])
    refresh = np.arange(6) % 3 == 0
    found = bench_period.summary(StepTimes(1.0, 0.9, 0.1, 0.1, 0.31), 0.24, 3, seconds, refresh)
    measured = found["measured"]
    assert measured["against_adamw"] == pytest.approx((0.7 + 2 * 0.1) / 3) and found["adamw_ms"] == 1000
    assert measured["low"] <= measured["against_adamw"] <= measured["high"]
    assert found["measured_over_budget"] == pytest.approx(1.25)
    assert found["predicted"] == pytest.approx({"against_adamw": 0.07 / 2, "against_hidden": 0.07 / 1.1})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--optimizer.period", "3"], "add --optimizer.period auto to muon_bp's, periodic_row_muon's or"),
        (["--optimizer.period", "auto", "--model.widht", "64"], "model.width"),
        (["--optimizer.period", "auto", "--steps", "0"], "--steps: '0' is no whole number"),
    ],
)
def test_bad_input_is_one_line(tmp_path, arguments, said, capsys):
    try:
        code = bench_period.main([*ROWS, "--json", str(tmp_path / "bench.json"), *arguments])
    except SystemExit as left:
        code = left.code
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2 and said in line
