"""The command line as a person meets it: exit codes, one clear line, signals, the same command again."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.test_kills import until

ROOT = Path(__file__).parent.parent
SMALL = (
    "--model.width 32 --model.depth 1 --model.heads 2 --train.batch 8 --train.compute_dtype fp32 --sample.steps 2 "
    "--sample.grid 2 --run.tensorboard false --run.validate_every 0 --run.log_every 1"
).split()


def command(*arguments, module=("-m", "dit_train")) -> list[str]:
    return [sys.executable, *module, *map(str, arguments)]


def call(*arguments, module=("-m", "dit_train")) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*arguments, module=module), cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )


def launch_arguments(folder: Path, *arguments) -> list[str]:
    return ["launch", "--ranks", "2", "configs/quickstart/base.yaml", *SMALL, "--run.folder", str(folder), *arguments]


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def exit_file(folder: Path) -> int:
    return json.loads((folder / "exit.json").read_text())["code"]


def test_help_lists_every_section_and_imports_nothing_heavy():
    code = (
        "import sys; from dit_train.__main__ import main; assert main(['--help']) == 0;"
        "heavy = {'torch', 'diffusers', 'matplotlib', 'torchvision'} & set(sys.modules); assert not heavy, heavy"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    for flag in (
        *("--model.width", "--optimizer.lr", "--train.steps", "--score.every", "--run.folder"),
        *("--optimizer.period", "--optimizer.block-grid", "--optimizer.row-lr-ratio", "--optimizer.adamw.lr"),
    ):
        assert flag in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--optimizer.lrr", "1"], "did you mean optimizer.lr?"),
        (["--train.batch", "9"], "9 images do not divide over 2 ranks"),
        (["--data.source", "image_folder", "--data.path", "/nowhere", "--data.image_size", "8"], "/nowhere"),
        (["--optimizer.name", "muno"], "did you mean muon?"),
    ],
)
def test_bad_input_is_one_line_and_code_2_before_any_rank(tmp_path, arguments, line):
    shown = call(*launch_arguments(tmp_path / "run", *arguments))
    assert shown.returncode == 2
    assert line in shown.stderr and len(shown.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_what_only_the_shards_show_is_one_line_and_code_2_too(tmp_path):
    folder = tmp_path / "run"
    arguments = ["--optimizer.name", "muon_bp", "--optimizer.block_grid", "3", "--score.every", "0"]
    shown = call(*launch_arguments(folder, *arguments))
    assert shown.returncode == 2, shown.stderr
    lines = [line for line in shown.stderr.splitlines() if line.startswith("dit_train:")]
    assert len(lines) == 1 and "block_grid" in lines[0] and "Traceback" not in shown.stderr
    assert exit_file(folder) == 2 and {path.name for path in folder.iterdir()} == {"exit.json", "lock"}
    # the folder is still free for the mended command
    shown = call(*launch_arguments(folder, *arguments[:-4], "--score.every", "0", "--train.steps", "1"))
    assert shown.returncode == 0, shown.stderr


@pytest.mark.parametrize("ranks", [[], ["--ranks", "0"], ["--ranks", "two"], ["--ranks"]])
def test_a_wrong_number_of_ranks(ranks):
    shown = call("launch", "configs/quickstart/base.yaml", *ranks)
    assert shown.returncode == 2 and "--ranks" in shown.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])  # torchrun by itself forwards but the first
def test_a_stop_signal_saves_and_the_same_command_goes_on(tmp_path, number):
    folder = tmp_path / "run"
    arguments = launch_arguments(folder, "--train.steps", "400", "--score.every", "0")
    with subprocess.Popen(command(*arguments), cwd=ROOT, stdout=subprocess.PIPE, text=True) as started:
        for line in started.stdout:
            if "step 5/" in line:
                started.send_signal(number)
                break
        rest = started.stdout.read()
    assert started.returncode == 85, rest
    assert exit_file(folder) == 85
    reached = steps(folder)[-1]
    assert 5 <= reached < 400 and (folder / "checkpoints" / f"step_{reached:07d}" / "state.json").is_file()
    # resumed under another number of ranks, to an earlier end, to be quick
    last = reached + 3
    more = ["launch", "--ranks", "1", *arguments[3:], "--train.steps", last]
    shown = call(*more)
    assert shown.returncode == 0, shown.stderr
    assert f"going on after step {reached}" in shown.stdout
    assert steps(folder) == list(range(1, last + 1)) and exit_file(folder) == 0
    # a finished run says so at once
    again = call(*more)
    assert again.returncode == 0 and f"done: {last} steps" in again.stdout
    assert steps(folder) == list(range(1, last + 1))


def test_under_plain_torchrun_rank_0_alone_speaks_and_the_code_stands_in_the_file(tmp_path):
    folder = tmp_path / "run"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dit_train")
    arguments = ["configs/quickstart/base.yaml", *SMALL, "--score.every", "0", "--run.folder", str(folder)]
    shown = call(*arguments, "--train.steps", "2", module=torchrun)
    assert shown.returncode == 0, shown.stderr
    assert exit_file(folder) == 0 and shown.stdout.count("step 2/2") == 1
    shown = call(*arguments, "--train.steps", "4", "--model.width", "64", module=torchrun)
    assert shown.returncode == 1  # torchrun's own
    assert shown.stderr.count("model.width: 64, but") == 1
    assert exit_file(folder) == 2 and steps(folder) == [1, 2]


def test_an_image_that_cannot_be_read_ends_all_ranks_with_its_name(tmp_path):
    for label in "ab":
        (tmp_path / "data" / label).mkdir(parents=True)
        for i in range(12):
            pixels = np.random.default_rng(i).integers(0, 255, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / label / f"{i:02d}.png")
    bad = tmp_path / "data" / "b" / "06.png"
    bad.write_bytes(bad.read_bytes()[:60])
    images = ["--data.source", "image_folder", "--data.path", tmp_path / "data", "--data.image_size", "8"]
    arguments = [*images, "--score.every", "0", "--train.steps", "50"]
    shown = call(*launch_arguments(tmp_path / "run", *arguments))
    assert shown.returncode == 2, shown.stderr
    assert str(bad) in shown.stderr and exit_file(tmp_path / "run") == 2


@pytest.mark.long
def test_colour_images_are_scored_by_an_imagenet_encoder_without_torchrun(tmp_path):
    folder = tmp_path / "run"
    data = ["--data.source", "synthetic", "--data.image_size", "16", "--data.count", "60", "--data.classes", "3"]
    arguments = [*SMALL, *data, "--train.steps", "2", "--score.every", "2", "--run.folder", str(folder)]
    shown = call("configs/quickstart/base.yaml", *arguments, "--sample.guidance", "2", "--model.qk_norm", "true")
    assert shown.returncode == 0, shown.stderr
    score = next(row for row in map(json.loads, (folder / "scores.jsonl").open()) if row["kind"] == "score")
    assert score["metric"] == "FD-efficientnet-lite0@128" and score["n_gen"] == score["n_ref"] == 12
    assert 0 < score["floor"] < score["value"] and score["not_finite"] == 0 and score["ranks"] == 1
    assert Image.open(folder / "samples" / "step_0000002.png").mode == "RGB"


def wait_for(started: subprocess.Popen, text: str) -> None:
    for line in started.stdout:
        if text in line:
            return
    raise AssertionError(f"ended before {text!r}")


@pytest.mark.long
def test_ranks_whose_launcher_is_killed_save_and_stop_and_keep_the_folder_until_then(tmp_path):
    folder = tmp_path / "run"
    arguments = launch_arguments(folder, "--train.steps", "5000", "--score.every", "0")
    with subprocess.Popen(command(*arguments), cwd=ROOT, stdout=subprocess.PIPE, text=True) as started:
        wait_for(started, "step 5/")
        second = call(*arguments)
        assert second.returncode == 2 and "another run is using" in second.stderr
        started.kill()
        started.stdout.read()  # until the ranks have ended too
    assert exit_file(folder) == 85
    assert steps(folder) == list(range(1, steps(folder)[-1] + 1))
    assert (folder / "checkpoints" / f"step_{steps(folder)[-1]:07d}" / "state.json").is_file()


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt:")).split()[1], 16)
    return bool(caught >> (number - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_before_the_first_step_is_code_85_without_a_traceback(tmp_path, number):
    arguments = launch_arguments(tmp_path / "run", "--score.every", "0")
    with subprocess.Popen(command(*arguments), cwd=ROOT, stderr=subprocess.PIPE, text=True) as started:
        until(lambda: catches(started.pid, signal.SIGUSR1), "its handlers")  # torch is being imported then
        started.send_signal(number)
        errors = started.stderr.read()
    assert started.returncode == 85, errors
    assert "Traceback" not in errors


def test_a_stop_before_torchrun_heeds_signals_is_not_lost(tmp_path):
    """It came between the last look and torchrun's own handlers, which are there half a second later."""
    words = command(*launch_arguments(tmp_path / "run", "--score.every", "0"))
    late = (
        "import os, runpy, signal, sys; import torch.distributed.run as torchrun; parse = torchrun.parse_args\n"
        "torchrun.parse_args = lambda args: (os.kill(os.getpid(), signal.SIGTERM), parse(args))[1]\n"
        "sys.argv = sys.argv[1:]; runpy.run_module('dit_train', run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", late, *words[words.index("dit_train") :]], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 85, done.stderr
    assert "Traceback" not in done.stderr


def test_a_hangup_that_nohup_ignores_stays_ignored(tmp_path):
    folder = tmp_path / "run"
    arguments = launch_arguments(folder, "--train.steps", "40", "--score.every", "0")
    quiet = "import signal, os, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    words = [sys.executable, "-c", quiet, *command(*arguments)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as started:
        wait_for(started, "step 5/")
        started.send_signal(signal.SIGHUP)
        started.stdout.read()
    assert started.returncode == 0 and steps(folder)[-1] == 40
