"""A run that is saved on one mesh goes on on another, with and without compiled blocks and activation checkpointing.

Saves are taken in the middle of a period; `test_resume` goes through all phases, on sharded ranks alone.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.ranks import run
from tests.distributed.test_meshes import MESHES
from tests.distributed.test_resume import (
    ADAM,
    BASE,
    MATRIX,
    MORE,
    SAVE_LAST,
    branch,
    expected,
    following,
    furthest,
    losses,
    saved,
    train,
    until,
)

pytestmark = pytest.mark.long

SAVE = 2
WIDTH = ["--model.width", "36"]
GRID = ["--optimizer.block_grid", "[12, 2]"]  # blocks that ranks hold whole, whether they split rows or columns
CASES = {
    "adamw": ["--optimizer.name", "adamw", *ADAM, *WIDTH],
    "periodic_row_muon": ["--optimizer.name", "periodic_row_muon", *MATRIX, *WIDTH],
    "muon_bp": ["--optimizer.name", "muon_bp", "--optimizer.period", "3", *MATRIX, *WIDTH, *GRID],
}
ONTO = {  # mesh of the save -> meshes that go on from it
    "shard 2": [
        *("one", "full", "compiled", "shard 2, compiled, selective", "replicate 2", "tensor 2"),
        *("replicate 2, tensor 2", "shard 2, tensor 2, compiled, full"),
    ],
    "replicate 2": ["replicate 2", "one", "shard 2, tensor 2"],
    "tensor 2": ["tensor 2", "one", "replicate 2", "replicate 2, shard 2"],
    "shard 2, compiled, selective": ["shard 2, compiled, selective", "shard 2", "tensor 2"],
    "shard 2, tensor 2, compiled, full": ["shard 2, tensor 2, compiled, full", "one", "shard 2"],
}
PAIRS = [(start, mesh) for start, meshes in ONTO.items() for mesh in meshes]


def cases(start: str, mesh: str = "") -> list[str]:
    """The optimizers that are saved on one mesh and go on on another; one where blocks are compiled, which is slow."""
    return ["periodic_row_muon"] if "compiled" in start + mesh else list(CASES)


ALL = [(name, *pair) for pair in PAIRS for name in cases(*pair)]


def on_mesh(folder: Path, name: str, mesh: str, *arguments: str) -> dict[str, Any]:
    torch._dynamo.reset()
    return train(folder, *CASES[name], *MESHES[mesh][1], *until(SAVE + MORE), *arguments)


def whole_runs(folder: Path, starts: list[str]) -> None:
    for start in starts:
        for name in cases(start):
            on_mesh(folder / f"{name}, {start}", name, start)


def go_on(folder: Path, pairs: list[tuple[str, str]]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """What was loaded by each case of each pair of meshes; further steps stay in folder/NAME, START to MESH."""
    found = {}
    for start, mesh in pairs:
        for name in cases(start, mesh):
            to = folder / f"{name}, {start} to {mesh}"
            branch(folder / f"{name}, {start}", SAVE, to)
            found[start, mesh, name] = on_mesh(to, name, mesh, *SAVE_LAST)
    return found


def of_size(meshes: list[Any], ranks: int) -> list[Any]:
    return [mesh for mesh in meshes if MESHES[mesh if isinstance(mesh, str) else mesh[1]][0] == ranks]


@cache
def made() -> tuple[Path, dict[tuple[str, str, str], dict[str, Any]]]:
    folder = Path(tempfile.mkdtemp(prefix="resume-meshes-"))
    (folder / "base.yaml").write_text(BASE)
    for ranks in (2, 4):
        run(whole_runs, ranks, folder, of_size(list(ONTO), ranks), timeout=600)
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for ranks in (1, 2, 4):
        found |= run(go_on, ranks, folder, of_size(PAIRS, ranks), timeout=600)[0]
    return folder, found


@pytest.mark.parametrize(("name", "start", "mesh"), ALL)
def test_what_is_loaded_is_what_was_saved_and_the_run_goes_on(name, start, mesh):
    folder, found = made()
    whole, again = folder / f"{name}, {start}", folder / f"{name}, {start} to {mesh}"
    loaded = found[start, mesh, name]
    assert loaded["tensors"] == expected(saved(whole, SAVE)) and set(loaded["steps"]) == {SAVE}
    ours, theirs = list(losses(again).values()), following(losses(whole), SAVE)
    after, unbroken = saved(again, SAVE + MORE), saved(whole, SAVE + MORE)
    if mesh == start:
        assert ours == theirs
        assert after.keys() == unbroken.keys() and all(torch.equal(after[key], unbroken[key]) for key in after)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert furthest(after, unbroken, ("model.", "ema.")) < 1e-5
