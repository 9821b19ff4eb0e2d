"""Small data sets held in memory: the digits inside the package, and Fashion-MNIST."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np

from dit_train.config import ConfigError, DataConfig
from dit_train.data.table import Table, forbid_other_size

DIGITS_SIZE = 8
FASHION_SIZE = 28
FASHION_FOLDER = "/usr/share/datasets/fashion-mnist"
FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
_PARTS = ("train", "t10k")


def digits(config: DataConfig) -> Table:
    """The 1,797 grey 8×8 digits of the UCI test set (Alpaydin & Kaynak 1998); every fifth is held out."""
    forbid_other_size(config, DIGITS_SIZE)
    with np.load(Path(__file__).with_name("digits.npz")) as stored:
        images, labels = stored["images"], stored["labels"].astype(np.int64)
    images = np.rint(images * (255 / 16)).astype(np.uint8)[:, None]  # stored as 0..16
    heldout = np.arange(len(labels)) % 5 == 4
    return Table(labels, heldout, images.__getitem__, 1, DIGITS_SIZE, tuple("0123456789"))


def fashion_mnist(config: DataConfig) -> Table:
    """Fashion-MNIST (Xiao et al., arXiv 1708.07747): 60,000 grey 28×28 images, and its 10,000 test images held out."""
    forbid_other_size(config, FASHION_SIZE)
    root = _fashion_root(config)
    images, labels = [], []
    for part in _PARTS:
        _idx_counts(root, part)
        images.append(_read_idx(root / f"{part}-images-idx3-ubyte.gz", 3))
        labels.append(_read_idx(root / f"{part}-labels-idx1-ubyte.gz", 1).astype(np.int64))
        _check_labels(labels[-1], root / f"{part}-labels-idx1-ubyte.gz")
    train, test = images
    heldout = np.arange(len(train) + len(test)) >= len(train)

    def read(rows: np.ndarray) -> np.ndarray:
        out = np.empty((len(rows), 1, FASHION_SIZE, FASHION_SIZE), dtype=np.uint8)
        late = heldout[rows]  # the two files stay apart: joining them would hold both twice
        out[~late, 0] = train[rows[~late]]
        out[late, 0] = test[rows[late] - len(train)]
        return out

    return Table(np.concatenate(labels), heldout, read, 1, FASHION_SIZE, FASHION_CLASSES)


def fashion_mnist_counts(config: DataConfig) -> tuple[int, int]:
    """Number of training and test images by the files' headers. Raises `ConfigError` for what is missing or broken."""
    forbid_other_size(config, FASHION_SIZE)
    root = _fashion_root(config)
    train, test = (_idx_counts(root, part) for part in _PARTS)
    return train, test


def _fashion_root(config: DataConfig) -> Path:
    """The folder with the files: the one named, or torchvision's place below it."""
    folder = Path(config.path or FASHION_FOLDER).expanduser()
    for root in (folder, folder / "FashionMNIST" / "raw"):
        if (root / "train-images-idx3-ubyte.gz").is_file():
            return root
    raise ConfigError(
        f"no train-images-idx3-ubyte.gz in {folder}: set data.path to the folder of Fashion-MNIST's four .gz files "
        "(Debian's package dataset-fashion-mnist, or torchvision's FashionMNIST download)"
    )


def _idx_counts(root: Path, part: str) -> int:
    """Number of images of a part, after the headers of both its files were found right."""
    images, labels = root / f"{part}-images-idx3-ubyte.gz", root / f"{part}-labels-idx1-ubyte.gz"
    count, *size = _idx_shape(images, 3)
    if size != [FASHION_SIZE, FASHION_SIZE]:
        raise ConfigError(f"{images} has images of {size[0]}x{size[1]}, not 28x28: fetch Fashion-MNIST's file again")
    if _idx_shape(labels, 1) != (count,):
        raise ConfigError(f"{labels} and {images} differ in length: fetch both files again")
    if count < 1:
        raise ConfigError(f"{images} holds no image: fetch it again")
    return count


def _idx_shape(path: Path, dimensions: int) -> tuple[int, ...]:
    """Shape of a gzip IDX file of bytes, from its head and its stored length (LeCun's format: 0 0 8 dims, sizes)."""
    head = _decompress(path, 4 + 4 * dimensions)
    if head[:4] != bytes((0, 0, 8, dimensions)) or len(head) < 4 + 4 * dimensions:
        raise ConfigError(f"{path} is not an IDX file of bytes in {dimensions} dimensions: fetch it again")
    shape = tuple(int(n) for n in np.frombuffer(head, ">u4", offset=4))
    promised = len(head) + int(np.prod(shape, dtype=object))
    with path.open("rb") as file:
        file.seek(-4, 2)  # gzip ends with the length of what it holds
        stored = int.from_bytes(file.read(4), "little")
    if stored != promised:
        raise ConfigError(f"{path} is cut short or damaged ({stored} bytes for {promised}): fetch it again")
    return shape


def _read_idx(path: Path, dimensions: int) -> np.ndarray:
    """The whole file, uint8 of the shape in its head."""
    shape = _idx_shape(path, dimensions)
    data = _decompress(path, -1)
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions)
    if values.size != np.prod(shape):
        raise ConfigError(f"{path} is damaged: fetch it again")
    return values.reshape(shape)


def _decompress(path: Path, count: int) -> bytes:
    """The first `count` bytes of a gzip file, all for −1."""
    try:
        with gzip.open(path) as file:
            return file.read(count)
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: put all four files of Fashion-MNIST into one folder") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read as gzip ({error}): fetch it again") from None


def _check_labels(labels: np.ndarray, path: Path) -> None:
    if labels.max() >= len(FASHION_CLASSES):
        raise ConfigError(f"{path} has label {labels.max()}, beyond 9: fetch it again")
