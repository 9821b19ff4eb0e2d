"""kill -9 at 25 moments of one run, each followed by the same command: nothing is lost but steps that are made again.

Some starts are the real `launch`. As importing torch costs each of its processes seconds, the others are ranks forked
from a process that has imported it: they run the command line's `main` under torchrun's variables, without its agent.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
STEPS = 90
SETTINGS = (
    "configs/quickstart/base.yaml --model.width 32 --model.depth 1 --model.heads 2 --train.batch 8 "
    f"--train.steps {STEPS} "
    "--optimizer.name periodic_row_muon --optimizer.stagger true --sample.grid 0 --score.every 0 "
    "--run.validate_every 50 --run.validate_count 16 --run.checkpoint_every 1 --run.tensorboard false"
).split()
REAL = [("all", "save"), ("rank", "step"), ("rank", "save"), ("agent", "step"), ("all", "start")]
FORKED = [(who, when) for who in ("all", "rank") for when in ("start", "start", *["step"] * 4, *["save"] * 4)]
PATIENCE = 120.0  # seconds until something that has to happen counts as a hang


def until(holds: Callable[[], Any], what: str) -> Any:
    """Wait for something to be true; what it is."""
    deadline = time.monotonic() + PATIENCE
    while not (found := holds()):
        assert time.monotonic() < deadline, f"waited {PATIENCE:.0f} s for {what}"
        time.sleep(0.001)
    return found


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be asked about does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    try:
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:
        return []


def is_rank(pid: int) -> bool:
    try:
        return b"RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


# --- two ways to start the run ---------------------------------------------------------------------------------------


class Launched:
    """`launch --ranks 2`, as a person starts it."""

    def __init__(self, words: list[str], log: Path) -> None:
        command = [sys.executable, "-m", "dit_train", "launch", "--ranks", "2", *words]
        with log.open("w") as output:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
        self.agent = [self.process.pid]

    def ranks(self) -> list[int]:
        return [pid for pid in children(self.process.pid) if is_rank(pid)]

    def left(self) -> bool:
        return self.process.poll() is None

    def tidy(self) -> None:
        """torchrun's agent ends the other ranks by itself."""


class Forked:
    """The two ranks alone; who starts them is told to end the one that is left, as torchrun's agent is."""

    agent: tuple[int, ...] = ()

    def __init__(self, pids: list[int]) -> None:
        self.pids = pids

    def ranks(self) -> list[int]:
        return [pid for pid in self.pids if alive(pid)]

    def left(self) -> bool:
        return any(map(alive, self.pids))

    def tidy(self) -> None:
        for pid in self.ranks():
            os.kill(pid, signal.SIGTERM)


def fork_ranks(requests: Any) -> None:
    """A process that has imported everything and forks two ranks for each (words, log) it is sent."""
    for name in ("dit_train.preflight", "dit_train.run.loop", "torch.distributed.checkpoint"):
        importlib.import_module(name)
    from dit_train.__main__ import main

    while True:
        words, log = requests.recv()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pids = []
        for rank in range(2):
            pids.append(os.fork())
            if not pids[-1]:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(output, 1)
                os.dup2(output, 2)
                try:
                    os._exit(main(words))
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                    os._exit(1)
        requests.send(pids)
        requests.send([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])


class Forker:
    """The test's end of `fork_ranks`."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._requests, other = context.Pipe()
        context.Process(target=fork_ranks, args=(other,), daemon=True).start()

    def start(self, words: list[str], log: Path) -> Forked:
        self._requests.send((words, str(log)))
        return Forked(self._requests.recv())

    def codes(self) -> list[int]:
        """Exit codes of the ranks started last, after they have ended."""
        return self._requests.recv()


# --- the moments -----------------------------------------------------------------------------------------------------


def rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def saves_begun(folder: Path) -> set[tuple[str, int]]:
    """Folders of saves that are not committed, and which."""
    found = set()
    for path in (folder / "checkpoints").glob("step_*.tmp"):
        try:
            found.add((path.name, path.stat().st_ino))
        except OSError:
            continue
    return found


def wait_for_the_moment(when: str, folder: Path, started: Launched | Forked, draw: random.Random) -> None:
    """Return at a random moment while it starts, in or after one of its first steps, or as one of its saves begins."""
    count, delay = draw.randint(1, 3), draw.random()
    last, seen = (rows(folder) or [{"step": 0}])[-1]["step"], saves_begun(folder)

    def step_made() -> bool:
        made = rows(folder)
        return bool(made) and made[-1]["step"] >= last + count

    def save_begun() -> bool:
        nonlocal count
        new = saves_begun(folder) - seen
        seen.update(new)
        count -= bool(new)
        return bool(new) and count <= 0

    if when == "start":
        until(started.ranks, "ranks")
        time.sleep(2 * delay)
        return
    reached = {"step": step_made, "save": save_begun}[when]
    until(lambda: reached() or not started.left(), f"a {when}")
    assert started.left(), f"ended before its {when}"
    time.sleep(0.1 * delay if when == "step" else 0)


def kill(who: str, started: Launched | Forked, draw: random.Random) -> None:
    ranks = started.ranks()
    victims = {"rank": [draw.choice(ranks)], "agent": started.agent, "all": [*started.agent, *ranks]}
    for pid in victims[who]:
        os.kill(pid, signal.SIGKILL)
    if who == "rank":
        started.tidy()
    until(lambda: not started.left() and not any(map(alive, ranks)), "every process to end")


def weights(folder: Path) -> dict[str, Any]:
    import torch
    import torch.distributed.checkpoint as dcp

    save = folder / "checkpoints" / f"step_{STEPS:07d}"
    stored = dcp.FileSystemReader(save).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored.items()}
    dcp.load(tensors, checkpoint_id=save, no_dist=True)
    return tensors


@pytest.mark.long
def test_a_run_that_is_killed_25_times_ends_as_the_one_that_was_not(tmp_path, monkeypatch):
    import torch

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    draw = random.Random(25)
    kills = [(Launched, *kind) for kind in REAL[1:]] + [(None, *kind) for kind in FORKED]
    draw.shuffle(kills)
    kills.insert(0, (Launched, *REAL[0]))  # of a run that has no save yet
    assert len(kills) == 25
    forker, folder, whole = Forker(), tmp_path / "killed", tmp_path / "whole"
    words = [*SETTINGS, "--run.folder", str(folder)]
    in_saves = 0
    for number, (real, who, when) in enumerate(kills):
        log = tmp_path / f"{number}.log"
        before = saves_begun(folder)
        started = Launched(words, log) if real else forker.start(words, log)
        try:
            wait_for_the_moment(when, folder, started, draw)
            kill(who, started, draw)
        except AssertionError as error:
            raise AssertionError(f"kill {number} of {who} at {when}: {error}\n{log.read_text()[-3000:]}") from None
        finally:
            for pid in [*started.ranks(), *started.agent]:
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)
        if not real:
            forker.codes()
        in_saves += bool(saves_begun(folder) - before)
    assert in_saves >= 5  # else this has not tested what it says
    assert rows(folder)[-1]["step"] < STEPS

    last = Launched(words, tmp_path / "last.log")
    assert last.process.wait(5 * PATIENCE) == 0, (tmp_path / "last.log").read_text()[-3000:]
    once = ["--run.checkpoint_every", str(STEPS), "--run.folder", str(whole)]
    forker.start([*SETTINGS, *once], tmp_path / "whole.log")
    assert forker.codes() == [0, 0], (tmp_path / "whole.log").read_text()[-3000:]
    assert [row["step"] for row in rows(folder)] == list(range(1, STEPS + 1))
    for key in ("loss", "grad_norm", "lr", "wire_bytes", "skipped"):
        assert [row[key] for row in rows(folder)] == [row[key] for row in rows(whole)], key
    ours, theirs = weights(folder), weights(whole)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept == [f"step_{step:07d}" for step in (STEPS - 1, STEPS)]
