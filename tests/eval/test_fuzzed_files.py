"""Files with bytes changed, cut or repeated: read, or refused with a ValueError or OSError, and nothing else."""

import io
import pickle
import signal
import tempfile
import zipfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from dit_train.config import ConfigError, DataConfig
from dit_train.data import sources
from eval.features import Features
from eval.images import open_images
from eval.statistics import GaussianStats

EXAMPLES = settings(
    max_examples=120, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
PIXELS = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
SECONDS = 20


def edits():
    """Up to four changes: bytes flipped, a part cut out or repeated, the end lost."""
    place = st.floats(0, 1, exclude_max=True)
    flip = st.tuples(st.just("flip"), place, st.integers(1, 255))
    span = st.tuples(st.sampled_from(["drop", "repeat", "zero"]), place, st.integers(1, 40))
    cut = st.tuples(st.just("cut"), place, st.just(0))
    return st.lists(st.one_of(flip, span, cut), min_size=1, max_size=4)


def changed(data: bytes, edits) -> bytes:
    data = bytearray(data)
    for kind, place, by in edits:
        at = int(place * len(data))
        if kind == "flip" and data:
            data[at] ^= by
        elif kind == "drop":
            del data[at : at + by]
        elif kind == "repeat":
            data[at:at] = data[at : at + by]
        elif kind == "zero":
            data[at : at + by] = bytes(len(data[at : at + by]))
        elif kind == "cut":
            del data[at:]
    return bytes(data)


def encoded(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(PIXELS[0]).save(buffer, kind)
    return buffer.getvalue()


def archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for i in range(3):
            file.writestr(f"{i}.png", encoded("PNG"))
    return buffer.getvalue()


def arrays(**named) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **named)
    return buffer.getvalue()


def statistics() -> bytes:
    stats = GaussianStats(4)
    stats.update(torch.randn(9, 4, generator=torch.Generator().manual_seed(0)))
    return arrays(mu=stats.mean.numpy(), sigma=stats.covariance.numpy())


def reference() -> bytes:
    """What `Features.save` writes: sums, kept features, classes and provenance."""
    rows = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    everything = torch.arange(9)
    made = Features(GaussianStats.of(rows), None, None, rows, everything, everything % 3, {"name": "noise"})
    with tempfile.TemporaryDirectory() as folder:
        made.save(Path(folder) / "a.npz")
        return (Path(folder) / "a.npz").read_bytes()


def pickled() -> bytes:
    """Statistics as EDM2 writes them."""
    return pickle.dumps({"fid": {"mu": np.zeros(4), "sigma": np.eye(4)}, "num_images": 9})


def read_images(path):
    images = open_images(path)
    images.verify()
    assert images.batch(torch.arange(len(images))).dtype == torch.uint8


def read_training_images(path):
    data = sources.load(DataConfig(source="image_folder", path=str(path.parent.parent), image_size=8))
    for part in (data.train, data.heldout):
        part.images(range(len(part)))


def read_reference(path):
    Features.load(path)


@contextmanager
def no_hang():
    def late(*_):
        raise AssertionError(f"took more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


FILES = {
    "a.zip": (archive(), read_images),
    "arr_0.npz": (arrays(arr_0=PIXELS, arr_1=np.arange(6)), read_images),
    "compressed.npz": (arrays(arr_0=PIXELS), read_images),
    "folder/image.png": (encoded("PNG"), lambda path: read_images(path.parent)),
    "statistics.npz": (statistics(), read_reference),
    "reference.npz": (reference(), read_reference),
    "edm2.pkl": (pickled(), read_reference),
    "class/train.png": (encoded("PNG"), read_training_images),
    "class/train.jpg": (encoded("JPEG"), read_training_images),
    "class/train.webp": (encoded("WEBP"), read_training_images),
}


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_read_or_refused(tmp_path, name):
    whole, read = FILES[name]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(whole)
    if name.startswith("folder"):
        Image.fromarray(PIXELS[1]).save(path.parent / "sound.png")
    if name.startswith("class"):
        (tmp_path / "other").mkdir()
        for i in range(12):
            Image.fromarray(PIXELS[i % 6]).save(tmp_path / "other" / f"{i}.png")
            Image.fromarray(PIXELS[i % 6]).save(path.parent / f"{i}.png")
    read(path)  # as it was
    refused = []

    @EXAMPLES
    @given(edits())
    def check(changes):
        path.write_bytes(changed(whole, changes))
        with no_hang():
            try:
                read(path)
            except (ValueError, OSError, ConfigError) as error:
                refused.append(str(error))
                assert str(error) and "\n" not in str(error)

    check()
    assert len(refused) > 20
