"""Saves are committed whole or not at all, old ones go only afterwards, and loading gives every bit back."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from dit_train.checkpoint import files, listing, manifest, metadata, reading
from dit_train.checkpoint.manifest import RunState
from dit_train.checkpoint.snapshot import Snapshot
from dit_train.config import ConfigError, ParallelConfig
from dit_train.parallel.mesh import joined
from tests.checkpoint.trained import Trained, full_disk, names

both = pytest.mark.parametrize("background", [False, True], ids=["between steps", "in the background"])


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    with joined(ParallelConfig(device="cpu")):
        yield


@both
def test_every_tensor_and_the_phase_come_back_bit_for_bit(tmp_path, background):
    saved, other = Trained(0, 4), Trained(1, 1)
    folder = saved.save(tmp_path, 4, background=background)
    found = listing.find_latest(tmp_path)
    assert (found.folder, found.state, found.fixed) == (folder, RunState(4, 0.1), {"a": 1})
    reading.load(found, other.model, other.ema, other.optimizer)
    assert saved.tensors().keys() == other.tensors().keys()
    for name, tensor in saved.tensors().items():
        assert torch.equal(tensor, other.tensors()[name]), name
    assert [group["step"] for group in other.optimizer.param_groups] == [4, 4]


def test_steps_after_a_save_was_asked_for_are_not_in_it(tmp_path, monkeypatch):
    saved, other = Trained(0, 4), Trained(1, 1)
    before = saved.copy()
    with saved.saver(tmp_path, background=True) as saver:
        saver.snapshot.wait = lambda: [saved.step(step) for step in range(4, 6)]  # while the writer has not begun
        saver.save(RunState(step=4))
    reading.load(listing.find_latest(tmp_path), other.model, other.ema, other.optimizer)
    for name, tensor in other.tensors().items():
        assert torch.equal(tensor, before[name]), name
    assert not torch.equal(saved.tensors()["model.0.weight"], before["model.0.weight"])


@both
def test_only_the_newest_stay_and_a_cut_off_save_leaves_nothing(tmp_path, background):
    run = Trained(0, 1)
    run.save(tmp_path, 5)
    (listing.folder_of(tmp_path) / "step_0000007.tmp").mkdir()
    (listing.folder_of(tmp_path) / "step_0000002_mine").mkdir()
    run.save(tmp_path, 900, 1000, 10_000_000, background=background)
    assert names(tmp_path) == ["step_0000002_mine", "step_0001000", "step_10000000"]
    assert listing.find_latest(tmp_path).state.step == 10_000_000


def test_every_nth_stays_for_good_and_others_are_counted_over_starts(tmp_path):
    for steps in ((10, 20), (30, 40, 50), (60,)):  # three starts
        Trained(0, 1).save(tmp_path, *steps, keep=1, keep_every=20)
    assert names(tmp_path) == ["step_0000020", "step_0000040", "step_0000060"]
    Trained(0, 1).save(tmp_path, 70, keep=1, keep_every=0)
    assert names(tmp_path) == ["step_0000070"]


def test_a_run_that_went_back_replaces_the_checkpoint_of_a_step(tmp_path):
    Trained(0, 2).save(tmp_path, 2)
    again = Trained(3, 2)
    again.save(tmp_path, 2)
    other = Trained(1, 1)
    reading.load(listing.find_latest(tmp_path), other.model, other.ema, other.optimizer)
    assert torch.equal(other.tensors()["ema.1.bias"], again.tensors()["ema.1.bias"])
    assert names(tmp_path) == ["step_0000002"]


def test_nothing_but_tensors_goes_into_the_pickled_part_and_no_path(tmp_path):
    trained = Trained(0, 1)
    folder = trained.save(tmp_path, 1)
    stored = metadata.read(folder, manifest.read(folder).files)
    assert {name: tensor.size for name, tensor in stored.items()} == {
        name: tuple(tensor.shape) for name, tensor in trained.tensors().items()
    }
    assert str(tmp_path).encode() not in (folder / metadata.NAME).read_bytes()


@both
def test_sums_taken_while_writing_are_those_of_the_files(tmp_path, background):
    folder = Trained(0, 1, width=600).save(tmp_path, 1, background=background)
    written = manifest.read(folder).files
    assert written.keys() == {path.name for path in folder.iterdir()} - {manifest.NAME} != set()
    for name, file in written.items():
        assert (file.bytes, file.sha256) == ((folder / name).stat().st_size, files.sha256(folder / name))


@both
def test_files_and_folders_are_on_the_disk_before_the_rename_and_the_rename_before_older_ones_go(
    tmp_path, monkeypatch, background
):
    done, fsync, rename, rmtree = [], os.fsync, Path.rename, shutil.rmtree

    def name(path: Path) -> str:
        return str(Path(path).relative_to(tmp_path))

    def synced(handle: int) -> None:
        fsync(handle)
        done.append(f"sync {name(os.readlink(f'/proc/self/fd/{handle}'))}")

    trained = Trained(0, 1)
    trained.save(tmp_path, 1)
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", lambda a, b: done.append(f"rename {name(a)}") or rename(a, b))
    monkeypatch.setattr(
        shutil, "rmtree", lambda path, **how: done.append(f"remove {name(path)}") or rmtree(path, **how)
    )
    trained.save(tmp_path, 2, keep=1, background=background)
    partial = "checkpoints/step_0000002.tmp"
    assert done == [
        f"sync {partial}/__0_0.distcp",
        f"sync {partial}/.metadata.tmp",
        f"rename {partial}/.metadata.tmp",
        f"sync {partial}/.state.json.{os.getpid()}.tmp",
        f"sync {partial}",
        f"rename {partial}",
        "sync checkpoints",
        "sync .",
        "rename checkpoints/step_0000001",
        "remove checkpoints/step_0000001.old.tmp",
    ]


@both
def test_a_full_disk_leaves_the_checkpoint_before_and_the_run_and_the_next_save_alive(tmp_path, background):
    trained, said = Trained(0, 1, width=600), []
    with trained.saver(tmp_path, background=background, said=said) as saver:
        saver.save(RunState(step=1))
        saver.finish()
        with full_disk(20_000):
            saver.save(RunState(step=2))
            saver.finish()
        assert names(tmp_path) == ["step_0000001"]
        trained.step(2)
        saver.save(RunState(step=3))
    assert names(tmp_path) == ["step_0000001", "step_0000003"]
    failed = [line for line in said if "could not be saved" in line]
    assert len(failed) == 1 and "File too large" in failed[0] and "\n" not in failed[0]
    assert listing.find_latest(tmp_path).state.step == 3


def test_a_save_that_lies_on_the_disk_in_part_is_not_committed(tmp_path, monkeypatch):
    trained, said, write = Trained(0, 1), [], manifest.write

    def cut(folder: Path, content: manifest.Manifest) -> None:
        write(folder, content)
        name, file = next(iter(content.files.items()))
        os.truncate(folder / name, file.bytes - 1)

    with trained.saver(tmp_path, keep=1, said=said) as saver:
        saver.save(RunState(step=1))
        monkeypatch.setattr(manifest, "write", cut)
        saver.save(RunState(step=2))
        assert names(tmp_path) == ["step_0000001"] and "step_0000002 could not be saved" in said[-1]
        monkeypatch.undo()
        saver.save(RunState(step=3))
    assert names(tmp_path) == ["step_0000003"]


@both
def test_a_last_save_that_fails_is_said_by_the_exit(tmp_path, background):
    trained = Trained(0, 1, width=600)
    trained.save(tmp_path, 1)
    with (
        pytest.raises(ConfigError, match=r"the last checkpoint could not be saved \(.*File too large"),
        full_disk(20_000),
        trained.saver(tmp_path, background=background) as saver,
    ):
        saver.save(RunState(step=2))
    assert names(tmp_path) == ["step_0000001"]


def test_a_folder_that_cannot_be_made_is_a_failed_save_and_no_hang(tmp_path):
    (tmp_path / "checkpoints").write_text("a file in the way")
    with pytest.raises(ConfigError, match="could not be saved"), Trained(0, 1).saver(tmp_path) as saver:
        saver.save(RunState(step=1))


def test_an_old_one_that_cannot_be_pruned_does_not_cost_the_new_checkpoint(tmp_path, monkeypatch):
    trained, said = Trained(0, 1), []
    monkeypatch.setattr(listing, "discard", lambda folder: folder.rename("/nowhere/at/all"))
    with trained.saver(tmp_path, keep=1, said=said) as saver:
        saver.save(RunState(step=1))
        saver.save(RunState(step=2))
    assert names(tmp_path) == ["step_0000001", "step_0000002"]
    assert any("older checkpoints could not be removed" in line for line in said)


def test_host_memory_stays_flat_over_twenty_saves(tmp_path):
    trained, pointers = Trained(0, 1, width=64), set()
    with trained.saver(tmp_path, background=True) as saver:
        for step in range(1, 21):
            trained.step(step)
            saver.save(RunState(step=step))
            pointers.add(tuple(buffer.data_ptr() for buffer in saver.snapshot.host.values()))
        assert len(pointers) == 1
        held = sum(buffer.untyped_storage().nbytes() for buffer in saver.snapshot.host.values())
        assert held == sum(tensor.nbytes for tensor in trained.tensors().values())
    assert names(tmp_path) == ["step_0000019", "step_0000020"]


def test_memory_that_a_host_lacks_is_missed_before_the_first_step():
    with pytest.raises(ConfigError, match=r"run\.async_checkpoint: no 4503599\.6 GB of host memory .*set it to false"):
        Snapshot({"a": torch.zeros(1).expand(1 << 50)})


@pytest.mark.gpu
def test_a_copy_of_a_gpus_tensor_is_pinned_and_taken_before_what_is_queued_next():
    weight = torch.zeros(1 << 26, device="cuda")
    snapshot = Snapshot({"a": weight})
    for value in (1.0, 2.0, 3.0):
        weight.fill_(value)
        snapshot.take({"a": weight})
        weight.fill_(-1.0)
        snapshot.wait()
        assert snapshot.host["a"].is_pinned() and (snapshot.host["a"] == value).all()


def test_an_error_in_training_comes_through_and_the_save_in_flight_is_committed(tmp_path):
    trained = Trained(0, 1)
    with pytest.raises(KeyError, match="training"), trained.saver(tmp_path, background=True) as saver:
        saver.save(RunState(step=1))
        raise KeyError("training")
    assert names(tmp_path) == ["step_0000001"]


def test_no_checkpoint_is_none(tmp_path):
    assert listing.find_latest(tmp_path) is None
