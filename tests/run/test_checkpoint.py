"""Saves are committed whole, old ones go only afterwards, and loading gives every bit back."""

import json

import pytest
import torch
from torch import nn

import optimizers
from dit_train.config import ConfigError, ParallelConfig
from dit_train.parallel.mesh import joined
from dit_train.run import checkpoint, faults
from dit_train.run.checkpoint import RunState
from dit_train.run.ema import EMA


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    with joined(ParallelConfig(device="cpu")):
        yield


class Trained:
    """A small model that has made some steps."""

    def __init__(self, seed: int, steps: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
        self.optimizer = optimizers.PeriodicRowMuon(optimizers.param_groups(self.model), lr=0.1, period=3)
        self.ema = EMA(self.model, 0.5)
        for step in range(steps):
            self.model(torch.randn(4, 6)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.ema.update(step)

    def save(self, run, step, keep=2):
        parts = (self.model, self.ema, self.optimizer)
        return checkpoint.save(run, *parts, RunState(step=step, train_seconds=0.1), fixed={"a": 1}, keep=keep)

    def tensors(self):
        return checkpoint._tensors(self.model, self.ema, self.optimizer)


def names(run):
    return sorted(path.name for path in checkpoint.folder_of(run).iterdir())


def test_every_tensor_and_the_phase_come_back_bit_for_bit(tmp_path):
    saved, other = Trained(0, 4), Trained(1, 1)
    folder = saved.save(tmp_path, 4)
    found = checkpoint.find_latest(tmp_path)
    assert (found.folder, found.state, found.fixed) == (folder, RunState(4, 0.1), {"a": 1})
    checkpoint.load(found, other.model, other.ema, other.optimizer)
    assert saved.tensors().keys() == other.tensors().keys()
    for name, tensor in saved.tensors().items():
        assert torch.equal(tensor, other.tensors()[name]), name
    assert [group["step"] for group in other.optimizer.param_groups] == [4, 4]


def test_only_the_newest_stay_and_a_cut_off_save_leaves_nothing(tmp_path):
    run = Trained(0, 1)
    run.save(tmp_path, 5)
    (checkpoint.folder_of(tmp_path) / "step_0000007.tmp").mkdir()
    (checkpoint.folder_of(tmp_path) / "step_0000002_mine").mkdir()
    for step in (900, 1000, 10_000_000):
        run.save(tmp_path, step)
    assert names(tmp_path) == ["step_0000002_mine", "step_0001000", "step_10000000"]
    assert checkpoint.find_latest(tmp_path).state.step == 10_000_000


def test_nothing_but_tensors_goes_into_the_pickled_part(tmp_path):
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    folder = Trained(0, 1).save(tmp_path, 1)
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata.values()
    assert entries and all(isinstance(entry, TensorStorageMetadata) for entry in entries)


def test_a_changed_file_is_noticed(tmp_path):
    folder = Trained(0, 1).save(tmp_path, 1)
    part = next(folder.glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="damaged"):
        checkpoint.find_latest(tmp_path)


def test_no_checkpoint_is_none(tmp_path):
    assert checkpoint.find_latest(tmp_path) is None
    assert json.dumps(vars(RunState()))


@pytest.mark.parametrize(("largest", "scale"), [(1.0, 1 / 5), (100.0, 1.0)])
def test_clipping_scales_to_the_norm_and_never_up(largest, scale):
    model = nn.Linear(2, 1)
    model.weight.grad, model.bias.grad = torch.tensor([[3.0, 0.0]]), torch.tensor([4.0])
    norm = faults.gradient_norm(model)
    assert norm.item() == 5
    faults.clip(model, largest, norm)
    assert torch.allclose(model.weight.grad, torch.tensor([[3.0 * scale, 0]]), rtol=1e-5)
    assert torch.allclose(model.bias.grad, torch.tensor([4.0 * scale]), rtol=1e-5)
