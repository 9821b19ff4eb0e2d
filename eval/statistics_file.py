"""Reference files of the FID tools: mean and covariance, read without running anything that a file may hold."""

import json
import math
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from eval.files import DAMAGED

Contents = tuple[np.ndarray, np.ndarray, int | None, dict[str, Any]]
"""Mean fp64 [d], covariance fp64 [d, d], count or None, provenance."""

ADM_LAYOUT = "NHWC"  # the order in which ADM flattens the 17 x 17 x 7 map of its spatial features


class OnlyImagesError(ValueError):
    """The file holds images and no statistics: features have to be extracted from its ``arr_0`` first."""


def read(path: str | Path, spatial: bool = False, metric: str = "fid") -> Contents:
    """Read mean and covariance from a file of ours or of another tool.

    * ``GaussianStats.save``: ``mu``, ``sigma``, ``n``, ``meta`` in an npz.
    * pytorch-fid, clean-fid, EDM: ``mu``, ``sigma`` in an npz. No count.
    * ADM: ``mu``, ``sigma`` over its whole data set, which count and not the 10,000 images ``arr_0`` beside them, which
      serve precision and recall; ``mu_s``, ``sigma_s`` of spatial features. No count.
    * EDM2: a pickle ``{metric: {"mu", "sigma"}}``, read by an unpickler that knows numpy arrays alone.

    Args:
        path: an npz file, or one whose name ends in ``.pkl``.
        spatial: ``mu_s`` and ``sigma_s``. Their order is told as ``meta["layout"]``.
        metric: the entry of a pickle, e.g. ``"fd_dinov2"``.

    Raises:
        FileNotFoundError: there is no such file.
        OnlyImagesError: there is ``arr_0`` but no pair.
        ValueError: it is damaged, of another kind, or its numbers are no mean and covariance.
    """
    path = Path(path)
    if path.suffix == ".pkl":
        if spatial:
            raise ValueError(f"{path}: a .pkl has no spatial statistics")
        mean, covariance, n, meta = _read_pickle(path, metric)
    else:
        mean, covariance, n, meta = _read_npz(path, spatial)
    return *_checked(path, mean, covariance), _count(path, n), meta


def _read_npz(path: Path, spatial: bool) -> tuple[Any, Any, Any, dict[str, Any]]:
    keys = ("mu_s", "sigma_s") if spatial else ("mu", "sigma")
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file of statistics")
    if not _is_zip(path):  # numpy would advise to unpickle it
        raise ValueError(f"{path}: not an npz file of plain arrays but cut short, or of another kind")
    try:
        with np.load(path, allow_pickle=False) as file:
            names = set(file.files)
            found = {key: file[key] for key in (*keys, "n", "meta") if key in names}  # never arr_0: gigabytes
    except (ValueError, *DAMAGED) as error:
        raise ValueError(f"{path}: not an npz file of plain arrays ({_first_line(error)})") from error
    missing = [key for key in keys if key not in found]
    if missing and "arr_0" in names and not {"mu", "sigma"} & names:
        raise OnlyImagesError(
            f"{path}: no {', '.join(missing)} in it, only images (arr_0): extract their features with fid.py reference"
        )
    if missing:
        raise ValueError(f"{path}: no {', '.join(missing)} in it, but {', '.join(sorted(names)) or 'nothing'}")
    meta = _provenance(path, found["meta"]) if "meta" in found else {}
    if "arr_0" in names:
        meta = meta | {"arr_0": "not used: mu and sigma are of the whole data set"}
    return *(found[key] for key in keys), found.get("n"), meta | ({"layout": ADM_LAYOUT} if spatial else {})


def _is_zip(path: Path) -> bool:
    if not zipfile.is_zipfile(path):  # which looks at the end alone
        return False
    with path.open("rb") as file:
        return file.read(4) == b"PK\3\4"


def _read_pickle(path: Path, metric: str) -> tuple[Any, Any, Any, dict[str, Any]]:
    try:
        with path.open("rb") as file:
            content = _ArraysOnly(file).load()
    except FileNotFoundError:
        raise
    except Exception as error:  # what a damaged pickle raises has no end
        raise ValueError(f"{path}: not a pickle of plain numpy arrays ({_first_line(error)})") from error
    metrics = [key for key, value in content.items() if _is_pair(value)] if isinstance(content, dict) else []
    if metric not in metrics:
        held = f"it holds {', '.join(map(str, metrics))}" if metrics else "it holds no {metric: {mu, sigma}}"
        raise ValueError(f"{path}: no statistics for {metric!r}; {held}")
    pair = content[metric]
    return pair["mu"], pair["sigma"], pair.get("num_images", content.get("num_images")), {"metric": metric}


def _is_pair(value: Any) -> bool:
    return isinstance(value, dict) and {"mu", "sigma"} <= value.keys()


def _numpy_names() -> dict[tuple[str, str], Any]:
    """What a pickled array or number of numpy 1 or 2 refers to, taken from the arrays of the numpy that runs."""
    array = np.zeros(1)
    names: dict[tuple[str, str], Any] = {("numpy", "ndarray"): np.ndarray, ("numpy", "dtype"): np.dtype}
    for core in ("numpy.core", "numpy._core"):
        names[core + ".multiarray", "_reconstruct"] = array.__reduce__()[0]
        names[core + ".multiarray", "scalar"] = array[0].__reduce__()[0]
        names[core + ".numeric", "_frombuffer"] = array.__reduce_ex__(5)[0]
    return names | {("_codecs", "encode"): _latin1}


def _latin1(text: str, encoding: str) -> bytes:
    """Bytes as protocol 2 writes them; the one use that arrays make of ``_codecs.encode``."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes are encoded as {encoding!r}")
    return text.encode("latin1")


class _ArraysOnly(pickle.Unpickler):
    """Admits numbers, strings, containers and numpy arrays; calls nothing else."""

    allowed = _numpy_names()

    def find_class(self, module: str, name: str) -> Any:
        """The object of that name, if an array needs it."""
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(f"it wants to load {module}.{name}")
        return self.allowed[module, name]


def _checked(path: Path, mean: Any, covariance: Any) -> tuple[np.ndarray, np.ndarray]:
    """Both in fp64, native byte order. Raises ValueError for what cannot be a mean and its covariance."""
    if not all(isinstance(x, np.ndarray) and x.dtype.kind in "fiu" for x in (mean, covariance)):
        raise ValueError(f"{path}: mean and covariance must be arrays of real numbers")
    if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)) or not len(mean):
        raise ValueError(
            f"{path}: mu must be [d] and sigma [d, d], not {list(mean.shape)} and {list(covariance.shape)}"
        )
    mean, covariance = (np.ascontiguousarray(x, dtype=np.float64) for x in (mean, covariance))
    if not (np.isfinite(mean).all() and np.isfinite(covariance).all()):
        raise ValueError(f"{path}: the statistics hold NaN or infinity")
    largest = np.abs(covariance).max()
    rounding = 1e-9 * max(largest, np.square(mean).max())  # a constant feature's variance may come out below zero
    if np.abs(covariance - covariance.T).max() > 1e-5 * largest or covariance.diagonal().min() < -rounding:
        raise ValueError(f"{path}: sigma is no covariance: not symmetric, or with a negative variance")
    return mean, covariance


def _count(path: Path, n: Any) -> int | None:
    """How many images. Raises ValueError for what cannot be a number of them that has a covariance."""
    if n is None:
        return None
    count = np.asarray(n)
    if count.shape or count.dtype.kind not in "iu" or count < 2:
        raise ValueError(f"{path}: n, the number of images, must be whole and 2 or more, not {n}; make the file anew")
    return int(count)


_TEXTS = ("name", "extractor", "weights_sha256", "resize", "layout", "images_sha256", "file_sha256")
_NUMBERS = ("floor", "floor_kid", "floor_draws")


def _provenance(path: Path, text: np.ndarray) -> dict[str, Any]:
    """``meta``, whose fields decide what is compared. Raises ValueError where it is none of ours."""
    try:
        meta = json.loads(str(text))
        sides = meta.get("image_shape", [1])
        right = {key: meta.get(key) is None or isinstance(meta[key], str) for key in _TEXTS}
        right |= {key: math.isfinite(meta.get(key, 0)) for key in _NUMBERS}
        right["image_shape"] = isinstance(sides, list) and all(isinstance(side, int) for side in sides)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: its meta is damaged ({_first_line(error)}); make it anew") from error
    if wrong := [key for key, fits in right.items() if not fits]:
        raise ValueError(f"{path}: its meta is damaged ({wrong[0]} is {meta[wrong[0]]!r}); make it anew")
    return meta


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
