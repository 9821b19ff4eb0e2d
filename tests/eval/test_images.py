"""Images from disk: the right pixels from every container, and one clear line for what must not be scored."""

import io
import json
import struct
import subprocess
import sys
import zipfile
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from dit_train.data import folder as training_folder
from eval import image_files
from eval.decoding import center_crop
from eval.extractors import load
from eval.features import of_images
from eval.images import open_images

SHAPE = (5, 40, 64, 3)  # N, H, W, C: neither square nor of as many rows as columns


def pixels(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape or SHAPE, dtype=np.uint8)


def encoded(array, kind="PNG", **how):
    image = array if isinstance(array, Image.Image) else Image.fromarray(array)
    buffer = io.BytesIO()
    image.save(buffer, kind, **how)
    return buffer.getvalue()


def folder_of(root, files):
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def zip_of(path, files):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def pngs(array):
    return {f"{number:06d}.png": encoded(image) for number, image in enumerate(array)}


def containers(tmp_path, array):
    """The same images in each container."""
    files = pngs(array)
    np.savez(tmp_path / "stored.npz", arr_0=array)
    np.savez_compressed(tmp_path / "deflated.npz", arr_0=array)
    return {
        "folder": folder_of(tmp_path / "folder", files),
        "zip": zip_of(tmp_path / "images.zip", files),
        "stored": tmp_path / "stored.npz",
        "deflated": tmp_path / "deflated.npz",
    }


@pytest.mark.parametrize("kind", ["folder", "zip", "stored", "deflated"])
def test_pixels_are_those_of_the_files_in_any_order_and_no_side_is_swapped(tmp_path, kind):
    array = pixels()
    images = open_images(containers(tmp_path, array)[kind])
    assert (len(images), images.shape, images.labels, images.conversions) == (5, (3, 40, 64), None, ())
    for order in ([0, 1, 2, 3, 4], [4, 0, 3, 3], [2], []):
        batch = images.batch(torch.tensor(order, dtype=torch.int64))
        assert batch.dtype == torch.uint8 and batch.shape == (len(order), 3, 40, 64)
        np.testing.assert_array_equal(batch, array[order].transpose(0, 3, 1, 2))
    with pytest.raises(IndexError, match=r"holds images 0..4, not \[5\]"):
        images.batch(torch.tensor([5]))
    with pytest.raises(IndexError):
        images.batch(torch.tensor([-1]))
    with pytest.raises(TypeError, match="int64"):
        images.batch(torch.tensor([1.0]))


def test_equal_pixels_have_one_hash_in_any_container_and_it_is_the_references(tmp_path):
    array = pixels(70, 8, 8, 1)  # more than are hashed at once
    files = {name: encoded(image[..., 0]) for name, image in zip(pngs(array[..., 0]), array, strict=True)}
    np.savez(tmp_path / "a.npz", arr_0=array)
    sets = [open_images(tmp_path / "a.npz"), open_images(folder_of(tmp_path / "folder", files))]
    reference = of_images(sets[0].batch(torch.arange(70)), load("digits-cnn"), 16, "images")
    assert {images.sha256 for images in sets} == {reference.meta["images_sha256"]}
    np.savez(tmp_path / "b.npz", arr_0=array[::-1])
    assert open_images(tmp_path / "b.npz").sha256 != sets[0].sha256


def test_batches_come_in_order_one_ahead_and_say_how_far_they_are(tmp_path):
    array = pixels()
    images = open_images(containers(tmp_path, array)["folder"])
    reports = []
    made = list(images.batches(torch.arange(5), 2, progress=lambda *counts: reports.append(counts)))
    assert [i.tolist() for i, _ in made] == [[0, 1], [2, 3], [4]]
    np.testing.assert_array_equal(torch.cat([x for _, x in made]), array.transpose(0, 3, 1, 2))
    assert reports == [(2, 5), (4, 5), (5, 5)]
    assert list(images.batches(torch.arange(0), 2)) == []
    with pytest.raises(ValueError, match="batches of 0"):
        next(images.batches(torch.arange(5), 0))


def test_names_sort_by_path_hidden_files_are_not_seen_and_others_are_counted(tmp_path):
    white, black = np.full((4, 4), 255, np.uint8), np.zeros((4, 4), np.uint8)
    files = {
        "b/1.png": encoded(white), "a/2.PNG": encoded(black), ".DS_Store": b"x", "__MACOSX/a/._2.png": b"x",
        ".hidden/3.png": b"x", "notes.txt": b"x", "a/._2.png": b"x",
    }  # fmt: skip
    for path in (folder_of(tmp_path / "folder", files), zip_of(tmp_path / "a.zip", files)):
        images = open_images(path, class_folders=True)
        assert images.batch(torch.arange(2))[:, 0, 0, 0].tolist() == [0, 255]
        assert images.labels.tolist() == [0, 1] and images.labels.dtype == torch.int64
        assert images.conversions == ("no images and passed over: 1 files, first notes.txt",)
        assert images.describe()["classes"] == 2
    (tmp_path / "folder" / "c.png").write_bytes(encoded(white))
    with pytest.raises(ValueError, match=r"c.png lies in no class folder"):
        open_images(tmp_path / "folder", class_folders=True)


def palette(transparent=False):
    image = Image.new("P", (4, 4))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((0, 0), 1)
    return encoded(image, transparency=1) if transparent else encoded(image)


def rotated():
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(pixels(4, 4, 3), "JPEG", exif=exif)


RED, BLUE, GREEN = (255, 0, 0), (0, 0, 255), (0, 128, 0)


@pytest.mark.parametrize(
    ("data", "how", "corner", "said"),
    [
        (encoded(Image.new("RGB", (4, 4), RED)), {}, RED, []),
        (encoded(Image.new("1", (4, 4), 1)), {}, (255,) * 3, ["1 bit to grey", "grey to RGB"]),
        (encoded(Image.new("L", (4, 4), 9)), {}, (9,) * 3, ["grey to RGB, since others have colour"]),
        (palette(), {}, BLUE, ["palette to RGB"]),
        (palette(True), {"background": "green"}, GREEN, ["palette to RGB", "transparency over green"]),
        (encoded(Image.new("RGBA", (4, 4), (*RED, 0))), {"background": "white"}, (255,) * 3, ["over white"]),
        (encoded(Image.new("LA", (4, 4), (9, 255))), {"background": "white"}, (9,) * 3, ["over white"]),
        (encoded(pixels(4, 4, 3), "WEBP", lossless=True), {}, tuple(pixels(4, 4, 3)[0, 0]), []),
        (encoded(pixels(4, 4, 3), "BMP"), {}, tuple(pixels(4, 4, 3)[0, 0]), []),
        (rotated(), {"lossy": True}, None, ["EXIF rotation ignored", "stored with loss"]),
    ],
)  # fmt: skip
def test_a_conversion_is_stated(tmp_path, data, how, corner, said):
    suffix = {b"RIFF": "webp", b"BM": "bmp", b"\xff\xd8": "jpg"}
    end = next((name for start, name in suffix.items() if data.startswith(start)), "png")
    folder_of(tmp_path, {f"a.{end}": data, "b.png": encoded(pixels(4, 4, 3))})
    images = open_images(tmp_path, **how)
    first = images.batch(torch.arange(2))[0]
    if corner is None:  # not turned
        np.testing.assert_array_equal(first, np.asarray(Image.open(io.BytesIO(data))).transpose(2, 0, 1))
    else:
        assert first[:, 0, 0].tolist() == list(corner)
    assert len(images.conversions) == len(said)
    for found, words in zip(images.conversions, said, strict=True):
        assert words in found and "1 of 2 images" in found


def test_a_grey_set_stays_grey(tmp_path):
    array = pixels(3, 6, 7)
    images = open_images(folder_of(tmp_path, pngs(array)))
    assert images.shape == (1, 6, 7)
    np.testing.assert_array_equal(images.batch(torch.arange(3))[:, 0], array)


def test_the_centre_crop_is_adms_and_makes_one_size_of_many(tmp_path):
    photos = [
        Image.fromarray(pixels(*size, 3)) for size in ((40, 64), (64, 40), (150, 131), (20, 30), (32, 32), (64, 96))
    ]
    files = {f"{number}.jpg": encoded(photo, "JPEG") for number, photo in enumerate(photos)}
    images = open_images(folder_of(tmp_path, files), center_crop_adm=32, lossy=True)
    assert images.shape == (3, 32, 32)
    for number, made in enumerate(images.batch(torch.arange(6))):
        photo = Image.open(io.BytesIO(files[f"{number}.jpg"]))
        np.testing.assert_array_equal(made, by_adm(photo, 32).transpose(2, 0, 1))
    assert "ADM centre crop to 32: 6 of 6 images" in images.conversions
    assert "enlarged to 32: 1 of 6 images" in images.conversions


def by_adm(image, size):
    """The published procedure, step by step."""
    while min(image.size) >= 2 * size:
        image = image.resize(tuple(side // 2 for side in image.size), resample=Image.BOX)
    scale = size / min(image.size)
    array = np.array(image.resize(tuple(round(side * scale) for side in image.size), resample=Image.BICUBIC))
    top, left = (array.shape[0] - size) // 2, (array.shape[1] - size) // 2
    return array[top : top + size, left : left + size]


def test_a_reference_is_cropped_as_training_images_are():
    assert training_folder.center_crop is center_crop  # what is trained on and what is compared with


def png16():
    """A 16-bit RGB PNG, of which Pillow makes 8 bits without a word."""
    rows = b"".join(b"\0" + b"\x12\x34" * 12 for _ in range(4))
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 16, 2, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def animated():
    frames = [Image.new("RGB", (4, 4), colour) for colour in (RED, BLUE)]
    return encoded(frames[0], save_all=True, append_images=frames[1:])


GOOD = encoded(pixels(4, 4, 3))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("b.png", encoded(Image.new("RGBA", (4, 4))), r"b.png has transparency: say on which background"),
        ("b.png", encoded(Image.new("LA", (4, 4))), r"b.png has transparency"),
        ("b.png", palette(True), r"b.png has transparency"),
        ("b.jpg", encoded(Image.new("CMYK", (4, 4)), "JPEG"), r"b.jpg has colours CMYK: convert it to RGB"),
        ("b.png", encoded(np.full((4, 4), 999, np.uint16)), r"b.png has 16 bits a channel"),
        ("b.png", png16(), r"b.png has 16 bits a channel"),
        ("b.png", animated(), r"b.png is animated"),
        ("b.jpg", encoded(pixels(4, 4, 3), "JPEG", quality=95), r"b.jpg is a JPEG or WebP with loss.* lossy=True"),
        ("b.webp", encoded(pixels(4, 4, 3), "WEBP"), r"b.webp is a JPEG or WebP with loss"),
        ("b.png", encoded(pixels(4, 4, 3), "JPEG"), r"b.png is a JPEG"),  # by content, whatever its name
        ("b.png", encoded(pixels(4, 4, 3), "GIF"), r"b.png cannot be read as an image"),
        ("b.gif", encoded(pixels(4, 4, 3), "GIF"), r"b.gif is of a kind that is not read here; save it as PNG"),
        ("b.png", b"", r"b.png cannot be read as an image"),
        ("b.png", encoded(pixels(5, 4, 3)), r"a.png is 4x4 \(width x height\), b.png is 4x5.* center_crop_adm=SIDE"),
    ],
)
@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_a_file_that_must_not_be_scored_is_named_when_the_set_is_opened(tmp_path, kind, name, data, message):
    files = {"a.png": GOOD, name: data}
    path = folder_of(tmp_path / "f", files) if kind == "folder" else zip_of(tmp_path / "f.zip", files)
    with pytest.raises(ValueError, match=message) as caught:
        open_images(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_a_file_cut_short_is_named_when_it_is_decoded(tmp_path, kind, monkeypatch):
    files = {"a.png": encoded(pixels(64, 64, 3)), "b.png": encoded(pixels(64, 64, 3))[:-2000]}
    path = folder_of(tmp_path / "f", files) if kind == "folder" else zip_of(tmp_path / "f.zip", files)
    images = open_images(path)
    with pytest.raises(ValueError, match=r"b.png cannot be read as an image"):
        images.batch(torch.arange(2))
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)  # some other code of the process did that
    with pytest.raises(ValueError, match="LOAD_TRUNCATED_IMAGES"):
        open_images(path)


def test_folders_that_hold_too_little_or_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        open_images(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no images in it \(.png, .*\); it holds a.txt"):
        open_images(folder_of(tmp_path / "empty", {"a.txt": b""}))
    with pytest.raises(ValueError, match="1 image in it, but a covariance needs at least 2"):
        open_images(folder_of(tmp_path / "one", {"a.png": GOOD}))
    folder_of(tmp_path / "dangling", {"a.png": GOOD})
    (tmp_path / "dangling" / "b.png").symlink_to(tmp_path / "gone.png")
    with pytest.raises(ValueError, match=r"b.png cannot be read as an image \(FileNotFoundError"):
        open_images(tmp_path / "dangling")
    folder_of(tmp_path / "loop", {"a/a.png": GOOD, "a/b.png": GOOD})
    (tmp_path / "loop" / "again").symlink_to(tmp_path / "loop" / "a")
    with pytest.raises(ValueError, match="its images would count twice"):
        open_images(tmp_path / "loop")
    with pytest.raises(ValueError, match=r"a folder, a .zip or an .npz file"):
        open_images(tmp_path / "one" / "a.png")


def test_a_folder_that_cannot_be_listed_is_not_passed_over(tmp_path, monkeypatch):
    folder_of(tmp_path, {"a.png": GOOD, "b.png": GOOD, "shut/c.png": GOOD})
    scandir = image_files.os.scandir

    def refusing(path):
        if str(path).endswith("shut"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(image_files.os, "scandir", refusing)
    with pytest.raises(ValueError, match=r"shut: cannot be listed \(Permission denied\)"):
        open_images(tmp_path)


def test_zips_that_are_damaged_encrypted_or_hold_a_name_twice(tmp_path):
    (tmp_path / "no.zip").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="cannot be read as a zip file"):
        open_images(tmp_path / "no.zip")
    with zipfile.ZipFile(tmp_path / "twice.zip", "w") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("a.png", GOOD)
        archive.writestr("a.png", GOOD)
    with pytest.raises(ValueError, match=r"a.png occurs twice"):
        open_images(tmp_path / "twice.zip")
    path = zip_of(tmp_path / "locked.zip", {"a.png": GOOD, "b.png": GOOD})
    data = bytearray(path.read_bytes())
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.rindex(signature) + flags] |= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"b.png is encrypted"):
        open_images(path)


@pytest.mark.parametrize("name", ["../b.png", "./b.png", "/b.png", "a/../b.png", "a//b.png"])
def test_no_image_of_a_zip_is_lost_since_its_path_is_odd(tmp_path, name):
    with pytest.raises(ValueError, match=f"z.zip: {name} is no plain path"):
        open_images(zip_of(tmp_path / "z.zip", {"0.png": GOOD, "1.png": GOOD, name: GOOD}))


def test_a_file_that_is_no_image_is_named_without_names_of_python_objects(tmp_path):
    for files in (folder_of(tmp_path, {"a.png": GOOD, "b.png": b"x"}), zip_of(tmp_path / "z.zip", {"b.png": b"x"})):
        with pytest.raises(ValueError, match=r"b.png cannot be read as an image \(it is no PNG") as caught:
            open_images(files)
        assert "<" not in str(caught.value)


# --- arrays


def npz(tmp_path, **arrays):
    np.savez(tmp_path / "a.npz", **arrays)
    return tmp_path / "a.npz"


def test_labels_are_those_of_arr_1_and_adms_statistics_are_said_to_be_left_aside(tmp_path):
    images = open_images(npz(tmp_path, arr_0=pixels(), arr_1=np.array([4, 0, 1, 1, 2], np.int32)))
    assert images.labels.tolist() == [4, 0, 1, 1, 2] and images.labels.dtype == torch.int64
    images = open_images(npz(tmp_path, arr_0=pixels(), mu=np.zeros(3), sigma=np.eye(3)))
    assert images.conversions == ("the file also holds mu and sigma of other images: not used, only the 5 images are",)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"arr_0": pixels(5, 3, 40, 64)}, r"\[5, 3, 40, 64\].* looks like \[N, C, H, W\]: save arr_0.transpose"),
        ({"arr_0": pixels(5, 1, 40, 64)}, r"save arr_0.transpose\(0, 2, 3, 1\)"),
        ({"arr_0": pixels(5, 40, 64)}, r"not \[N, H, W, C\]; add the channel with arr_0\[..., None\]"),
        ({"arr_0": pixels(5, 40, 64, 4)}, r"with C 1 or 3; lay the images over a background"),
        ({"arr_0": pixels().astype(np.int64)}, r"arr_0 is int64, not uint8"),
        ({"arr_0": pixels().astype(np.uint16)}, r"arr_0 is uint16, not uint8"),
        (
            {"arr_0": pixels() / 255},
            r"arr_0 is float64; save uint8, or say value_range=\(0, 1\) or value_range=\(-1, 1\)",
        ),
        ({"arr_0": np.empty(5, object)}, r"arr_0 holds Python objects"),
        ({"arr_0": np.asfortranarray(pixels())}, r"arr_0 is in Fortran order"),
        ({"arr_0": pixels() // 128}, r"the brightest pixel is 1, but uint8 images must span 0..255"),
        ({"arr_0": pixels(1, 4, 4, 3)}, r"1 image in it"),
        ({"arr_0": pixels(2, 0, 4, 3)}, r"hold no pixels"),
        ({"mu": np.zeros(3), "sigma": np.eye(3)}, r"no arr_0 in it but mu, sigma"),
        ({"arr_0": pixels(), "arr_1": np.zeros(4, np.int64)}, r"arr_1 is int64 \[4\], not one class number"),
        ({"arr_0": pixels(), "arr_1": np.zeros(5)}, r"arr_1 is float64 \[5\]"),
        ({"arr_0": pixels(), "arr_1": np.full(5, -1)}, r"class number ≥ 0"),
        ({"arr_0": pixels(), "arr_1": np.full(5, 2**63, np.uint64)}, r"class number ≥ 0"),
        ({"arr_0": pixels(), "arr_1": np.array([None] * 5)}, r"arr_1 cannot be read"),
    ],
)
def test_an_array_that_must_not_be_scored_is_refused_with_the_remedy(tmp_path, arrays, message):
    with pytest.raises(ValueError, match=message) as caught:
        open_images(npz(tmp_path, **arrays))
    assert "\n" not in str(caught.value) and "a.npz" in str(caught.value)


@pytest.mark.parametrize("value_range", [(0, 1), (-1, 1), (0, 255)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4"])
def test_stated_floats_give_back_every_level(tmp_path, value_range, dtype):
    low, high = value_range
    levels = np.arange(256, dtype=np.uint8).reshape(2, 8, 16, 1)
    images = open_images(
        npz(tmp_path, arr_0=(levels / 255 * (high - low) + low).astype(dtype)), value_range=value_range
    )
    np.testing.assert_array_equal(images.batch(torch.arange(2)), levels.transpose(0, 3, 1, 2))
    assert images.conversions[0].endswith(f"in [{low}, {high}] rounded half up to 0..255")


def late(value):
    """Floats in [0, 1] of which image 3 is another."""
    array = pixels() / np.float32(255)
    array[3, 1, 1, 1] = value
    return array


@pytest.mark.parametrize(
    ("array", "value_range", "message"),
    [
        (late(1.004), (0, 1), r"image 3 spans \[.*, 1.004\], beyond \[0, 1\]"),
        (late(-0.1), (0, 1), r"image 3 spans \[-0.1, .*\], beyond"),
        (late(np.nan), (0, 1), r"image 3 holds NaN"),
        (late(np.inf), (-1, 1), r"image 3 holds NaN or infinity|no value is below 0"),
        (late(0) * 2 - 1, (0, 1), r"beyond \[0, 1\]"),
        (late(0), (-1, 1), r"no value is below 0, so it is not \(-1, 1\): say value_range=\(0, 1\)"),
        (late(0), (0, 255), r"the brightest pixel is 1"),
        (late(0), (0, 2), r"value_range=\(0, 2\): it is one of"),
        (pixels(), (0, 1), r"arr_0 is uint8, so leave out value_range"),
    ],
)
def test_floats_beyond_the_range_that_was_stated_give_no_number(tmp_path, array, value_range, message):
    with pytest.raises(ValueError, match=message):
        open_images(npz(tmp_path, arr_0=array), value_range=value_range).batch(torch.arange(5))


def test_options_that_do_not_apply_are_refused(tmp_path):
    folder_of(tmp_path / "f", {"a.png": GOOD, "b.png": GOOD})
    with pytest.raises(ValueError, match="value_range= is for arrays"):
        open_images(tmp_path / "f", value_range=(0, 1))
    with pytest.raises(ValueError, match="are for image files"):
        open_images(npz(tmp_path, arr_0=pixels()), background="white")
    with pytest.raises(ValueError, match="is no colour; say"):
        open_images(tmp_path / "f", background="colourful")
    with pytest.raises(ValueError, match="a centre crop of 0"):
        open_images(tmp_path / "f", center_crop_adm=0)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_damaged_array_is_named(tmp_path, save):
    path = tmp_path / "a.npz"
    save(path, arr_0=pixels(50, 40, 64, 3))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"a.npz: cannot be read as an .npz file"):
        open_images(path)
    path.write_bytes(whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 1]) + whole[len(whole) // 2 + 1 :])
    with pytest.raises(ValueError, match=r"arr_0.npy is damaged"):  # one bit, and of rows that are not asked for
        next(open_images(path).batches(torch.arange(2), 2))
    if save is np.savez_compressed:
        path.write_bytes(whole[: len(whole) // 2] + bytes(1000) + whole[len(whole) // 2 + 1000 :])
        with pytest.raises(ValueError, match=r"arr_0.npy is damaged"):
            open_images(path).batch(torch.arange(50))


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_arrays_packed_by_other_methods_are_read_or_named_if_damaged(tmp_path, method):
    np.savez(tmp_path / "a.npz", arr_0=pixels())
    with zipfile.ZipFile(tmp_path / "b.npz", "w", method) as packed, zipfile.ZipFile(tmp_path / "a.npz") as stored:
        packed.writestr("arr_0.npy", stored.read("arr_0.npy"))
    assert open_images(tmp_path / "b.npz").batch(torch.arange(5)).equal(torch.from_numpy(pixels()).permute(0, 3, 1, 2))
    whole = bytearray((tmp_path / "b.npz").read_bytes())
    for number in range(len(whole) // 8, len(whole) // 2):
        whole[number] ^= 0xFF
    (tmp_path / "b.npz").write_bytes(whole)
    with pytest.raises(ValueError, match=r"damaged|cannot be read as an .npz file"):
        open_images(tmp_path / "b.npz").batch(torch.arange(5))


def test_an_array_packed_by_an_unknown_method_or_twice_is_named(tmp_path):
    path = npz(tmp_path, arr_0=pixels())
    whole = bytearray(path.read_bytes())
    for signature, method in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        whole[whole.rindex(signature) + method] = 99
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=r"a.npz: cannot be read as an .npz file .*compression"):
        open_images(path)
    with zipfile.ZipFile(path, "w") as archive, pytest.warns(UserWarning, match="Duplicate"):
        for _ in range(2):
            archive.writestr("arr_0.npy", b"")
    with pytest.raises(ValueError, match="arr_0 occurs twice"):
        open_images(path)


def test_memory_is_that_of_a_batch_whatever_the_number_of_images(tmp_path):
    array = np.tile(np.arange(256, dtype=np.uint8)[None, :, None, None], (600, 1, 256, 3))  # 118 MB
    code = (
        "import sys, resource, torch; from eval.images import open_images\n"
        "sets = [open_images(path) for path in sys.argv[1:]]\n"
        "def peak(count):\n"
        "    for images in sets:\n"
        "        for _ in images.batches(torch.arange(count), 20): pass\n"
        "        yield resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
        "before = list(peak(40))[-1]\n"
        "print([now - before for now in peak(600)])"
    )
    paths = [str(path) for path in containers(tmp_path, array).values()]
    said = subprocess.run([sys.executable, "-c", code, *paths], check=True, capture_output=True, text=True).stdout
    assert max(json.loads(said)) < 30  # MB more than for 40 images
