"""A run that is saved at any phase of any optimizer's period goes on, on any number of ranks, as if never stopped.

Runs on 2 ranks save after every step. From each of the first period + 1 saves a copy goes on for three steps, on 2
ranks and on others; block methods without a grid, which follow the shards, are held against one rank with declared
grids.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.distributed.ranks import run

pytestmark = pytest.mark.long

MORE = 3
BASE = """
model: {depth: 1, heads: 2, patch: 2}
data: {source: digits}
schedule: {kind: constant, warmup_steps: 4}
train: {steps: 99, batch: 12, ema_decay: 0.9, ema_ramp: false, compute_dtype: fp32}
sample: {grid: 0}
run: {log_every: 100, validate_every: 0, checkpoint_every: 1, keep_checkpoints: 100, tensorboard: false}
"""
# An eps above rounding errors: the key biases' gradients are nothing else, and Adam would scale them up to whole steps.
ADAM = ["--optimizer.lr", "3e-3", "--optimizer.eps", "1e-5"]
MATRIX = ["--optimizer.lr", "3e-3", "--optimizer.ns_dtype", "fp32", "--optimizer.wire_dtype", "fp32"]
MATRIX += ["--optimizer.adamw.eps", "1e-5"]
UNEVEN = ["--model.width", "32"]  # over 3 ranks 11, 11 and 10 rows
GRID = ["--model.width", "36", "--optimizer.block_grid", "12"]  # blocks of 3 rows, which 1, 2, 3 and 4 ranks hold whole
SAVE_LAST = ["--run.checkpoint_every", "99"]
STAGGER = ["--optimizer.stagger", "true"]
CASES: dict[str, tuple[int, list[str]]] = {  # name -> period, settings
    "adamw": (1, ["--optimizer.name", "adamw", *ADAM, *UNEVEN]),
    "muon": (1, ["--optimizer.name", "muon", *MATRIX, *UNEVEN]),
    "block_muon": (1, ["--optimizer.name", "block_muon", *MATRIX, *GRID]),
    "muon_bp": (5, ["--optimizer.name", "muon_bp", *MATRIX, *GRID]),
    "muon_bp_staggered": (3, ["--optimizer.name", "muon_bp", "--optimizer.period", "3", *STAGGER, *MATRIX, *GRID]),
    "periodic_row_muon": (3, ["--optimizer.name", "periodic_row_muon", *MATRIX, *UNEVEN]),
    "periodic_row_muon_staggered": (3, ["--optimizer.name", "periodic_row_muon", *STAGGER, *MATRIX, *UNEVEN]),
}
BY_SHARDS: dict[str, tuple[int, list[str]]] = {
    "block_muon_by_shards": (1, ["--optimizer.name", "block_muon", *MATRIX, *UNEVEN]),
    "muon_bp_by_shards": (3, ["--optimizer.name", "muon_bp", "--optimizer.period", "3", *MATRIX, *UNEVEN]),
}
ALL = CASES | BY_SHARDS
SAVES = [(name, step) for name, (period, _) in ALL.items() for step in range(1, period + 2)]


def train(folder: Path, *arguments: str) -> dict[str, Any]:
    """Train, or go on, to the end; what the run held before its first step, see `held`."""
    import torch.distributed as dist

    from dit_train import overlays, preflight
    from dit_train.run import loop
    from dit_train.run.stop import StopRequest

    config = overlays.read([folder.parent / "base.yaml"], [*arguments, "--run.folder", str(folder)])
    plan = preflight.check(config, dist.get_world_size())
    dist.barrier()  # nobody writes before everybody has looked
    seen = []
    prepare = loop.prepare

    def spy(*about):
        made = prepare(*about)
        seen.append(held(made))
        return made

    with mock.patch.object(loop, "prepare", spy):
        assert loop.train(plan, StopRequest()) == 0
    return seen[0]


def held(made: Any) -> dict[str, Any]:
    """Every tensor of a run gathered whole, as its digest, and the step of each group."""
    found = {}
    for name, parameter in made.model.named_parameters():
        parts = {"model": parameter.detach(), "ema": made.ema.weights[name], **made.optimizer.state[parameter]}
        found |= {f"{kind}.{name}": digest(tensor.full_tensor()) for kind, tensor in parts.items()}
    return {"tensors": found, "steps": [group["step"] for group in made.optimizer.param_groups]}


def until(step: int) -> list[str]:
    return ["--train.steps", str(step)]


def branch(whole: Path, step: int, to: Path) -> None:
    """A run folder that holds the save of one step of another run, made by rank 0."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        save = Path("checkpoints") / f"step_{step:07d}"
        (to / "checkpoints").mkdir(parents=True)
        shutil.copy(whole / "config.yaml", to)
        shutil.copytree(whole / save, to / save)
    dist.barrier()


def digest(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()}"


def go_on(folder: Path, ranks: int) -> dict[tuple[str, int], dict[str, Any]]:
    """From every save on this process's ranks: what was loaded; three further steps stay in folder/NAME-STEP-RANKS."""
    found = {}
    for name, step in SAVES:
        to = folder / f"{name}-{step}-{ranks}"
        branch(folder / name, step, to)
        found[name, step] = train(to, *ALL[name][1], *until(step + MORE), *SAVE_LAST)
    return found


def whole_runs_and_on(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    for name, (period, arguments) in ALL.items():
        train(folder / name, *arguments, *until(period + 1 + MORE))
    return go_on(folder, 2)


def with_changing_grids(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """One rank from the saves; then again from the start, with the grids that the shards of 2 and then N ranks make."""
    found = go_on(folder, 1)
    for name, (period, arguments) in BY_SHARDS.items():
        first = folder / f"{name}-grid2"
        train(first, *arguments, "--optimizer.block_grid", "2", *until(period + 1))
        for step in range(1, period + 2):
            for ranks in (1, 3, 4):
                to = folder / f"{name}-{step}-grid{ranks}"
                branch(first, step, to)
                train(to, *arguments, "--optimizer.block_grid", str(ranks), *until(step + MORE), *SAVE_LAST)
    return found


Loaded = Callable[[int], dict[tuple[str, int], dict[str, Any]]]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="resume-") as name:
        (Path(name) / "base.yaml").write_text(BASE)
        yield Path(name)


@pytest.fixture(scope="module")
def resumed_on(folder) -> Loaded:
    """What was loaded from every save on so many ranks; the runs are made once."""

    @cache
    def loaded(ranks: int) -> dict[tuple[str, int], dict[str, Any]]:
        if ranks == 2:
            return run(whole_runs_and_on, 2, folder, timeout=900)[0]
        loaded(2)
        if ranks == 1:
            return run(with_changing_grids, 1, folder, timeout=900)[0]
        return run(go_on, ranks, folder, ranks, timeout=900)[0]

    return loaded


def losses(folder: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = {row["step"]: row["loss"] for row in rows}
    assert len(found) == len(rows)
    return found


@cache
def saved(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a save, whole."""
    import torch.distributed.checkpoint as dcp

    save = folder / "checkpoints" / f"step_{step:07d}"
    stored = dcp.FileSystemReader(save).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored.items()}
    dcp.load(tensors, checkpoint_id=save, no_dist=True)
    return tensors


def expected(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """The tensors of a save under the names of `held`, as their digests."""
    kinds = {key: key.split(".", 1) for key in tensors if not key.startswith("optimizer.")}
    found = {f"{kind}.{rest}": digest(tensors[key]) for key, (kind, rest) in kinds.items()}
    for key in tensors.keys() - kinds.keys():
        rest, kind = key.removeprefix("optimizer.").rsplit(".", 1)
        found[f"{kind}.{rest}"] = digest(tensors[key])
    return found


def furthest(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], kinds: tuple[str, ...]) -> float:
    """Largest difference of any number of any tensor of these kinds."""
    assert ours.keys() == theirs.keys()
    return max((ours[n] - theirs[n]).abs().max().item() for n in ours if n.startswith(kinds))


def following(found: dict[int, float], step: int) -> list[float]:
    return [found[step + 1 + i] for i in range(MORE)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_what_is_loaded_is_what_was_saved_bit_for_bit_on_any_number_of_ranks(ranks, folder, resumed_on):
    found = resumed_on(ranks)
    for name, step in SAVES:
        assert found[name, step]["tensors"] == expected(saved(folder / name, step)), (name, step)
        assert set(found[name, step]["steps"]) == {step}, (name, step)


@pytest.mark.parametrize("name", ALL)
def test_on_the_same_ranks_losses_and_all_that_is_saved_are_the_uninterrupted_runs_bit_for_bit(
    name, folder, resumed_on
):
    resumed_on(2)
    for step in range(1, ALL[name][0] + 2):
        again = folder / f"{name}-{step}-2"
        assert list(losses(again).values()) == following(losses(folder / name), step)
        ours, theirs = saved(again, step + MORE), saved(folder / name, step + MORE)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours), step


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_on_other_ranks_the_run_goes_on_up_to_reduction_order(name, ranks, folder, resumed_on):
    resumed_on(ranks)
    for step in range(1, CASES[name][0] + 2):
        again = folder / f"{name}-{step}-{ranks}"
        ours, theirs = list(losses(again).values()), following(losses(folder / name), step)
        assert ours[0] == pytest.approx(theirs[0], rel=1e-6), step
        assert ours == pytest.approx(theirs, rel=1e-5), step
        distance = furthest(saved(again, step + MORE), saved(folder / name, step + MORE), ("model.", "ema."))
        assert distance < 1e-5, step


@pytest.mark.parametrize("name", BY_SHARDS)
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_without_a_grid_other_ranks_are_a_change_of_the_grid_at_that_step(name, ranks, folder, resumed_on):
    resumed_on(ranks)
    resumed_on(1)
    for step in range(1, BY_SHARDS[name][0] + 2):
        again, declared = folder / f"{name}-{step}-{ranks}", folder / f"{name}-{step}-grid{ranks}"
        assert list(losses(again).values()) == pytest.approx(list(losses(declared).values()), rel=1e-5), step
        assert furthest(saved(again, step + MORE), saved(declared, step + MORE), ("model.", "ema.")) < 1e-5, step
        # and a change it is: the uninterrupted run went elsewhere
        assert furthest(saved(again, step + MORE), saved(folder / name, step + MORE), ("model.",)) > 1e-4, step
