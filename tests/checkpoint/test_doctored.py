"""A doctored checkpoint is refused by name, and nothing that it holds is ever run."""

import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from dit_train.checkpoint import files, listing, manifest, metadata, reading
from dit_train.checkpoint.listing import Checkpoint
from dit_train.checkpoint.manifest import File
from dit_train.config import ConfigError, ParallelConfig
from dit_train.parallel.mesh import joined
from tests.checkpoint.trained import Trained

PART = "__0_0.distcp"


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    with joined(ParallelConfig(device="cpu")):
        yield


@pytest.fixture
def folder(tmp_path) -> Path:
    return Trained(0, 1).save(tmp_path, 1)


class Command:
    """Unpickled by anything that executes code, it leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def stored(folder: Path):
    return pickle.loads((folder / metadata.NAME).read_bytes())


def resign(folder: Path) -> None:
    """Sums and sizes as the doctored files have them: what a forger would do."""
    content = manifest.read(folder)
    names = [name for name in content.files if (folder / name).is_file()]
    found = {name: File((folder / name).stat().st_size, files.sha256(folder / name)) for name in names}
    manifest.write(folder, replace(content, files=found))


def doctor(folder: Path, changed) -> None:
    (folder / metadata.NAME).write_bytes(pickle.dumps(changed))
    resign(folder)


def refusal(folder: Path, *, untouched: bool = True) -> str:
    """How loading is refused, before any tensor is changed or while they are read."""
    other = Trained(1, 1)
    before = other.copy()
    found = listing.read(folder)
    reading.check_sums(found)
    with pytest.raises(ConfigError) as caught:
        reading.load(found, other.model, other.ema, other.optimizer)
    text = str(caught.value)
    assert "damaged or doctored checkpoint" in text and str(folder) in text and "\n" not in text
    assert not untouched or all(torch.equal(tensor, before[name]) for name, tensor in other.tensors().items())
    return text


def test_metadata_that_would_run_a_command(folder, tmp_path):
    changed = stored(folder)
    changed.planner_data = Command(tmp_path / "ran")
    doctor(folder, changed)
    assert "posix.system" in refusal(folder)
    assert not (tmp_path / "ran").exists()
    stored(folder)  # the bait works
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["builtins.eval", "torch.load", "torch.storage._load_from_bytes", "torch.hub.load"])
def test_metadata_that_names_what_no_tensor_needs(folder, name):
    module, _, function = name.rpartition(".")
    (folder / metadata.NAME).write_bytes(f"c{module}\n{function}\n(S'1'\ntR.".encode())
    resign(folder)
    assert name in refusal(folder)


@pytest.mark.parametrize("target", [b"ctorch\nSize\n", b"ctorch.distributed.checkpoint.metadata\nMetadata\n"])
def test_metadata_that_would_change_a_class_for_good(folder, target):
    # (None, {name: value}) given to BUILD sets attributes of whatever it is given to
    (folder / metadata.NAME).write_bytes(target + b"(N(dS'doctored'\nI1\nstb.")
    resign(folder)
    refusal(folder)
    assert not hasattr(torch.Size, "doctored") and not hasattr(dcp.Metadata, "doctored")
    assert not any(hasattr(known, "doctored") for known in metadata._KNOWN.values())


def test_an_entry_of_bytes(folder, tmp_path):
    changed = stored(folder)
    changed.state_dict_metadata["model.0.weight"] = BytesStorageMetadata()
    doctor(folder, changed)
    assert "BytesStorageMetadata" in refusal(folder)


def test_an_entry_that_is_no_tensor_by_another_known_name(folder):
    changed = stored(folder)
    changed.state_dict_metadata["model.0.weight"] = dcp.metadata.StorageMeta()
    doctor(folder, changed)
    assert "'model.0.weight' is no tensor" in refusal(folder)


def test_the_planner_loads_no_bytes_whatever_it_is_told(folder, tmp_path):
    """The second door: torch's own planner would unpickle them."""
    found = listing.read(folder)
    (folder / PART).write_bytes(pickle.dumps(Command(tmp_path / "ran")) + bytes(10_000))
    reader = reading._Reader(found, metadata.read(folder, found.manifest.files))
    read_metadata = reader.read_metadata

    def with_bytes(*_):
        told = read_metadata()
        told.state_dict_metadata["model.0.weight"] = BytesStorageMetadata()
        told.storage_data[MetadataIndex("model.0.weight")] = metadata.Place(PART, 0, 100)
        return told

    reader.read_metadata = with_bytes
    with pytest.raises(dcp.api.CheckpointException, match=r"model\.0\.weight is no tensor"):
        dcp.load({"model.0.weight": 0}, storage_reader=reader, planner=reading._Planner(flatten_state_dict=False))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "..", "", "a/../../x", "state.json", "absent"])
def test_a_path_that_leaves_the_folder(folder, path):
    (folder.parent / "x").write_bytes((folder / PART).read_bytes())
    changed = stored(folder)
    for info in changed.storage_data.values():
        info.relative_path = path
    doctor(folder, changed)
    assert "is no file of this checkpoint" in refusal(folder)


@pytest.mark.parametrize(
    ("field", "value"), [("offset", -1), ("offset", 1 << 40), ("length", 1 << 62), ("length", "9"), ("offset", 0.5)]
)
def test_a_place_beyond_its_file(folder, field, value):
    changed = stored(folder)
    setattr(changed.storage_data[next(iter(changed.storage_data))], field, value)
    doctor(folder, changed)
    assert "beyond the end" in refusal(folder)


def test_a_transform_that_torch_would_look_up(folder):
    changed = stored(folder)
    next(iter(changed.storage_data.values())).transform_descriptors = ["zstd"]
    doctor(folder, changed)
    assert "in a form" in refusal(folder)


def test_a_tensor_that_its_blocks_do_not_cover(folder):
    changed = stored(folder)
    changed.state_dict_metadata["model.0.weight"].chunks.clear()
    doctor(folder, changed)
    assert "'model.0.weight' is not covered" in refusal(folder)


def test_a_block_outside_of_its_tensor(folder):
    changed = stored(folder)
    changed.state_dict_metadata["model.0.bias"].chunks[0].sizes = torch.Size([14])
    doctor(folder, changed)
    assert "'model.0.bias' has a block outside of it" in refusal(folder)


def payload(folder: Path, value) -> None:
    """Put something else where the tensor model.0.bias lies."""
    changed = stored(folder)
    torch.save(value, folder / "payload")
    raw = (folder / "payload").read_bytes()
    (folder / "payload").unlink()
    info = changed.storage_data[MetadataIndex("model.0.bias", [0])]
    info.offset, info.length = (folder / PART).stat().st_size, len(raw)
    with (folder / PART).open("ab") as file:
        file.write(raw)
    doctor(folder, changed)


def test_a_tensor_that_would_run_a_command(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # a user's leftover must not open the door
    payload(folder, Command(tmp_path / "ran"))
    assert "posix.system" in refusal(folder, untouched=False)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("value", [{"a": 1}, torch.zeros(7), [torch.zeros(13)]], ids=["mapping", "size", "list"])
def test_something_else_in_the_place_of_a_tensor(folder, value):
    payload(folder, value)
    refusal(folder, untouched=False)


def test_no_tensor_is_read_in_a_way_that_may_run_code(folder, monkeypatch):
    loaded, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **how: loaded.append(how) or load(*args, **how))
    other = Trained(1, 1)
    reading.load(listing.read(folder), other.model, other.ema, other.optimizer)
    reading.load_weights(listing.read(folder), other.model, "ema")
    assert len(loaded) > 4 and all(how["weights_only"] is True for how in loaded)


def test_metadata_of_nonsense(folder):
    for raw in (b"", b"\x80\x04.", b"\x80\x04N.", b"garbage", b"I1\n.", b"\x80\x05\x96" + b"\xff" * 8, b"(d."):
        (folder / metadata.NAME).write_bytes(raw)
        resign(folder)
        refusal(folder)


def test_every_cut_and_many_flips_of_the_metadata_are_one_line_or_harmless(folder):
    found = listing.read(folder)
    raw = (folder / metadata.NAME).read_bytes()
    sound = metadata.read(folder, found.manifest.files)
    refused = 0
    for i in range(0, len(raw), 11):
        for changed in (raw[:i], raw[:i] + bytes([raw[i] ^ 1 << i % 8]) + raw[i + 1 :]):
            (folder / metadata.NAME).write_bytes(changed)
            try:
                assert isinstance(metadata.read(folder, found.manifest.files), type(sound))
            except ConfigError as error:
                refused += 1
                assert "\n" not in str(error)
    assert refused > 0.6 * 2 * (len(raw) // 11)


def test_a_folder_as_torch_itself_writes_it_is_read(folder):
    trained = Trained(0, 1)
    plain = folder.parent / "plain"
    dcp.save(trained._tensors(), checkpoint_id=plain)
    names = {path.name: File(path.stat().st_size, files.sha256(path)) for path in plain.iterdir()}
    found = Checkpoint(plain, replace(listing.read(folder).manifest, files=names))
    other = Trained(1, 1)
    reading.load(found, other.model, other.ema, other.optimizer)
    assert all(torch.equal(tensor, trained.tensors()[name]) for name, tensor in other.tensors().items())


def test_another_number_of_parameter_groups_is_one_line(folder):
    content = manifest.read(folder)
    manifest.write(folder, replace(content, optimizer_steps=[1]))
    other = Trained(1, 1)
    with pytest.raises(ConfigError, match="1 parameter groups instead of 2"):
        reading.load(listing.read(folder), other.model, other.ema, other.optimizer)
