"""The batch script with stand-ins for srun and scontrol: what is forwarded, and what is queued again."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from dit_train.checkpoint import manifest
from dit_train.checkpoint.manifest import Manifest, RunState

SCRIPT = Path(__file__).parent.parent / "scripts" / "slurm" / "train.sbatch"
SRUN = """#!/usr/bin/env bash
printf '%s\\n' "$@" > "$LOG/srun"
trap 'echo USR1 >> "$LOG/signals"; echo "{\\"code\\": 85, \\"message\\": \\"\\"}" > "$RUN/exit.json"; exit 1' USR1
trap 'echo TERM >> "$LOG/signals"; echo "{\\"code\\": 85, \\"message\\": \\"\\"}" > "$RUN/exit.json"; exit 1' TERM
eval "$STEP"
"""
SCONTROL = """#!/usr/bin/env bash
[ "$1" = show ] && printf 'node1\\nnode2\\n' || echo "$@" >> "$LOG/scontrol"
"""
UNTIL_A_SIGNAL = "echo ready; while :; do sleep 0.05; done"


def start(tmp_path: Path, step: str) -> subprocess.Popen:
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "exit.json").write_text('{"code": 85, "message": "of an earlier start"}')
    slurm = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
    own = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "LOG": str(tmp_path),
        "RUN": str(tmp_path / "run"),
        "STEP": step,
    }
    command = ["bash", str(SCRIPT), str(tmp_path / "run"), "base.yaml", "--train.steps", "9"]
    return subprocess.Popen(command, env=os.environ | slurm | own, stdout=subprocess.PIPE, text=True)


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize(("saves", "seconds"), [((), "280"), ((12.5,), "280"), ((500.0, 150.2), "453")])
def test_ranks_have_the_time_of_three_measured_saves_to_stop(tmp_path, saves, seconds):
    for step, took in enumerate(saves):
        folder = tmp_path / "run" / "checkpoints" / f"step_{step:07d}"
        folder.mkdir(parents=True)
        manifest.write(folder, Manifest(RunState(step, save_seconds=took), {}, [], {}))
    with start(tmp_path, "exit 0") as script:
        script.stdout.read()
    words = read(tmp_path / "srun").splitlines()
    assert words[words.index("--shutdown-timeout") + 1] == seconds


def test_the_script_is_sound_bash():
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


@pytest.mark.parametrize(("number", "queued"), [(signal.SIGUSR1, "requeue 7\n"), (signal.SIGTERM, "")])
def test_a_signal_reaches_the_ranks_and_only_slurms_warning_queues_the_job_again(tmp_path, number, queued):
    with start(tmp_path, UNTIL_A_SIGNAL) as script:
        assert "ready" in script.stdout.readline()
        script.send_signal(number)
        script.stdout.read()
    assert script.returncode == 0
    assert read(tmp_path / "signals") == f"{number.name[3:]}\n" and read(tmp_path / "scontrol") == queued
    words = read(tmp_path / "srun").splitlines()
    assert words[words.index("--rdzv-endpoint") + 1] == "node1:29400" and words[words.index("--nnodes") + 1] == "2"
    assert words[words.index("dit_train") + 1 :] == [
        *("base.yaml", "--train.steps", "9", "--run.folder", str(tmp_path / "run"))
    ]


@pytest.mark.parametrize(
    ("step", "code"),
    [
        ("""echo '{"code": 0, "message": "done"}' > "$RUN/exit.json" """, 0),
        ("""echo '{"code": 2, "message": "bad"}' > "$RUN/exit.json"; exit 1""", 2),
        ("exit 1", 1),  # before any rank: the code of an earlier start must not count
    ],
)
def test_the_runs_own_code_is_passed_on_and_nothing_is_queued_again(tmp_path, step, code):
    with start(tmp_path, step) as script:
        script.stdout.read()
    assert script.returncode == code and not read(tmp_path / "scontrol")
