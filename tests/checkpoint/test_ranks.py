"""Saving and loading on two FSDP2 ranks: every bit, whatever training does meanwhile, and of one mind on a failure."""

import pickle
import shutil
import time
from functools import partial, update_wrapper
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import optimizers
from dit_train.checkpoint import contents, listing, metadata, reading
from dit_train.checkpoint.manifest import RunState
from dit_train.checkpoint.saving import Saver
from dit_train.checkpoint.writing import Retention
from dit_train.config import ConfigError, ModelConfig, ParallelConfig
from dit_train.data.sources import Summary
from dit_train.parallel import shard
from dit_train.parallel.mesh import joined
from dit_train.parallel.shard import local
from dit_train.run.ema import EMA
from tests.checkpoint.trained import Trained, full_disk, names
from tests.distributed.ranks import run, run_case

PARTS = ("__0_0.distcp", "__1_0.distcp")


def refusal(action) -> str:
    """What a rank is told, which all are told alike."""
    with pytest.raises(ConfigError) as caught:
        action()
    told: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(told, str(caught.value))
    assert len(set(told)) == 1 and "\n" not in told[0], told
    return told[0]


def agreed(values: list[str]) -> None:
    told: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(told, values)
    assert told.count(told[0]) == len(told), told


def case_weights_that_change_while_they_are_written_come_back_as_they_were(folder: Path):
    trained, other = Trained(0, 3, sharded=True), Trained(1, 1, sharded=True)
    before = trained.copy()
    with trained.saver(folder, background=True) as saver:
        wait = saver.snapshot.wait
        saver.snapshot.wait = lambda: (time.sleep(0.5), wait())  # several steps pass before the first byte is written
        saver.save(RunState(step=3))
        for step in range(3, 8):  # gathers and reduces over the other group at the same time
            trained.step(step)
    assert not torch.equal(trained.tensors()["model.0.weight"], before["model.0.weight"])
    found = listing.find_latest(folder)
    assert {path.name for path in found.folder.iterdir()} == {*PARTS, ".metadata", "state.json"}
    reading.check_sums(found)
    reading.load(found, other.model, other.ema, other.optimizer)
    for name, tensor in other.tensors().items():
        assert torch.equal(tensor, before[name]), name


def case_training_collectives_and_saves_do_not_meet(folder: Path):
    trained = Trained(0, 1, sharded=True)
    with trained.saver(folder, background=True, keep=3) as saver:
        for step in range(1, 13):
            saver.save(RunState(step=step))
            for _ in range(4):
                trained.step(step)
                packed = torch.full((3,), float(dist.get_rank() + 1))
                dist.all_reduce(packed)
                assert packed.tolist() == [3.0] * 3
            saver.poll()
    assert names(folder) == ["step_0000010", "step_0000011", "step_0000012"]


def case_a_disk_that_is_full_on_one_rank_is_a_failed_save_on_all(folder: Path):
    for background in (False, True):
        run_folder, said = folder / str(background), []
        trained = Trained(0, 1, sharded=True, width=600)
        with trained.saver(run_folder, background=background, said=said) as saver:
            saver.save(RunState(step=1))
            saver.finish()
            with full_disk(20_000 if dist.get_rank() == 1 else 1 << 40):
                saver.save(RunState(step=2))
                saver.finish()
            agreed([line for line in said if "could not be saved" in line])
            assert "File too large" in said[-1] and names(run_folder) == ["step_0000001"]
            dist.barrier()  # before the next save, both have looked
            saver.save(RunState(step=3))
        assert names(run_folder) == ["step_0000001", "step_0000003"]


def case_a_last_save_that_fails_on_one_rank_raises_on_all(folder: Path):
    trained = Trained(0, 1, sharded=True, width=600)

    def train() -> None:
        with (
            full_disk(20_000 if dist.get_rank() == 1 else 1 << 40),
            trained.saver(folder, background=True) as saver,
        ):
            saver.save(RunState(step=1))

    assert "the last checkpoint could not be saved" in refusal(train)
    assert names(folder) == []


def case_a_flipped_bit_is_found_by_the_rank_that_reads_it_and_told_to_all(folder: Path):
    Trained(0, 1, sharded=True).save(folder, 1)
    found = listing.find_latest(folder)
    for name in (*PARTS, metadata.NAME):
        dist.barrier()
        path = found.folder / name
        if dist.get_rank() == 0:
            shutil.copy(path, folder / "kept")
            raw = path.read_bytes()
            path.write_bytes(raw[:-9] + bytes([raw[-9] ^ 4]) + raw[-8:])
        dist.barrier()
        text = refusal(lambda: reading.check_sums(found))
        assert f"{found.folder}: damaged checkpoint ({name} is not as it was written" in text
        if dist.get_rank() == 0:
            shutil.copy(folder / "kept", path)
    dist.barrier()
    reading.check_sums(found)


def case_metadata_that_one_rank_sees_doctored_is_refused_on_all(folder: Path):
    Trained(0, 1, sharded=True).save(folder, 1)
    found = listing.find_latest(folder)
    read = metadata.read

    def doctored(where, files):
        (folder / metadata.NAME).write_bytes(pickle.dumps(print))
        return read(folder, files)

    metadata.read = doctored if dist.get_rank() == 1 else read
    other = Trained(1, 1, sharded=True)
    try:
        assert "builtins.print" in refusal(lambda: reading.load(found, other.model, other.ema, other.optimizer))
    finally:
        metadata.read = read


def meshed(settings: ParallelConfig, seed: int) -> tuple[nn.Module, EMA, torch.optim.Optimizer]:
    """A DiT over this mesh whose average and moments are numbers of their own."""
    images = Summary(channels=1, image_size=8, num_classes=10, train_count=20, heldout_count=5)
    with joined(settings) as world:
        dit = shard.build(ModelConfig(width=32, depth=1, heads=2), settings, images, world, torch.float32, seed)
    optimizer = optimizers.AdamW(optimizers.param_groups(dit), lr=0.1)
    parts = (dit, EMA(dit, 0.5), optimizer)
    for number, (name, tensor) in enumerate(sorted(contents.tensors(*parts).items())):
        if name.startswith("optimizer."):
            local(tensor).fill_(number + seed)
    return parts


def case_replicas_and_tensor_ranks_save_in_the_background_what_plain_shards_load(folder: Path):
    for name, settings in {"replicas": {"replicas": 2}, "tensor": {"tensor": 2}}.items():
        parts = meshed(ParallelConfig(device="cpu", **settings), 0)
        before = {key: tensor.full_tensor().clone() for key, tensor in contents.tensors(*parts).items()}
        retention = Retention(2)
        with Saver(folder / name, *parts, fixed={}, retention=retention, background=True, say=print) as saver:
            saver.save(RunState(step=1))
            for tensor in contents.tensors(*parts).values():
                local(tensor).zero_()
        other = meshed(ParallelConfig(device="cpu"), 1)
        reading.load(listing.find_latest(folder / name), *other)
        for key, tensor in contents.tensors(*other).items():
            assert torch.equal(tensor.full_tensor(), before[key]), (name, key)


CASES = [value for name, value in list(globals().items()) if name.startswith("case_")]


def whole(trained: Trained) -> dict[str, torch.Tensor]:
    return {name: tensor.full_tensor() for name, tensor in trained._tensors().items()}


def every_case(folder: Path) -> dict[str, torch.Tensor]:
    """All of the cases, then a checkpoint; what it holds."""
    for case in CASES:
        run_case(update_wrapper(partial(case, folder / case.__name__), case))
        dist.barrier()
    trained = Trained(0, 3, sharded=True)
    trained.save(folder / "saved", 3, background=True)
    return whole(trained)


def load(folder: Path) -> dict[str, torch.Tensor]:
    other, found = Trained(1, 1, sharded=True), listing.find_latest(folder)
    reading.check_sums(found)
    reading.load(found, other.model, other.ema, other.optimizer)
    return whole(other)


def test_two_ranks_are_of_one_mind_and_three_load_their_uneven_rows(tmp_path):
    """Thirteen rows: 7 and 6 when they are saved, 5, 5 and 3 when they are loaded."""
    saved = run(every_case, 2, tmp_path, timeout=240)[0]
    for loaded in run(load, 3, tmp_path / "saved", timeout=120):
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
