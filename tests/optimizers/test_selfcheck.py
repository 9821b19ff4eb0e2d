"""``optimizers.selfcheck`` as a person starts it, and that it can fail."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from optimizers import Muon, selfcheck

ROOT = Path(__file__).parent.parent.parent
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ALGORITHMS = {"AdamW", "Muon", "Muon, bf16 wire", "Muon, replicas", "PeriodicRowMuon K=3", "MuonBP P=3", "BlockMuon"}
ALGORITHMS |= {"AdaGO", "AuON", "Dion2", "MarsMuon", "Muon8bit", "MuonEq", "NorMuon", "PeriodicSignMuon", "RowMuon"}
ALGORITHMS |= {"Scion", "AdamW8bit"}


def call(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def lines(text: str, check: str) -> list[list[str]]:
    return [re.split(r"\s{2,}", line) for line in text.splitlines() if line.startswith(check)]


def checked(text: str) -> set[str]:
    """Names without the exchange that they were checked with."""
    return {re.sub(r" \((owner|gather)\)", "", line[1]) for line in lines(text, "sharded = unsharded")}


def test_two_ranks_hold_what_they_must_and_measure_the_rest():
    done = call(*TORCHRUN, "-m", "optimizers.selfcheck", "--quick", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert checked(done.stdout) == ALGORITHMS
    assert all(line[4] == "ok" for line in lines(done.stdout, "sharded = unsharded"))
    assert all(float(line[2]) == 0 for line in lines(done.stdout, "sharded = unsharded") if line[3] == "0")
    assert [line[1] for line in lines(done.stdout, "overlap")] == ["1 in flight", "2 in flight", "3 in flight"]
    assert all("GB/s" in line[2] for line in lines(done.stdout, "all-to-all"))
    assert sum("TFLOP/s" in line[2] for line in lines(done.stdout, "Newton–Schulz")) == 2
    assert done.stdout.count("all checks passed") == 1


@pytest.fixture
def alone():
    bench = selfcheck.start("cpu", quick=True)
    yield bench
    dist.destroy_process_group()


def test_one_process_alone(alone, monkeypatch, capsys):
    assert "WORLD_SIZE" not in os.environ
    rows = selfcheck.run(alone)
    assert checked(selfcheck.table(rows)) == ALGORITHMS
    assert all(row.ok is not False for row in rows)
    assert {row.what for row in rows} == {"sharded = unsharded", "Newton–Schulz"}  # nothing travels


def test_a_difference_an_error_and_a_nan_each_fail(alone, monkeypatch):
    good = next(case for case in selfcheck.cases(alone) if case.cls is Muon)
    honest = selfcheck.train

    def spoil(by):
        return lambda case, bench, sharded: [w + by * sharded for w in honest(case, bench, sharded)]

    refused = replace(good, options={"period": 2})
    monkeypatch.setattr(selfcheck, "cases", lambda bench: [good, refused])
    assert [row.ok for row in selfcheck.check_exactness(alone)] == [True, False]
    for by in (1e-3, float("nan")):
        monkeypatch.setattr(selfcheck, "train", spoil(by))
        assert [row.ok for row in selfcheck.check_exactness(alone)] == [False, False]


def test_a_failed_check_is_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["selfcheck", "--quick", "--device", "cpu"])
    monkeypatch.setattr(selfcheck, "run", lambda bench: [selfcheck.Row("sharded = unsharded", "Muon", "1", "0", False)])
    assert selfcheck.main() == 1
    assert "FAILED" in capsys.readouterr().out


def test_the_zoo_holds_what_breaks_careless_code():
    kinds = dict(selfcheck.zoo((7, 24), torch.Generator().manual_seed(0)))
    assert kinds["zero"].count_nonzero() == 0
    assert torch.linalg.matrix_rank(kinds["rank 1"]) == 1
    assert kinds["1e20"].abs().max() > 1e20 and 0 < kinds["1e-25"].abs().max() < 1e-24


def test_a_bad_argument_is_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        selfcheck.parse(["--device", "abacus"])
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_help_is_in_lines_that_end_where_they_should(capsys):
    with pytest.raises(SystemExit) as ended:
        selfcheck.parse(["--help"])
    said = capsys.readouterr().out.splitlines()
    command = "torchrun --nproc-per-node N -m optimizers.selfcheck [--device {auto,cpu,cuda}] [--quick]"
    assert ended.value.code == 0 and said[:3] == [f"usage: {command}", "", "Checks these optimizers on a machine."]


def test_a_time_is_compared_in_words_that_fit_its_sign():
    found = [selfcheck.compared(seconds, 10.0) for seconds in (7.0, 13.0, 10.01)]
    assert found == ["30 % less than", "30 % more than", "as long as"]


def test_it_imports_torch_and_optimizers_alone():
    source = Path(selfcheck.__file__).read_text()
    imported = set(re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE))
    assert imported - set(sys.stdlib_module_names) == {"torch", "optimizers"}
