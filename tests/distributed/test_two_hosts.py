"""Two torchrun agents on two hosts whose link is cut in the middle of a run and mended: all end by themselves, or wait
and go on, and what comes out is the undisturbed run bit for bit.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from tests.distributed.hosts import Hosts
from tests.test_kills import children, is_rank, until

STEPS = 300
TINY = f"""
model: {{width: 32, depth: 1, heads: 2, patch: 2}}
data: {{source: digits}}
schedule: {{kind: constant, warmup_steps: 0}}
train: {{steps: {STEPS}, batch: 12, compute_dtype: fp32, deterministic: true}}
optimizer: {{name: periodic_row_muon, period: 3}}
sample: {{steps: 2, grid: 0}}
run: {{log_every: 100, validate_every: 0, checkpoint_every: 50, tensorboard: false, silence_seconds: 4}}
"""

pytestmark = pytest.mark.long


class Run:
    """One run folder, and the commands of both hosts for it."""

    def __init__(self, hosts: Hosts, folder: Path, restarts: int = 0) -> None:
        self.folder, self._hosts, self._restarts = folder / "run", hosts, restarts
        folder.mkdir(exist_ok=True)
        (folder / "tiny.yaml").write_text(TINY)
        self.logs = [folder / f"host{host}.log" for host in (0, 1)]
        self.agents: list[subprocess.Popen] = []

    def __enter__(self) -> Run:
        """Start both agents, or start them again."""
        words = [str(self.folder), str(self.folder.parent / "tiny.yaml")]
        self.agents = [
            self._hosts.start(host, log, *words, restarts=self._restarts) for host, log in enumerate(self.logs)
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for script in self.agents:
            for pid in (*self.ranks(script), *children(script.pid), script.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            script.wait()

    def ranks(self, script: subprocess.Popen) -> list[int]:
        return [pid for torchrun in children(script.pid) for pid in children(torchrun) if is_rank(pid)]

    def steps(self) -> list[int]:
        try:
            text = (self.folder / "metrics.jsonl").read_text()
        except OSError:
            return []
        return [json.loads(line)["step"] for line in text[: text.rfind("\n") + 1].splitlines()]

    def reach(self, step: int) -> None:
        until(lambda: len(self.steps()) >= step or any(agent.poll() is not None for agent in self.agents), "steps")
        assert len(self.steps()) >= step, self.said()

    def codes(self) -> list[int]:
        for script in self.agents:
            until(lambda ended=script: ended.poll() is not None, "an end")
        return [script.returncode for script in self.agents]

    def said(self) -> str:
        return "\n".join(log.read_text() for log in self.logs)

    def ours(self, host: int) -> list[str]:
        lines = self.logs[host].read_text().splitlines()
        return [line for line in lines if line.startswith("dit_train:")]

    def result(self) -> dict[str, bytes]:
        """The files of the last checkpoint that hold weights, averages and momentum."""
        return {path.name: path.read_bytes() for path in self.folder.glob(f"checkpoints/step_{STEPS:07d}/*.distcp")}


@pytest.fixture(scope="module")
def hosts():
    with Hosts() as two:
        yield two


@cache
def undisturbed(hosts: Hosts) -> dict[str, bytes]:
    with Run(hosts, Path(mkdtemp(prefix="two-hosts-"))) as run:
        assert run.codes() == [0, 0], run.said()
    assert len(run.result()) == 2
    return run.result()


def test_a_short_cut_is_waited_out_and_a_long_one_ends_the_run_which_the_same_commands_go_on_with(tmp_path, hosts):
    run = Run(hosts, tmp_path)
    with run:
        run.reach(10)
        hosts.cut()
        time.sleep(2)
        hosts.mend()
        run.reach(65)  # between two saves, in which more patience is due
        hosts.cut()
        assert [len(run.ranks(script)) for script in run.agents] == [1, 1]
        until(lambda: not run.ranks(run.agents[0]) and not run.ranks(run.agents[1]), "ranks on both sides to end")
        told = json.loads((run.folder / "exit.json").read_text())
        assert told["code"] == 1 and "no sign of life of" in told["message"]
        assert run.ours(0) == [
            "dit_train: rank 0: no sign of life of rank 1 for 4 s: it is dead, or its host is gone or cut off"
        ]
        assert run.ours(1) == [
            "dit_train: rank 1: no sign of life of the first host for 4 s: it is dead, or its host is gone or cut off"
        ]
        hosts.mend()  # until then the agent of the second host waits for the store on the first
        assert run.codes() == [1, 1], run.said()
    assert run.steps()[-1] < STEPS
    with run:
        assert run.codes() == [0, 0], run.said()
    assert "going on after step" in run.said() and run.steps() == list(range(1, STEPS + 1))
    assert run.result() == undisturbed(hosts)


def test_agents_that_may_restart_do_so_after_a_cut_and_after_a_killed_rank(tmp_path, hosts):
    with Run(hosts, tmp_path, restarts=2) as run:
        run.reach(65)
        hosts.cut()
        until(lambda: len(run.ours(0)) + len(run.ours(1)) == 2, "ranks on both sides to end")
        hosts.mend()
        reached = len(run.steps())
        run.reach(reached + 30)
        (rank,) = run.ranks(run.agents[1])
        os.kill(rank, signal.SIGKILL)
        assert run.codes() == [0, 0], run.said()
    assert run.said().count("going on after step") == 2 and run.steps() == list(range(1, STEPS + 1))
    assert run.result() == undisturbed(hosts)
