"""The Kubernetes and SkyPilot examples: their own shell commands, run as two hosts on this machine."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dit_train import exits
from tests.distributed.test_two_hosts import TINY
from tests.test_kills import until

ROOT = Path(__file__).parent.parent
NODE = ROOT / "scripts" / "train_node.sh"
SERVICE, JOB = yaml.safe_load_all((ROOT / "scripts" / "kubernetes" / "train.yaml").read_text())
SKY = yaml.safe_load((ROOT / "scripts" / "skypilot" / "train.yaml").read_text())
CONTAINER = JOB["spec"]["template"]["spec"]["containers"][0]
SETTINGS = re.compile(r"configs/scale/XL\.yaml configs/scale/muon_bp\.yaml\s.*sd-vae-ft-ema")


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


class Pair:
    """Two hosts' scripts with the variables that their platform sets."""

    def __init__(self, folder: Path, script: str, variables: list[dict[str, str]]) -> None:
        self.run = folder / "run"
        (folder / "tiny.yaml").write_text(TINY)
        script = script.replace("\\\n", " ")
        assert SETTINGS.search(script) and script.count("/runs/dit-xl") == 1
        script = SETTINGS.sub(f"{folder / 'tiny.yaml'} $MORE", script)
        self._script = script.replace("/runs/dit-xl", str(self.run)).replace("/bucket", str(folder / "bucket"))
        self._script = self._script.replace(".venv/bin/python", sys.executable)
        self._variables, self._log = variables, folder / "log"

    def start(self, more: str = "") -> list[subprocess.Popen]:
        env = os.environ | {"PORT": free_port(), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MORE": more}
        with self._log.open("a") as log:
            return [
                subprocess.Popen(["bash", "-c", self._script], cwd=ROOT, env=env | own, stdout=log, stderr=log)
                for own in self._variables
            ]

    def codes(self, scripts: list[subprocess.Popen]) -> list[int]:
        try:
            for script in scripts:
                until(lambda ended=script: ended.poll() is not None, "an end")
        except AssertionError:
            for script in scripts:
                script.terminate()
            raise AssertionError(self._log.read_text()) from None
        return [script.returncode for script in scripts]

    def reach(self, step: int) -> None:
        metrics = self.run / "metrics.jsonl"
        until(lambda: metrics.exists() and metrics.read_text().count("\n") >= step, f"step {step}")


def after(code: int) -> str:
    """What the job does with a pod whose container ends so."""
    for rule in JOB["spec"]["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        if codes and codes["operator"] == "In" and code in codes["values"]:
            assert codes["containerName"] == CONTAINER["name"]
            return rule["action"]
    return "Count"


def test_the_job_knows_our_codes_and_its_pods_find_each_other():
    assert [after(code) for code in (exits.BAD_INPUT, exits.STOPPED, exits.FAILED)] == ["FailJob", "Ignore", "Count"]
    spec, pod = JOB["spec"], JOB["spec"]["template"]["spec"]
    env = {variable["name"]: variable["value"] for variable in CONTAINER["env"]}
    assert spec["completionMode"] == "Indexed" and pod["restartPolicy"] == "Never"
    assert str(spec["completions"]) == str(spec["parallelism"]) == env["NODES"]
    assert env["RANKS"] == CONTAINER["resources"]["limits"]["nvidia.com/gpu"]
    name, service = JOB["metadata"]["name"], SERVICE["metadata"]["name"]
    assert SERVICE["spec"]["clusterIP"] == "None" and SERVICE["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service and env["FIRST_HOST"] == f"{name}-0.{service}"
    granted = int(re.search(r"SHUTDOWN_SECONDS:-(\d+)", NODE.read_text())[1])
    assert pod["terminationGracePeriodSeconds"] > granted
    assert exits.STOPPED in SKY["resources"]["job_recovery"]["recover_on_exit_codes"]


@pytest.mark.parametrize(
    "script", [NODE.read_text(), CONTAINER["args"][0], SKY["run"], SKY["setup"]], ids="node pod run setup".split()
)
def test_every_script_is_sound_bash(script):
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.long
def test_pods_save_when_one_is_evicted_and_their_successors_go_on_and_bad_input_ends_the_job(tmp_path):
    own = {"NODES": "2", "RANKS": "1", "FIRST_HOST": "127.0.0.1", "PYTHON": sys.executable}
    pods = Pair(tmp_path, CONTAINER["args"][0], [own | {"JOB_COMPLETION_INDEX": str(index)} for index in (0, 1)])
    first = pods.start("--train.steps 3000")
    pods.reach(30)
    first[1].send_signal(signal.SIGTERM)
    assert pods.codes(first) == [exits.STOPPED, exits.STOPPED]
    assert pods.codes(pods.start("--model.width 64")) == [exits.BAD_INPUT, exits.BAD_INPUT]
    assert pods.codes(pods.start("--train.steps 3001 --run.time_limit 1")) == [exits.STOPPED, exits.STOPPED]


@pytest.mark.long
def test_skypilots_hosts_train_to_the_end_and_the_first_copies_the_checkpoint(tmp_path):
    own = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "1", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2"}
    hosts = Pair(tmp_path, SKY["run"], [own | {"SKYPILOT_NODE_RANK": str(rank)} for rank in (0, 1)])
    assert hosts.codes(hosts.start("--train.steps 60")) == [exits.DONE, exits.DONE]
    copied = {path.name for path in (tmp_path / "bucket" / "checkpoints" / "step_0000060").iterdir()}
    assert (
        copied == {path.name for path in (hosts.run / "checkpoints" / "step_0000060").iterdir()}
        and "state.json" in copied
    )
