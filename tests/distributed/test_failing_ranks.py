"""A rank that raises, is killed or hangs, under `launch` and plain torchrun: all end, and the cause is told first.

The fault is put into the ranks by a sitecustomize.py on their path.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = (
    "configs/quickstart/base.yaml --model.width 32 --model.depth 1 --model.heads 2 --train.batch 12 --train.steps 200 "
    "--sample.grid 0 --score.every 0 --run.tensorboard false --run.validate_every 0 --run.log_every 1"
).split()
LAUNCH = ["-m", "dit_train", "launch", "--ranks", "2"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "-m", "dit_train"]
SECONDS = 240  # far above the 30 that all ranks may take, since the machine may be busy

IN_DATA = """
from dit_train.run import batch
whole = batch.draw
def draw(config, data, step, slots):
    if step == 4 and rank == 1:
        {fault}
    return whole(config, data, step, slots)
batch.draw = draw
"""
# Rank 0 waits inside C++ as in a collective of NCCL, which neither a dead peer nor a signal ends
STUCK = """
from datetime import timedelta
import torch.distributed as dist
from dit_train.run import loop
work = loop._forward_backward
def stuck(run, *rest):
    if run.state.step == {step} and rank == 0:
        run.world.store.clone().wait(["never"], timedelta(hours=1))
    return work(run, *rest)
loop._forward_backward = stuck
"""


def call(tmp_path: Path, command: list[str], fault: str, *arguments: str) -> tuple[int, list[str]]:
    """Exit code and the lines on stderr of a run whose ranks execute `fault` as they start."""
    (tmp_path / "hook").mkdir()
    body = "".join(f"    {line}\n" for line in fault.splitlines())
    hook = f"import os\nif 'RANK' in os.environ:\n    rank = int(os.environ['RANK'])\n{body}"
    (tmp_path / "hook" / "sitecustomize.py").write_text(hook)
    shown = subprocess.run(
        [sys.executable, *command, *SMALL, *arguments, "--run.folder", str(tmp_path / "run")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{tmp_path / 'hook'}:{ROOT}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return shown.returncode, shown.stderr.splitlines()


def told(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "run" / "exit.json").read_text())


def ours(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("dit_train:")]


def killed_by_torchrun(lines: list[str]) -> bool:
    """Whether a rank had to be killed since it did not end by itself."""
    return any("forcefully exiting" in line for line in lines)


def test_the_rank_that_raises_tells_its_traceback_first_and_the_others_point_to_it(tmp_path):
    code, lines = call(tmp_path, TORCHRUN, IN_DATA.format(fault="raise ValueError('no such shard')"))
    assert code == 1 and told(tmp_path) == {"code": 1, "message": "rank 1: ValueError: no such shard"}
    first = next(line for line in lines if "torch/distributed/elastic" not in line and line.strip())
    assert first == "dit_train: rank 1 failed"
    assert ours(lines)[0] == first and sorted(ours(lines)[1:]) == [
        f"dit_train: rank {rank} ends with rank 1, which failed: ValueError: no such shard" for rank in (0, 2)
    ]
    trace = lines[lines.index(first) : lines.index("ValueError: no such shard")]
    assert trace[1] == "Traceback (most recent call last):" and any("in draw" in line for line in trace)
    assert not killed_by_torchrun(lines)


@pytest.mark.long
def test_a_rank_that_waits_inside_a_collective_for_one_that_raised_ends_by_itself(tmp_path):
    code, lines = call(
        tmp_path, LAUNCH, IN_DATA.format(fault="raise ValueError('no such shard')") + STUCK.format(step=4)
    )
    assert code == 1 and told(tmp_path)["message"] == "rank 1: ValueError: no such shard"
    assert "dit_train: rank 0 ends with rank 1, which failed: ValueError: no such shard" in ours(lines)
    assert not killed_by_torchrun(lines)


@pytest.mark.long
def test_a_rank_that_waits_for_a_killed_one_leaves_when_it_is_asked_to_stop(tmp_path):
    code, lines = call(tmp_path, LAUNCH, IN_DATA.format(fault="os.kill(os.getpid(), 9)") + STUCK.format(step=3))
    assert code == 1 and "rank 1 is dead" in told(tmp_path)["message"]
    assert ours(lines) == [
        "dit_train: rank 0: asked to stop, but rank 1 is dead and nothing can be saved",
        "dit_train: rank 1 was killed by SIGKILL",
    ]
    assert not killed_by_torchrun(lines)


def test_a_peer_that_is_killed_is_named_and_the_broken_collective_is_one_line(tmp_path):
    code, lines = call(tmp_path, LAUNCH, IN_DATA.format(fault="os.kill(os.getpid(), 9)"))
    assert code == 1 and "Traceback" not in "".join(lines)
    assert "a peer was killed" in ours(lines)[0] and "dit_train: rank 1 was killed by SIGKILL" in ours(lines)


@pytest.mark.long
def test_a_stall_shows_the_stacks_of_all_ranks_and_ends_the_run_where_that_is_asked_for(tmp_path):
    hang = IN_DATA.format(fault="import time; time.sleep(1000)")
    arguments = ["--run.stall_seconds", "4", "--run.stall_ends_run", "true"]
    code, lines = call(tmp_path, LAUNCH, hang, *arguments)
    assert code == 1 and "stalled after step 4" in told(tmp_path)["message"]
    stacks = [(tmp_path / "run" / "stalls" / f"rank_{rank}.txt").read_text() for rank in (0, 1)]
    assert "in draw" in stacks[1] and "_forward_backward" in stacks[0]
    stalls = [line for line in ours(lines) if "nothing has ended for" in line]
    assert len(stalls) == 2 and all(re.search(r"for \d+ s after step 4; the stacks", line) for line in stalls)
