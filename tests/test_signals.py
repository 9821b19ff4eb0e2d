"""One rank alone is asked to stop, or a user's own torchrun hands a signal on: every step that was made is kept."""

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.test_kills import PATIENCE, children, is_rank, until
from tests.test_launch import ROOT, SMALL, command, exit_file, launch_arguments, steps, wait_for

LONG = ("--train.steps", "5000", "--score.every", "0")


def nothing_lost(folder) -> int:
    """The last step, which is saved, after all before it; both ranks wrote the same save, since it is complete."""
    made = steps(folder)
    assert made == list(range(1, made[-1] + 1))
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step_{made[-1]:07d}"]
    assert exit_file(folder) == 85
    return made[-1]


def ranks_of(process: subprocess.Popen) -> dict[int, int]:
    """Rank -> process id."""
    found = {}
    for pid in filter(is_rank, children(process.pid)):
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found |= {int(word[5:]): pid for word in words if word.startswith(b"RANK=")}
    return found


def test_a_signal_to_one_rank_alone_stops_both_after_the_same_step(tmp_path):
    folder = tmp_path / "run"
    with subprocess.Popen(
        command(*launch_arguments(folder, *LONG)), cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as started:
        wait_for(started, "step 5/")
        os.kill(ranks_of(started)[1], signal.SIGTERM)
        rest = started.stdout.read()
    assert started.returncode == 85, rest
    assert rest.count("saved ") == 1 and nothing_lost(folder) >= 5


@pytest.mark.long
def test_under_plain_torchrun_a_forwarded_signal_loses_no_step(tmp_path):
    folder = tmp_path / "run"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    torchrun += ("--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1", "--shutdown-timeout", "300", "-m", "dit_train")
    words = command("configs/quickstart/base.yaml", *SMALL, *LONG, "--run.folder", folder, module=torchrun)
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        wait_for(started, "step 5/")
        started.send_signal(signal.SIGUSR1)
        rest, errors = started.communicate()
    assert rest.count("saved ") == 1 and nothing_lost(folder) >= 5, errors


@pytest.mark.long
def test_a_rank_whose_peers_never_come_can_be_stopped(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environment = os.environ | place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = command("configs/quickstart/base.yaml", *SMALL, *LONG, "--run.folder", tmp_path / "run")

    def waits() -> bool:
        with socket.socket() as peer:
            return peer.connect_ex(("127.0.0.1", port)) == 0

    with subprocess.Popen(words, cwd=ROOT, env=environment) as started:
        try:
            until(waits, "the rank to listen")
            started.send_signal(signal.SIGTERM)
            assert started.wait(PATIENCE) == -signal.SIGTERM
        finally:
            started.kill()
