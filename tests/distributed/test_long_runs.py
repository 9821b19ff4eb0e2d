"""What a long run meets, on real ranks: a stop asked of one rank, spikes, unreadable images, bit-equal repeats."""

import json
import os
import signal
import tempfile
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.distributed.ranks import run

TINY = """
model: {width: 32, depth: 1, heads: 2, patch: 2}
data: {source: digits}
schedule: {kind: constant, warmup_steps: 0}
train: {steps: 24, batch: 12, compute_dtype: fp32}
optimizer: {name: periodic_row_muon, period: 3}
sample: {steps: 2, grid: 0}
run: {log_every: 100, validate_every: 0, checkpoint_every: 6, keep_checkpoints: 9, tensorboard: false}
"""
SPIKES = "--faults.window 8 --faults.spike_sigmas 6".split()


def train(folder: Path, *arguments: str, change=lambda batch, step: None) -> int:
    """Run to the end or to a stop, with `change(batch, step)` called on what this rank draws; the exit code."""
    import torch.distributed as dist

    from dit_train import overlays, preflight
    from dit_train.run import batch, loop
    from dit_train.run.stop import StopRequest

    whole = batch.draw

    def draw(config, data, step, slots):
        drawn = whole(config, data, step, slots)
        change(drawn, step)
        return drawn

    config = overlays.read([folder.parent / "tiny.yaml"], [*arguments, "--run.folder", str(folder)])
    plan = preflight.check(config, dist.get_world_size())
    dist.barrier()  # nobody writes before everybody has looked
    batch.draw = draw
    try:
        with StopRequest() as stop:
            return loop.train(plan, stop)
    finally:
        batch.draw = whole
        dist.barrier()


def stopped(folder: Path, *arguments: str, **how) -> tuple[int, int]:
    """Train to a stop; the exit code and the last step, which has to be saved."""
    import torch.distributed as dist

    code, made = train(folder, *arguments, **how), rows(folder)[-1]["step"]
    assert state(folder, made)["run"]["step"] == made
    dist.barrier()  # nobody goes on before everybody has looked
    return code, made


def asked_on_one_rank(folder: Path, rank: int) -> list[int]:
    """SIGUSR1 to rank 1 alone, the file seen by rank 0 alone; then the same command."""

    def signalled(_, step):
        if step == 9 and rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    def filed(_, step):
        if step == 3 and rank == 0:
            (folder / "file" / "stop").touch()
        time.sleep(0.05)  # the file is looked at once a second

    code, _ = stopped(folder / "signal", change=signalled)
    codes = [code, train(folder / "signal")]
    code, _ = stopped(folder / "file", "--train.steps", "400", change=filed)
    return [*codes, code, train(folder / "file")]


def limited(folder: Path) -> list[tuple[int, int] | int]:
    """A limit that leaves no time for three saves; then the same command without."""
    return [stopped(folder / "limit", "--run.time_limit", "0:00:05"), train(folder / "limit")]


def spiked(folder: Path, rank: int) -> list[int]:
    """Three updates with a loss far above, met on rank 1 alone: at once, and in two parts with a resume amid them."""

    def change(batch, step):
        if step in (17, 18, 20) and rank == 1:
            batch.target.mul_(30.0)

    return [
        train(folder / "whole", *SPIKES, change=change),
        train(folder / "parts", *SPIKES, "--train.steps", "18", change=change),
        train(folder / "parts", *SPIKES, change=change),
        train(folder / "off", "--faults.spike_sigmas", "null", change=change),
    ]


def hopeless(folder: Path) -> list[int]:
    """From step 5 on no loss is finite; the weights are."""

    def change(batch, step):
        if step >= 5:
            batch.target.fill_(torch.inf)

    arguments = ["--faults.stop_after", "4", "--run.checkpoint_every", "100"]
    return [
        train(folder / "hopeless", *arguments, change=change),
        train(folder / "hopeless", *arguments, change=change),
    ]


def repeated(folder: Path) -> list[int]:
    arguments = ["--train.deterministic", "true", "--train.steps", "6"]

    def change(*_):
        assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"

    codes = [train(folder / name, *arguments, change=change) for name in ("first", "again")]
    assert not torch.are_deterministic_algorithms_enabled()
    return codes


def unreadable(folder: Path) -> list[int]:
    import torch.distributed as dist

    images = ["--data.source", "image_folder", "--data.path", str(folder / "images"), "--data.image_size", "8"]
    images += ["--data.unreadable", "replace", "--train.steps", "12"]
    tensor = str(2 if dist.get_world_size() == 2 else 1)  # two ranks that see the same images count them once
    return [
        train(folder / "replaced-tensor", *images, "--parallel.tensor", tensor),
        train(folder / "replaced", *images),
        train(folder / "replaced-parts", *images, "--train.steps", "5"),
        train(folder / "replaced-parts", *images),
    ]


def each(folder: Path) -> dict[str, list]:
    import torch.distributed as dist

    rank = dist.get_rank()
    codes = {"unreadable": unreadable(folder)}
    if dist.get_world_size() == 2:
        codes |= {
            "asked": asked_on_one_rank(folder, rank),
            "limited": limited(folder),
            "spiked": spiked(folder, rank),
            "hopeless": hopeless(folder),
            "repeated": repeated(folder),
        }
    return codes


def write_images(folder: Path) -> None:
    for label in "ab":
        (folder / label).mkdir(parents=True)
        for i in range(12):
            pixels = np.random.default_rng(i + 50 * (label == "b")).integers(0, 255, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{i:02d}.png")
    for name in ("a/00", "a/05", "b/09"):  # the first of a class, one to train on, one held out
        (folder / f"{name}.png").write_bytes(b"no image")


@cache
def runs(ranks: int) -> tuple[Path, dict[str, list]]:
    """The folder of all runs on so many ranks, made once, and their exit codes, on which the ranks agree."""
    folder = Path(tempfile.mkdtemp(prefix=f"long{ranks}-"))
    (folder / "tiny.yaml").write_text(TINY)
    write_images(folder / "images")
    codes = run(each, ranks, folder, timeout=500)
    assert all(theirs == codes[0] for theirs in codes)
    return folder, codes[0]


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def told(folder: Path) -> str:
    return json.loads((folder / "exit.json").read_text())["message"]


def state(folder: Path, step: int) -> dict:
    return json.loads((folder / "checkpoints" / f"step_{step:07d}" / "state.json").read_text())


def column(folder: Path, key: str) -> list:
    return [row[key] for row in rows(folder)]


@pytest.mark.parametrize("name", ["signal", "file"])
def test_one_rank_that_is_asked_stops_all_at_one_step_and_the_same_command_goes_on(name):
    folder, codes = runs(2)
    assert codes["asked"] == [85, 0, 85, 0]
    assert column(folder / name, "step") == list(range(1, len(rows(folder / name)) + 1))
    assert not (folder / "file" / "stop").exists()
    assert len(rows(folder / "signal")) == 24


def test_a_time_limit_saves_and_stops_after_the_first_step_that_leaves_too_little():
    folder, codes = runs(2)
    (code, made), again = codes["limited"]
    assert (code, again) == (85, 0) and len(rows(folder / "limit")) == 24
    assert made <= 2  # the first step tells what to keep


def test_a_spike_on_one_rank_is_left_out_on_all_and_the_optimizer_does_not_count_it():
    folder, codes = runs(2)
    assert codes["spiked"] == [0, 0, 0, 0]
    assert column(folder / "whole", "spikes") == [0] * 17 + [1, 2, 2] + [3] * 4
    assert set(column(folder / "whole", "skipped")) == {0}
    last = state(folder / "whole", 24)
    assert last["run"]["spikes"] == 3 and set(last["optimizer_steps"]) == {21}
    assert column(folder / "off", "spikes") == [0] * 24 and column(folder / "off", "loss")[17] > 100
    refreshes = [row["wire_bytes"] > 0 for row in rows(folder / "whole")]
    assert refreshes == [step % 3 == 0 for step in range(17)] + [False, False, False, False, True, False, False]


def test_a_resume_amid_spikes_is_the_whole_run_bit_for_bit():
    folder, _ = runs(2)
    for key in ("loss", "grad_norm", "spikes"):
        assert column(folder / "parts", key) == column(folder / "whole", key)
    assert state(folder / "parts", 24)["run"]["recent"] == state(folder / "whole", 24)["run"]["recent"]


def test_a_run_without_a_sound_step_saves_and_fails_and_says_what_to_try():
    folder, codes = runs(2)
    assert codes["hopeless"] == [1, 1]
    assert "4 in a row were left out" in told(folder / "hopeless") and "lower optimizer.lr" in told(folder / "hopeless")
    assert column(folder / "hopeless", "skipped") == [0] * 5 + list(range(1, 9))  # each start tries as long
    assert set(state(folder / "hopeless", 9)["optimizer_steps"]) == {5}


def test_a_deterministic_run_repeats_bit_for_bit():
    folder, codes = runs(2)
    assert codes["repeated"] == [0, 0]
    for key in ("loss", "grad_norm"):
        assert column(folder / "first", key) == column(folder / "again", key)


@pytest.mark.parametrize("ranks", [2, 3])
def test_unreadable_images_are_replaced_alike_for_any_rank_count_and_after_a_resume(ranks):
    folder, codes = runs(ranks)
    assert codes["unreadable"] == [0, 0, 0, 0]
    one, _ = runs(1)
    for name in ("replaced", "replaced-parts", "replaced-tensor"):
        assert column(folder / name, "unreadable") == column(one / "replaced", "unreadable")
        assert column(folder / name, "loss") == pytest.approx(column(one / "replaced", "loss"), rel=1e-4)
    assert column(folder / "replaced-parts", "loss") == column(folder / "replaced", "loss")
    epoch = 20  # images to train on; two of them cannot be read
    assert rows(one / "replaced")[-1]["unreadable"] >= 2 * (12 * 12 // epoch)
