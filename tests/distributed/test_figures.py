"""Live figures on real ranks: norms and held-out losses that no mesh changes, profiles of the same steps on all."""

import re
import tempfile
import time
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor

from tests.distributed.ranks import run
from tests.distributed.test_long_runs import TINY, rows, train
from tests.run.test_figures import profiles

MODEL = "--model.width 32 --model.depth 2 --model.heads 4 --model.qk_norm true --parallel.device cpu".split()
FP32 = "--optimizer.name muon --optimizer.lr 0.1 --optimizer.ns_dtype fp32 --optimizer.wire_dtype fp32".split()
MESHES = {
    1: [[]],
    2: [[], ["--parallel.replicas", "2"], ["--parallel.tensor", "2"]],
    4: [["--parallel.replicas", "2"], ["--parallel.tensor", "2"]],
}


def norms_and_losses(mesh: list[str]) -> dict[str, float]:
    """Norms of an update, of drawn weights by drawn gradients, and held-out losses before it."""
    from dit_train import overlays
    from dit_train.data import sources
    from dit_train.model.flops import model_flops
    from dit_train.parallel import shard
    from dit_train.parallel.mesh import joined
    from dit_train.run import optimizer
    from dit_train.run.norms import Norms
    from dit_train.run.validation import HeldOut

    config = overlays.read([], [*MODEL, *FP32, *mesh, "--run.validate_count", "50", "--sample.batch", "8"])
    with joined(config.parallel) as world:
        data = sources.load(config.data)
        model = shard.build(config.model, config.parallel, data, world, torch.float32, seed=0)
        steps = optimizer.build(config.optimizer, model)
        for i, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(i)
            weight, gradient = 0.1 * torch.randn(2, *parameter.shape, generator=generator)
            place = (parameter.device_mesh, parameter.placements)
            parameter.detach().to_local().add_(distribute_tensor(weight, *place, src_data_rank=None).to_local())
            parameter.grad = distribute_tensor(gradient, *place, src_data_rank=None)
        heldout = HeldOut(config, data, world).loss(model)
        norms = Norms(steps)
        norms.before_update()
        steps.step()
        found = norms.read(norms.after_update(), 1.0)
    return found | heldout.by_time | {"heldout": heldout.mean, "flops": float(model_flops(model).total)}


def profiled(folder: Path) -> list[int]:
    """A run that is asked for a profile as it goes, by a file that rank 0 alone is let to see."""

    def touch(_, step):
        time.sleep(0.1)  # the file is looked at once a second
        if step == 3 and dist.get_rank() == 0:
            (folder / "run" / "profile").write_text("2")

    codes = [train(folder / "run", "--run.log_every", "2", "--train.steps", "24", change=touch)]
    return [*codes, *profiled_by_stop(folder)]


def profiled_by_stop(folder: Path) -> list[int]:
    """A run that is asked to stop while it is profiled."""

    def touch(_, step):
        time.sleep(0.1)
        if step == 3 and dist.get_rank() == 0:
            (folder / "run-stopped" / "stop").touch()

    return [train(folder / "run-stopped", "--run.profile", "3", "20", "--train.steps", "400", change=touch)]


def each(folder: Path) -> tuple[list[dict], list[int]]:
    found = [norms_and_losses(mesh) for mesh in MESHES[dist.get_world_size()]]
    return found, profiled(folder) if dist.get_world_size() == 2 else []


@cache
def found(ranks: int) -> tuple[Path, list]:
    folder = Path(tempfile.mkdtemp(prefix=f"figures{ranks}-"))
    (folder / "tiny.yaml").write_text(TINY)
    return folder, run(each, ranks, folder, timeout=200)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_norms_and_losses_are_those_of_one_process_on_every_mesh(ranks):
    ((expected,), _), *_ = found(1)[1]
    assert sum(key.startswith("update_norm/") for key in expected) == 10 and min(expected.values()) > 1e-3
    for of_rank, _ in found(ranks)[1]:
        for ours, mesh in zip(of_rank, MESHES[ranks], strict=True):
            # the update is of Newton-Schulz, which enlarges rounding
            assert ours == {
                key: pytest.approx(value, rel=2e-5 if key.startswith("update") else 1e-6)
                for key, value in expected.items()
            }, mesh


def test_a_file_has_the_same_steps_recorded_on_all_ranks():
    folder, answers = found(2)
    assert [codes for _, codes in answers] == [[0, 85]] * 2
    shown = profiles(folder)
    (steps,) = {steps for steps, _ in shown}
    assert shown == {(steps, "rank_0"): (2, 2), (steps, "rank_1"): (2, 2)}
    first, last = map(int, re.findall(r"\d+", steps))
    assert last == first + 1 and first >= 6 and not (folder / "run" / "profile").exists()
    assert all("data_wait_share_max" in row for row in rows(folder / "run")[1::2])


def test_a_stop_amid_a_profile_writes_what_there_is_on_all_ranks():
    folder, _ = found(2)
    (where,) = (folder / "run-stopped" / "profiles").iterdir()
    last = rows(folder / "run-stopped")[-1]["step"]
    assert where.name == f"steps_0000003-{last:07d}"
    assert sorted(path.name for path in where.iterdir()) == ["rank_0.json.gz", "rank_1.json.gz"]
