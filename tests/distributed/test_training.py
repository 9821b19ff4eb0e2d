"""The trainer on 1, 2, 3 and 4 real FSDP2 ranks: the same run whatever their number, and the same run resumed."""

import json
import math
from functools import cache
from pathlib import Path

import pytest

from tests.distributed.ranks import run

STEPS = 20
TINY = """
model: {width: 32, depth: 2, heads: 2, patch: 2}
data: {source: digits}
schedule: {warmup_steps: 4}
train: {steps: 20, batch: 12, ema_decay: 0.9, ema_ramp: false, compute_dtype: fp32}
sample: {steps: 2, grid: 0}
run: {log_every: 100, validate_every: 10, validate_count: 31, checkpoint_every: 10, tensorboard: false}
"""
MATRIX = ["--optimizer.lr", "3e-3", "--optimizer.ns_dtype", "fp32", "--optimizer.wire_dtype", "fp32"]
OPTIMIZERS = {
    "adamw": ["--optimizer.name", "adamw", "--optimizer.lr", "3e-3"],
    "muon": ["--optimizer.name", "muon", *MATRIX],
    "periodic_row_muon": ["--optimizer.name", "periodic_row_muon", *MATRIX],
    "muon_bp": ["--optimizer.name", "muon_bp", *MATRIX],
    "muon_bp_grid": ["--optimizer.name", "muon_bp", *MATRIX, "--optimizer.block_grid", "4"],
    "block_muon": ["--optimizer.name", "block_muon", *MATRIX],
    "block_muon_grid": ["--optimizer.name", "block_muon", *MATRIX, "--optimizer.block_grid", "4"],
}


def train(folder: Path, *arguments: str) -> None:
    import torch.distributed as dist

    from dit_train import overlays, preflight
    from dit_train.run import loop
    from dit_train.run.stop import StopRequest

    dist.barrier()  # the one before has let go of its folder
    base = folder.parent / "tiny.yaml"
    config = overlays.read([base], [*arguments, "--run.folder", str(folder)])
    plan = preflight.check(config, dist.get_world_size())
    dist.barrier()  # nobody writes before everybody has looked
    assert loop.train(plan, StopRequest()) == 0


def all_runs(folder: Path, names: list[str], resumed: list[str]) -> None:
    """Train `names` for 20 steps, then `resumed` for 10 and 10 more, on this process's ranks."""
    for name in names:
        train(folder / name, *OPTIMIZERS[name])
    for name in resumed:
        train(folder / f"{name}-resumed", *OPTIMIZERS[name], "--schedule.kind", "constant", "--train.steps", "10")
        train(folder / f"{name}-resumed", *OPTIMIZERS[name], "--schedule.kind", "constant")
        train(folder / f"{name}-whole", *OPTIMIZERS[name], "--schedule.kind", "constant")


def accumulated(folder: Path) -> None:
    """The same run in micro-batches, with and without reducing each."""
    train(folder / "micro", *OPTIMIZERS["muon"], "--train.micro_batch", "2")
    train(
        folder / "deferred",
        *OPTIMIZERS["muon"],
        "--train.micro_batch",
        "2",
        "--parallel.sync_every_micro_batch",
        "false",
    )
    train(folder / "zero2", *OPTIMIZERS["muon"], "--parallel.reshard_after_forward", "false")


DIVISIONS = [(micro, sync) for micro in ("null", "2", "1") for sync in ("true", "false")]
THREEFOLD = ["--model.width", "36", "--optimizer.block_grid", "12"]  # blocks of 3 rows, whole on 1, 2 and 3 ranks


def divided(folder: Path) -> None:
    """One short run in every division of a rank's share, reducing after each piece or after the last."""
    for micro, sync in DIVISIONS:
        division = ["--train.micro_batch", micro, "--parallel.sync_every_micro_batch", sync]
        arguments = ["--optimizer.name", "muon_bp", *MATRIX, *THREEFOLD, *division, "--train.steps", "8"]
        train(folder / f"divided-{micro}-{sync}", *arguments, "--run.validate_every", "0")


def with_a_broken_batch(folder: Path) -> None:
    """A run in which rank 1 alone meets a batch with an infinity, in step 5."""
    import torch.distributed as dist

    from dit_train.run import batch

    whole = batch.draw

    def broken(config, data, step, slots):
        drawn = whole(config, data, step, slots)
        if step == 4 and dist.get_rank() == 1:
            drawn.x_t[0] = math.inf
        return drawn

    batch.draw = broken
    try:
        train(folder / "broken", *OPTIMIZERS["muon"])
    finally:
        batch.draw = whole


def each(folder: Path, names: list[str], resumed: list[str], divide: bool, accumulate: bool) -> None:
    all_runs(folder, names, resumed)
    if divide:
        divided(folder)
    if accumulate:
        accumulated(folder)
        with_a_broken_batch(folder)


@cache
def runs(ranks: int) -> Path:
    """The folder of all runs on so many ranks; made once."""
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix=f"ranks{ranks}-"))
    (folder / "tiny.yaml").write_text(TINY)
    names = {1: list(OPTIMIZERS), 2: list(OPTIMIZERS), 3: ["adamw", "muon", "periodic_row_muon"]}
    names = names.get(ranks, ["muon_bp_grid", "block_muon_grid"])
    resumed = ["adamw", "muon", "muon_bp", "periodic_row_muon"] if ranks == 2 else []
    run(each, ranks, folder, names, resumed, ranks < 4, ranks == 2, timeout=600)
    return folder


def losses(folder: Path, step: int = 0) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return [row["loss"] for row in rows][step:]


def heldout(folder: Path) -> list[float]:
    return [json.loads(line)["heldout_loss"] for line in (folder / "scores.jsonl").read_text().splitlines()]


def furthest(ours: list[float], theirs: list[float]) -> float:
    """Largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", ["adamw", "muon", "periodic_row_muon"])
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_losses_do_not_depend_on_the_number_of_ranks(name, ranks):
    assert furthest(losses(runs(ranks) / name), losses(runs(1) / name)) < 1e-5
    assert furthest(heldout(runs(ranks) / name), heldout(runs(1) / name)) < 1e-5


@pytest.mark.parametrize("name", ["muon_bp", "block_muon"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_with_a_block_grid_block_methods_do_not_depend_on_it_either(name, ranks):
    assert furthest(losses(runs(ranks) / f"{name}_grid"), losses(runs(1) / f"{name}_grid")) < 1e-5


@pytest.mark.parametrize("name", ["muon_bp", "block_muon"])
def test_without_a_grid_block_methods_follow_the_shards(name):
    assert furthest(losses(runs(2) / name), losses(runs(1) / name)) > 1e-4


@pytest.mark.parametrize("name", ["muon", "periodic_row_muon", "muon_bp_grid", "block_muon_grid"])
def test_the_optimizers_are_not_all_the_same(name):
    assert furthest(losses(runs(1) / name), losses(runs(1) / "adamw")) > 1e-3


@pytest.mark.parametrize("name", ["adamw", "muon", "muon_bp", "periodic_row_muon"])
def test_ten_and_ten_resumed_steps_are_twenty_bit_for_bit(name):
    resumed, whole = runs(2) / f"{name}-resumed", runs(2) / f"{name}-whole"
    assert losses(resumed) == losses(whole)
    assert heldout(resumed) == heldout(whole)


@pytest.mark.parametrize("name", ["micro", "deferred", "zero2"])
def test_accumulation_and_resharding_do_not_change_the_run(name):
    assert furthest(losses(runs(2) / name), losses(runs(2) / "muon")) < 1e-5


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize(("micro", "sync"), DIVISIONS)
def test_ranks_micro_batches_and_accumulation_together_change_nothing_but_the_order_of_sums(ranks, micro, sync):
    def found(folder: Path) -> list[float]:
        return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]

    reference = found(runs(1) / "divided-null-true")
    assert len(reference) == 8
    assert furthest(found(runs(ranks) / f"divided-{micro}-{sync}"), reference) < 1e-6


def test_training_learns():
    for name in OPTIMIZERS:
        found = losses(runs(2) / name)
        assert all(map(math.isfinite, found)) and sum(found[-5:]) < 0.95 * sum(found[:5]), name


def test_refresh_steps_alone_send_bytes():
    rows = [json.loads(line) for line in (runs(2) / "periodic_row_muon" / "metrics.jsonl").read_text().splitlines()]
    assert [row["wire_bytes"] > 0 for row in rows] == [step % 3 == 0 for step in range(STEPS)]


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all():
    rows = [json.loads(line) for line in (runs(2) / "broken" / "metrics.jsonl").read_text().splitlines()]
    assert [row["skipped"] for row in rows] == [0] * 4 + [1] * 16
    assert rows[4]["loss"] is None and all(row["loss"] is not None for row in rows[:4] + rows[5:])
    # the steps before it are those of the undisturbed run; after it the weights are still sound
    assert [row["loss"] for row in rows[:4]] == losses(runs(2) / "muon")[:4]
    assert all(row["loss"] < 3 for row in rows[5:])
