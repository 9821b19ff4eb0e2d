"""Generated images on disk: the same bytes for any number of ranks, in one go or in several."""

import io
import json
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from eval import image_parts, writing
from eval.generate import generate
from eval.images import open_images
from eval.ranks import from_main
from eval.writing import Writer, read_settings, write_images
from tests.distributed.ranks import run

N, BATCH = 97, 16  # 7 batches, the last of one image: neither 2 nor 3 ranks share them evenly
KINDS = ("folder", "a.npz", "a.zip")
SETTINGS = {"checkpoint": "abc", "sampler": {"name": "heun", "steps": 18}, "guidance": 1.5}


def numbered(indices):
    """uint8 [B, 3, 4, 6] that are functions of their index alone."""
    rows = [torch.randint(256, (3, 4, 6), generator=torch.Generator().manual_seed(int(i))) for i in indices]
    return torch.stack(rows).to(torch.uint8)


class Model:
    """A small network whose fp32 outputs are stored bit by bit, and depend on what else is in the batch."""

    def __init__(self, fails_at=None):
        generator = torch.Generator().manual_seed(0)
        self.kernel, self.dense = (torch.randn(s, generator=generator) for s in ((8, 1, 3, 3), (8 * 64, 64)))
        self.calls, self.fails_at = [], fails_at

    def __call__(self, indices):
        if len(self.calls) == self.fails_at:
            raise InterruptedError
        self.calls.append(indices.tolist())
        noise = torch.stack([torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(int(i))) for i in indices])
        hidden = torch.nn.functional.conv2d(noise, self.kernel, padding=1).relu().flatten(1)
        made = (hidden @ self.dense).view(-1, 1, 8, 8) + noise.mean()
        return made.view(torch.uint8)  # [B, 1, 8, 32]: the four bytes of each number


def stage(root, steps):
    """Each step (name, first round that fails or None) for every kind; the batches that this rank was asked for."""
    torch.set_num_threads(1)
    found = {}
    for name, fails_at in steps:
        for kind in KINDS:
            model = Model(fails_at)
            labels = torch.arange(N) % 10 if kind == "a.npz" else None
            made = None
            try:
                made = write_images(model, f"{root}/{name}/{kind}", torch.arange(N), BATCH, SETTINGS, labels=labels)
            except InterruptedError:
                assert fails_at is not None
            found[name, kind] = (made, model.calls)
    return found


def stage_and_failures(root, steps):
    return stage(root, steps), failures(root)


def failures(root):
    """What this rank raises where one rank meets something bad; afterwards all can go on."""

    def error(function, *args, **how):
        try:
            function(*args, **how)
        except Exception as raised:
            return f"{type(raised).__name__}: {raised}"

    indices = torch.arange(9)

    def lossy_disk():
        writer = Writer(f"{root}/lost", indices, 2, {})
        for chosen, pixels in generate(numbered, indices, 2, done=writer.done):
            if dist.get_rank() == 0:
                writer.write(chosen, pixels)
        writer.finish()

    found = {"other settings": error(write_images, numbered, f"{root}/one go/folder", torch.arange(N), BATCH, {"a": 1})}
    found["lost"] = error(lossy_disk)
    found["no file"] = error(from_main, Path(f"{root}/nowhere").read_bytes)
    found["no key"] = error(from_main, {}.popitem)
    found["all"] = from_main(lambda: dist.get_rank() + 5)
    images = open_images(f"{root}/one go/a.npz")
    reports = []
    mine = list(images.batches(torch.arange(N), BATCH, progress=lambda *counts: reports.append(counts)))
    found["read"] = ([i.tolist() for i, _ in mine], torch.cat([x for _, x in mine]).numpy(), reports, images.sha256)
    return found


def contents(path):
    """What lies at a path: names and bytes."""
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return {file.name: file.read_bytes() for file in files if file.is_file()}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """One go on 1, 2 and 3 ranks, and three generations that were interrupted and went on with other numbers."""
    root = tmp_path_factory.mktemp("written")
    found = {("one", 1): run(stage, 1, str(root), [("one go", None), ("1 then 3", 3)])}
    three = run(stage_and_failures, 3, str(root), [("1 then 3", None), ("3 go", None), ("3 then 2", 1)])
    found["three", 3], failed = [steps for steps, _ in three], [failure for _, failure in three]
    found["two", 2] = run(stage, 2, str(root), [("3 then 2", None), ("2 go", None), ("2 then 1", 2)])
    found["last", 1] = run(stage, 1, str(root), [("2 then 1", None), ("one go", None)])
    return root, found, failed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["2 go", "3 go", "1 then 3", "3 then 2", "2 then 1"])
def test_any_number_of_ranks_in_one_go_or_in_two_writes_the_same_bytes(written, name, kind):
    root = written[0]
    assert contents(root / name / kind) == contents(root / "one go" / kind)
    assert sorted(file.name for file in (root / name).iterdir()) == [
        "a.npz", "a.npz.json", "a.zip", "a.zip.json", "folder",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("key", "name", "made", "rounds"),
    [
        (("three", 3), "1 then 3", N - 3 * BATCH, 2),  # batches 3..6 on three ranks
        (("two", 2), "3 then 2", N - 3 * BATCH, 2),  # one round of three was done
        (("last", 1), "2 then 1", N - 4 * BATCH, 3),
        (("last", 1), "one go", 0, 0),  # all was there
    ],
)
def test_only_batches_that_are_missing_are_made_again_composed_as_they_were(written, kind, key, name, made, rounds):
    ranks = [found[name, kind] for found in written[1][key]]
    assert [count for count, _ in ranks] == [made] * key[1]
    assert [len(calls) for _, calls in ranks] == [rounds] * key[1]
    asked = [call for _, calls in ranks for call in calls if call != [0] * BATCH]
    batches = [[*range(first, min(first + BATCH, N))] for first in range(0, N, BATCH)]
    left = [batch for batch in batches if batch[0] >= N - made]
    assert sorted(asked) == [batch + [0] * (BATCH - len(batch)) for batch in left]


def test_what_was_written_reads_back_as_it_was_made(written):
    root = written[0]
    torch.set_num_threads(1)
    whole = torch.cat([x for _, x in generate(Model(), torch.arange(N), BATCH)])
    for kind in KINDS:
        images = open_images(root / "one go" / kind)
        assert torch.equal(images.batch(torch.arange(N)), whole)
    with np.load(root / "one go" / "a.npz") as file:
        assert (file["arr_0"].shape, file["arr_0"].dtype) == ((N, 8, 32, 1), np.uint8)
        assert file["arr_1"].tolist() == [i % 10 for i in range(N)]
    assert open_images(root / "one go" / "a.npz").labels.tolist() == [i % 10 for i in range(N)]
    assert Image.open(root / "one go" / "folder" / "000042.png").mode == "L"


def test_what_rank_0_finds_wrong_is_raised_on_every_rank(written):
    root, _, failed = written
    refused = f"ValueError: {root}/one go/folder: was begun with a = absent, now it is 1; go on with the same settings"
    assert all(found["other settings"].startswith(refused) for found in failed)
    lost = f"RuntimeError: {root}/lost: 5 of 9 images are missing, first 2: do all ranks see this disk?"
    assert [found["lost"].replace("on rank 0: ", "") for found in failed] == [lost] * 3
    kinds = {name: [found[name].partition(":")[0] for found in failed] for name in ("no file", "no key")}
    assert kinds == {
        "no file": ["FileNotFoundError", "OSError", "OSError"],  # so that a command ends with the same code everywhere
        "no key": ["KeyError", "RuntimeError", "RuntimeError"],
    }
    assert [found["all"] for found in failed] == [5] * 3


def test_ranks_read_their_shares_of_a_set_and_hash_all_of_it(written):
    root, _, failed = written
    images = open_images(root / "one go" / "a.npz")
    read = [found["read"] for found in failed]
    assert sorted(i for dealt, *_ in read for batch in dealt for i in batch) == list(range(N))
    assert [len(dealt) for dealt, *_ in read] == [3, 2, 2]
    for dealt, pixels, reports, digest in read:
        np.testing.assert_array_equal(pixels, images.batch(torch.tensor([i for batch in dealt for i in batch])))
        assert reports == [(48, N), (96, N), (N, N)] and digest == images.sha256


# --- one rank


def write(path, settings=SETTINGS, count=9, batch=4, images=numbered, **how):
    return write_images(images, path, torch.arange(count), batch, settings, **how)


@pytest.mark.parametrize("name", ["a", "a.zip", "a.npz"])
def test_grey_is_expanded_only_when_asked_and_colour_stays(tmp_path, name):
    write(tmp_path / name)
    assert torch.equal(open_images(tmp_path / name).batch(torch.arange(9)), numbered(range(9)))
    write(tmp_path / f"grey {name}", images=lambda i: numbered(i)[:, :1], rgb=True)
    made = open_images(tmp_path / f"grey {name}")
    assert made.shape == (3, 4, 6)
    assert torch.equal(made.batch(torch.arange(9)), numbered(range(9))[:, :1].expand(-1, 3, -1, -1))


def test_an_array_is_in_the_order_of_the_indices_and_files_are_named_by_index(tmp_path):
    indices = torch.tensor([1_000_007, 3, 12])
    write_images(numbered, tmp_path / "a.npz", indices, 2, {})
    assert torch.equal(open_images(tmp_path / "a.npz").batch(torch.arange(3)), numbered(indices))
    write_images(numbered, tmp_path / "a.zip", indices, 2, {})
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert archive.namelist() == ["1000007.png", "000003.png", "000012.png"]
        pixels = np.asarray(Image.open(io.BytesIO(archive.read("000012.png"))))
    np.testing.assert_array_equal(pixels, numbered([12])[0].permute(1, 2, 0))


@pytest.mark.parametrize("name", ["a", "a.zip"])
def test_half_written_files_are_made_again(tmp_path, name):
    with pytest.raises(InterruptedError):
        write(tmp_path / name, images=Failing(2))
    place = tmp_path / name if name == "a" else tmp_path / "a.zip.parts"
    cut, temporary = place / "000005.png", place / ".000008.png.7.tmp"
    cut.write_bytes(cut.read_bytes()[:-1])
    temporary.write_bytes(b"half")
    images = Failing()
    assert write(tmp_path / name, images=images) == 5
    assert images.calls == [[4, 5, 6, 7], [8, 0, 0, 0]]
    assert not temporary.exists()
    assert torch.equal(open_images(tmp_path / name).batch(torch.arange(9)), numbered(range(9)))


class Failing:
    def __init__(self, at=None):
        self.calls, self.at = [], at

    def __call__(self, indices):
        if len(self.calls) == self.at:
            raise InterruptedError
        self.calls.append(indices.tolist())
        return numbered(indices)


def test_a_cut_batch_is_made_again_and_a_damaged_one_is_named(tmp_path):
    with pytest.raises(InterruptedError):
        write(tmp_path / "a.npz", images=Failing(2))
    shutil.copytree(tmp_path / "a.npz.parts", tmp_path / "b.npz.parts")
    part = tmp_path / "a.npz.parts" / "batch-000000.npz"
    whole = part.read_bytes()
    part.write_bytes(whole[:-30])
    images = Failing()
    assert write(tmp_path / "a.npz", images=images) == 5
    assert images.calls == [[0, 1, 2, 3], [8, 0, 0, 0]]
    at = whole.index(numbered([0])[0].permute(1, 2, 0).numpy().tobytes()[:20])
    (tmp_path / "b.npz.parts" / "batch-000000.npz").write_bytes(whole[:at] + b"\0" * 8 + whole[at + 8 :])
    with pytest.raises(ValueError, match=r"batch-000000.npz is damaged .*: remove it and generate again"):
        write(tmp_path / "b.npz")
    assert not (tmp_path / "b.npz").exists()


def test_a_part_of_other_images_counts_for_nothing_and_one_of_another_shape_is_named(tmp_path):
    with pytest.raises(InterruptedError):
        write(tmp_path / "a.npz", images=Failing(2))
    place = tmp_path / "a.npz.parts"
    shutil.copy(place / "batch-000000.npz", place / "batch-000001.npz")
    images = Failing(1)
    with pytest.raises(InterruptedError):
        write(tmp_path / "a.npz", images=images)
    assert images.calls == [[4, 5, 6, 7]]
    with pytest.raises(ValueError, match=r"batch-000002.npz: images are \(4, 3, 3\), not \(4, 6, 3\)"):
        write(tmp_path / "a.npz", images=lambda i: numbered(i)[..., :3])


@pytest.mark.parametrize("name", ["a.zip", "a.npz"])
@pytest.mark.parametrize("step", ["_tell", "rmtree"])
def test_an_interruption_while_parts_are_put_together_loses_nothing(tmp_path, monkeypatch, name, step):
    write(tmp_path / "whole" / name)
    with monkeypatch.context() as patch:
        if step == "rmtree":
            patch.setattr(writing.shutil, "rmtree", stopped)
        else:
            tell = Writer._tell
            patch.setattr(
                Writer,
                "_tell",
                lambda self, path: (
                    stopped() if path.suffix == ".json" and path.parent == tmp_path else tell(self, path)
                ),
            )
        with pytest.raises(InterruptedError):
            write(tmp_path / name)
    images = Failing()
    assert write(tmp_path / name, images=images) == 0 and images.calls == []
    assert contents(tmp_path / name) == contents(tmp_path / "whole" / name)
    assert not (tmp_path / f"{name}.parts").exists()


def stopped(*_, **__):
    raise InterruptedError


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(InterruptedError), image_parts.replacing(tmp_path / "a") as file:
        file.write(b"new")
        raise InterruptedError
    assert contents(tmp_path) == {"a": b"old"}
    with image_parts.replacing(tmp_path / "a") as file:
        file.write(b"new")
    assert contents(tmp_path) == {"a": b"new"}


@pytest.mark.parametrize("name", ["a", "a.zip", "a.npz"])
@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": {**SETTINGS, "guidance": 4.0}}, r"was begun with guidance = 1.5, now it is 4.0"),
        ({"settings": {**SETTINGS, "sampler": {"name": "heun", "steps": 9}}}, r"sampler.steps = 18, now it is 9"),
        ({"settings": {"checkpoint": "abc"}}, r"begun with sampler.name = heun, now it is absent"),
        ({"settings": {**SETTINGS, "seed": 1}}, r"begun with seed = absent, now it is 1"),
        ({"batch": 3}, r"begun with batch_size = 4, now it is 3"),
        ({"count": 10}, r"begun with images = 9, now it is 10"),
        ({"rgb": True}, r"begun with rgb = False, now it is True"),
    ],
)
def test_going_on_with_other_settings_is_refused_by_the_first_key_that_differs(
    tmp_path, name, finished, change, message
):
    if finished:
        write(tmp_path / name)
    else:
        with pytest.raises(InterruptedError):
            write(tmp_path / name, images=Failing(1))
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        write(tmp_path / name, **change)
    assert "\n" not in str(caught.value) and contents(tmp_path) == before


def test_numpy_headers_are_parsed_by_one_thread(tmp_path, monkeypatch):
    """ast fails now and then in two threads at once, before CPython 3.11.8 and 3.12.2."""
    with pytest.raises(InterruptedError):
        write(tmp_path / "a.npz", images=Failing(2))
    threads, read = set(), np.load
    monkeypatch.setattr(np, "load", lambda *args, **how: threads.add(threading.get_ident()) or read(*args, **how))
    assert write(tmp_path / "a.npz") == 1
    assert threads == {threading.get_ident()}


def test_labels_belong_to_the_settings(tmp_path):
    write(tmp_path / "a.npz", labels=torch.arange(9))
    with pytest.raises(ValueError, match="labels_sha256"):
        write(tmp_path / "a.npz", labels=torch.zeros(9, dtype=torch.int64))
    assert write(tmp_path / "a.npz", labels=torch.arange(9)) == 0


def test_what_is_not_ours_is_left_alone(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "000000.png").write_bytes(b"mine")
    (tmp_path / "a.npz").write_bytes(b"mine")
    (tmp_path / "file").write_bytes(b"mine")
    for name, message in (("a", "no manifest.json"), ("a.npz", "no a.npz.json tells"), ("file", "no manifest.json")):
        with pytest.raises(ValueError, match=message):
            write(tmp_path / name)
    assert set(contents(tmp_path).values()) == {b"mine"}
    write(tmp_path / "b")
    (tmp_path / "b" / "9.png").write_bytes(b"mine")
    with pytest.raises(ValueError, match=r"9.png is none of the images to be made"):
        write(tmp_path / "b")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "manifest.json").write_text("[]")
    with pytest.raises(ValueError, match="is no manifest of generated images"):
        write(tmp_path / "c")


def test_how_images_were_made_is_not_taken_from_a_damaged_or_foreign_manifest(tmp_path):
    write(tmp_path / "a")
    assert read_settings(tmp_path / "a") == SETTINGS and read_settings(tmp_path / "b") is None
    (tmp_path / "a" / "manifest.json").write_text('{"settings": {"sampler": "of another program"}}')
    assert read_settings(tmp_path / "a") is None
    for damaged in (b'{"written": {', b"\xff\xfe", b"[" * 100_000):
        (tmp_path / "a" / "manifest.json").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"manifest.json: is damaged"):
            read_settings(tmp_path / "a")


def test_another_number_of_images_is_named_before_what_follows_from_it(tmp_path):
    write(tmp_path / "a")
    with pytest.raises(ValueError, match="was begun with images = 9, now it is 8"):
        write_images(numbered, tmp_path / "a", torch.arange(8), 4, {**SETTINGS, "classes_sha256": "other"})


def test_a_folder_that_a_killed_start_left_is_taken(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".manifest.json.7.tmp").write_bytes(b"{")
    assert write(tmp_path / "a") == 9
    assert sorted(contents(tmp_path / "a")) == [*(f"{i:06d}.png" for i in range(9)), "manifest.json"]
    assert json.loads((tmp_path / "a" / "manifest.json").read_text())["settings"] == SETTINGS


@pytest.mark.parametrize(
    ("name", "how", "message"),
    [
        ("a.jpg", {}, r"into a folder, a .zip \(both of PNG files\) or an .npz, not into .jpg"),
        ("a.zip", {"labels": torch.arange(9)}, "only an .npz holds labels"),
        ("a.npz", {"labels": torch.arange(8)}, r"labels must be int64 \[9\], not torch.int64 \[8\]"),
        ("a.npz", {"count": 0}, "nothing to write"),
        ("a.npz", {"images": lambda i: numbered(i)[:, :2]}, "1 or 3 channels to be stored, not 2"),
        ("a.npz", {"settings": {"loss": float("nan")}}, "JSON"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path, name, how, message):
    with pytest.raises(ValueError, match=message):
        write(tmp_path / name, **how)
    for bad in (torch.tensor([1, 1]), torch.tensor([-1, 0])):
        with pytest.raises(ValueError, match=r"twice|below 0"):
            write_images(numbered, tmp_path / "b", bad, 2, {})
    assert not (tmp_path / "b").exists()


def test_progress_counts_what_is_left(tmp_path):
    reports = []
    with pytest.raises(InterruptedError):
        write(tmp_path / "a", images=Failing(1))
    write(tmp_path / "a", progress=lambda *counts: reports.append(counts))
    assert reports == [(4, 5), (5, 5)]


HOLD = """
import sys, torch
from eval.writing import Writer
with Writer(sys.argv[1], torch.arange(8), 4, {}) as writer:
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("name", ["folder", "a.npz", "a.zip"])
def test_a_second_process_does_not_write_to_the_same_place(tmp_path, name):
    path = tmp_path / name
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "held\n"
        before = contents(tmp_path)
        with pytest.raises(ValueError, match=f"{name}: another process is writing it; wait for it"):
            write_images(numbered, path, torch.arange(8), 4, {})
        assert contents(tmp_path) == before
        first.kill()
    assert write_images(numbered, path, torch.arange(8), 4, {}) == 8
    assert not list(tmp_path.rglob(".lock"))


def test_what_another_process_finished_meanwhile_is_not_begun_again(tmp_path, monkeypatch):
    """The first look comes before its end, the lock after it."""
    path, finished = tmp_path / "a.npz", Writer._is_finished
    write_images(numbered, path, torch.arange(8), 4, {})
    looks = []
    monkeypatch.setattr(
        Writer, "_is_finished", lambda self: bool(looks.append(0)) or (len(looks) > 1 and finished(self))
    )
    monkeypatch.setattr(Writer, "_check_ours", lambda self: None)
    assert write_images(numbered, path, torch.arange(8), 4, {}) == 0


def test_an_error_lets_go_of_the_place(tmp_path):
    with pytest.raises(InterruptedError):
        write_images(Model(fails_at=1), tmp_path / "made", torch.arange(8), 4, {})
    (tmp_path / "made" / "000099.png").touch()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"000099.png is none of the images"):
            write_images(numbered, tmp_path / "made", torch.arange(8), 4, {})
    assert not (tmp_path / "made" / ".lock").exists()
