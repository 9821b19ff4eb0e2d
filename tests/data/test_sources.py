"""Each source: the right pixels, the right split, and one clear line for what is broken."""

import dataclasses
import gzip
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from dit_train.config import ConfigError, DataConfig
from dit_train.data import arrays, sources
from dit_train.data.folder import center_crop, to_rgb


def refusal(config: DataConfig, *, when=sources.check) -> str:
    """The one line with which settings are refused."""
    with pytest.raises(ConfigError) as caught:
        when(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def agree(config: DataConfig) -> sources.Dataset:
    """The dataset, after `check` foretold it."""
    data = sources.load(config)
    counts = len(data.train), len(data.heldout)
    assert sources.check(config) == sources.Summary(data.channels, data.image_size, data.num_classes, *counts)
    assert len(data.class_names) == data.num_classes
    for part in (data.train, data.heldout):
        images, labels = part.images([0, len(part) - 1, 0]), part.labels(np.array([0, len(part) - 1, 0]))
        assert images.shape == (3, data.channels, data.image_size, data.image_size)
        assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
        assert torch.equal(images[0], images[2])
        images.zero_()  # what is handed out is the caller's
        assert torch.equal(part.images([0])[0], part.images([0, 0])[1])
        every = part.labels(range(len(part)))
        assert (every.min(), every.max()) >= (0, 0)
        assert every.max() < data.num_classes
    return data


def test_settings_are_checked_without_torch():
    code = (
        "import sys; from dit_train.config import *; from dit_train.data import sources; from dit_train.model import"
        " sizes; sources.check(DataConfig()); sizes.check_model(ModelConfig(), 8); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_model_range():
    values = sources.to_model_range(torch.tensor([0, 127, 128, 255], dtype=torch.uint8))
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, torch.tensor([-1.0, -1 / 255, 1 / 255, 1.0]))


# --- digits


def test_digits_have_their_split_and_full_contrast():
    data = agree(DataConfig())
    assert (len(data.train), len(data.heldout), data.channels, data.image_size, data.num_classes) == (
        1438,
        359,
        1,
        8,
        10,
    )
    images = data.train.images(range(len(data.train)))
    assert (images.min(), images.max()) == (0, 255)
    assert len(images.unique()) == 17
    datasets = pytest.importorskip("sklearn.datasets")
    original = datasets.load_digits()
    fourth_held_out = torch.from_numpy(np.rint(original.images[4 + 5 * 3] * 255 / 16).astype(np.uint8))
    assert torch.equal(data.heldout.images([3])[0, 0], fourth_held_out)
    assert data.heldout.labels([3]).item() == original.target[4 + 5 * 3]
    assert torch.equal(data.train.labels(range(4)), torch.from_numpy(original.target[:4]))
    assert data.train.labels([4]).item() == original.target[5]


def test_another_size_than_the_images_have_is_refused():
    assert "8 pixels" in refusal(DataConfig(image_size=16))
    assert "8 pixels" in refusal(DataConfig(image_size=16), when=sources.load)
    agree(DataConfig(image_size=8))


# --- Fashion-MNIST


def idx(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + np.array(array.shape, dtype=">u4").tobytes() + array.tobytes()


def write_fashion(folder, train: int = 7, test: int = 3) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    stored = {}
    for part, count in (("train", train), ("t10k", test)):
        stored[f"{part}-images-idx3-ubyte.gz"] = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        stored[f"{part}-labels-idx1-ubyte.gz"] = generator.integers(0, 10, count, dtype=np.uint8)
    for name, array in stored.items():
        (folder / name).write_bytes(gzip.compress(idx(array)))
    return stored


@pytest.mark.parametrize("below", [".", "FashionMNIST/raw"])
def test_fashion_is_read_from_either_layout(tmp_path, below):
    stored = write_fashion(tmp_path / below)
    data = agree(DataConfig(source="fashion_mnist", path=str(tmp_path)))
    assert (len(data.train), len(data.heldout), data.class_names[9]) == (7, 3, "Ankle boot")
    train, test = (torch.from_numpy(stored[f"{part}-images-idx3-ubyte.gz"]) for part in ("train", "t10k"))
    assert torch.equal(data.train.images([6, 0, 3])[:, 0], train[[6, 0, 3]])
    assert torch.equal(data.heldout.images([2, 0])[:, 0], test[[2, 0]])
    assert data.heldout.labels(range(3)).tolist() == stored["t10k-labels-idx1-ubyte.gz"].tolist()


def test_fashion_says_what_is_missing_or_broken(tmp_path):
    config = DataConfig(source="fashion_mnist", path=str(tmp_path))
    assert "data.path" in refusal(config)
    whole = write_fashion(tmp_path)
    name = "t10k-images-idx3-ubyte.gz"
    good = (tmp_path / name).read_bytes()
    labels = gzip.compress(idx(whole["t10k-labels-idx1-ubyte.gz"][:2]))
    wrong_size = gzip.compress(idx(np.zeros((3, 14, 14), np.uint8)))
    for bad in (b"", b"not gzip at all", good[:200], good[:-9], labels, wrong_size, gzip.compress(b"")):
        (tmp_path / name).write_bytes(bad)
        assert name in refusal(config)
        assert name in refusal(config, when=sources.load)
    (tmp_path / name).unlink()
    assert name in refusal(config)
    (tmp_path / name).write_bytes(good)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(labels)
    assert "differ in length" in refusal(config)


def test_fashion_damage_behind_a_sound_header_is_found_on_loading(tmp_path):
    write_fashion(tmp_path, train=200)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    path.write_bytes(damaged)
    config = DataConfig(source="fashion_mnist", path=str(tmp_path))
    assert path.name in refusal(config, when=sources.load)
    write_fashion(tmp_path)
    labels = tmp_path / "train-labels-idx1-ubyte.gz"
    labels.write_bytes(gzip.compress(idx(np.full(7, 10, np.uint8))))
    assert "label 10" in refusal(config, when=sources.load)


def test_installed_fashion_has_all_its_images():
    try:
        counts = arrays.fashion_mnist_counts(DataConfig(source="fashion_mnist"))
    except ConfigError as missing:
        pytest.skip(str(missing))
    assert counts == (60_000, 10_000)


# --- folders of images


def write_folder(root, classes: dict[str, int], size: tuple[int, int] = (20, 12)) -> DataConfig:
    for c, (name, count) in enumerate(classes.items()):
        (root / name).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", size, (10 * i, 50 * c, 7)).save(root / name / f"{i:02d}.png")
    return DataConfig(source="image_folder", path=str(root), image_size=8)


def test_folder_splits_each_class_in_name_order(tmp_path):
    config = write_folder(tmp_path, {"zebra": 11, "ant": 5})
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "ant" / ".00.png").write_bytes(b"hidden, no image")
    (tmp_path / "ant" / "notes.txt").write_text("no image")
    (tmp_path / "README").write_text("no folder")
    data = agree(config)
    assert data.class_names == ("ant", "zebra")
    assert data.heldout.images(range(3))[:, 0, 0, 0].tolist() == [40, 40, 90]  # fifth of each class, tenth of zebra
    assert data.heldout.labels(range(3)).tolist() == [0, 1, 1]
    assert data.train.labels(range(13)).tolist() == [0] * 4 + [1] * 9
    assert data.train.images([4])[0, :, 0, 0].tolist() == [0, 0, 7]
    assert agree(DataConfig(source="image_folder", path=str(tmp_path), image_size=8, heldout_every=2)).num_classes == 2


def test_folder_says_what_is_missing(tmp_path):
    def refused(**fields) -> str:
        return refusal(DataConfig(source="image_folder", **{"path": str(tmp_path), "image_size": 8, **fields}))

    assert "data.path" in refused(path=None)
    assert "no folder" in refused(path=str(tmp_path / "nowhere"))
    assert "no folders" in refused()
    write_folder(tmp_path, {"ant": 3})
    assert "data.image_size" in refused(image_size=None)
    assert "holds out nothing" in refused()
    assert "data.heldout_every: " in refused(heldout_every=1)
    (tmp_path / "bee").mkdir()
    assert "bee has no images" in refused(heldout_every=2)


def test_unreadable_images_are_named(tmp_path):
    config = write_folder(tmp_path, {"ant": 5})
    path = tmp_path / "ant" / "02.png"
    whole = path.read_bytes()
    for bad in (b"", b"text", whole[:50], whole[:20]):
        path.write_bytes(bad)
        data = sources.load(config)
        assert "02.png" in refusal(config, when=lambda _, data=data: data.train.images([2]))
        assert data.train.images([1]).shape == (1, 3, 8, 8)
    (tmp_path / "ant" / "00.png").write_bytes(b"text")  # the first of a class is looked at beforehand
    assert "00.png" in refusal(config)


def test_an_unreadable_image_is_replaced_by_one_of_its_class_and_part_whatever_it_is_read_with(tmp_path, capsys):
    config = dataclasses.replace(write_folder(tmp_path, {"ant": 10, "bee": 10}), unreadable="replace")
    whole = sources.load(config)
    for name in ("ant/00", "ant/04", "bee/02"):  # the first of a class, one held out, one to train on
        (tmp_path / f"{name}.png").write_bytes(b"text")
    sources.check(config)
    data = sources.load(config)
    train, held = data.train.images(range(16)), data.heldout.images(range(4))
    assert (data.train.count_replaced(range(16)), data.heldout.count_replaced(range(4))) == (2, 1)
    sound = [i for i in range(16) if i not in (0, 10)]
    assert torch.equal(train[sound], whole.train.images(sound))
    ants, bees = whole.train.images(range(1, 8)), whole.train.images([8, 9, *range(11, 16)])
    assert any(torch.equal(train[0], ant) for ant in ants) and any(torch.equal(train[10], bee) for bee in bees)
    assert torch.equal(held[0], whole.heldout.images([1])[0])  # the only other ant held out
    alone = sources.load(config)  # in another process, order and batch
    assert torch.equal(alone.train.images([10, 3, 0, 10]), train[[10, 3, 0, 10]])
    assert alone.train.count_replaced([10, 3, 0, 10]) == 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5 and "ant/00.png cannot be read" in lines[0] and "(1 so far)" in lines[0]


def test_a_class_without_a_readable_image_ends_the_run_even_if_images_are_replaced(tmp_path):
    config = dataclasses.replace(write_folder(tmp_path, {"ant": 5, "bee": 5}), unreadable="replace")
    for image in (tmp_path / "ant").iterdir():
        image.write_bytes(b"text")
    data = sources.load(config)
    assert "20 of its class" in refusal(config, when=lambda _: data.train.images([0]))


def test_every_kind_of_image_becomes_rgb():
    def pixel(image: Image.Image) -> tuple[int, ...]:
        converted = to_rgb(image)
        assert converted.mode == "RGB"
        return converted.getpixel((0, 0))

    assert pixel(Image.new("L", (2, 2), 77)) == (77, 77, 77)
    assert pixel(Image.new("1", (2, 2), 1)) == (255, 255, 255)
    assert pixel(Image.new("RGBA", (2, 2), (200, 0, 0, 0))) == (255, 255, 255)
    assert pixel(Image.new("RGBA", (2, 2), (200, 0, 100, 255))) == (200, 0, 100)
    assert pixel(Image.new("LA", (2, 2), (0, 0))) == (255, 255, 255)
    assert pixel(Image.new("RGB", (2, 2), (9, 8, 7)).convert("P", palette=Image.Palette.ADAPTIVE)) == (9, 8, 7)
    assert pixel(Image.fromarray(np.full((2, 2), 65535, np.uint16))) == (255, 255, 255)
    assert pixel(Image.fromarray(np.full((2, 2), 100 * 257, np.uint16))) == (100, 100, 100)
    assert pixel(Image.new("I", (2, 2), 100 * 257)) == (100, 100, 100)


def test_transparent_palettes_lie_over_white(tmp_path):
    image = Image.new("P", (2, 2), 0)
    image.putpalette([200, 0, 0, 0, 200, 0])
    image.putpixel((1, 0), 1)
    image.save(tmp_path / "p.png", transparency=0)
    with Image.open(tmp_path / "p.png") as stored:
        converted = to_rgb(stored)
    assert converted.getpixel((0, 0)) == (255, 255, 255)
    assert converted.getpixel((1, 0)) == (0, 200, 0)


@pytest.mark.parametrize("size", [(40, 20), (20, 40), (300, 70), (9, 31), (8, 8), (5, 3)])
def test_crop_has_the_size_whatever_the_shape(size):
    assert center_crop(Image.new("RGB", size), 8).size == (8, 8)


def test_crop_keeps_the_centre_of_the_long_side():
    stripes = np.zeros((8, 40, 3), np.uint8)
    stripes[:, 16:24] = 255
    assert np.asarray(center_crop(Image.fromarray(stripes), 8)).min() == 255
    assert np.asarray(center_crop(Image.fromarray(stripes.transpose(1, 0, 2)), 8)).min() == 255
    shifted = np.roll(stripes, 8, axis=1)
    assert np.asarray(center_crop(Image.fromarray(shifted), 8)).max() == 0


def test_crop_halves_by_area_before_it_interpolates():
    """A fine chessboard is grey after the box filter; a bicubic from the full size would alias or ring."""
    board = (np.indices((64, 128)).sum(0) % 2 * 255).astype(np.uint8)
    small = np.asarray(center_crop(Image.fromarray(board), 16))
    assert small.min() >= 127
    assert small.max() <= 128


# --- synthetic


def test_synthetic_images_depend_on_their_index_alone():
    few = sources.load(DataConfig(source="synthetic", image_size=16, count=60, classes=6))
    many = agree(DataConfig(source="synthetic", image_size=16, count=600, classes=6))
    assert torch.equal(few.train.images(range(48)), many.train.images(range(48)))
    assert (len(few.train), len(few.heldout)) == (48, 12)
    assert few.heldout.labels(range(12)).bincount().tolist() == [2] * 6
    images = many.train.images(range(200)).flatten(1)
    assert len(images.unique(dim=0)) == 200


def test_synthetic_classes_can_be_told_apart():
    data = sources.load(DataConfig(source="synthetic", image_size=16, count=500, classes=5))
    images, labels = data.train.images(range(400)).float(), data.train.labels(range(400))
    hues = torch.nn.functional.normalize(images.amax((2, 3)) - images.amin((2, 3)), dim=1)
    means = torch.stack([hues[labels == c].mean(0) for c in range(5)])
    assert (torch.cdist(hues, means).argmin(1) == labels).float().mean() > 0.99


def test_synthetic_settings_are_checked():
    assert "data.image_size" in refusal(DataConfig(source="synthetic"))
    assert "data.count: " in refusal(DataConfig(source="synthetic", image_size=8, count=3, classes=5))
