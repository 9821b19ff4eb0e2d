"""Generated images to disk by any number of ranks; what was interrupted goes on where it was.

Every rank writes its own batches at once: a folder of PNG files takes them as they are, for a ``.zip`` or ``.npz`` they
wait in ``NAME.parts/`` until rank 0 puts them together. All ranks must see one disk.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from eval.files import FolderLock, replacing
from eval.generate import Images, generate
from eval.image_parts import ArrayParts, PngParts
from eval.ranks import from_main

MANIFEST = "manifest.json"
_NO_FOLDERS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".npy", ".tar", ".gz")


def write_images(
    images: Images,
    path: str | Path,
    indices: Tensor,
    batch_size: int,
    settings: Mapping[str, Any],
    *,
    labels: Tensor | None = None,
    rgb: bool = False,
    group: dist.ProcessGroup | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Generate the images ``indices`` into ``path``; every rank of ``group`` calls it.

    Called again after an interruption, with any number of ranks, it makes the batches that are missing and nothing
    else; the result has the bytes of one that was never interrupted. Called once more, it makes nothing.

    Args:
        images: as for ``eval.generate.generate``.
        path: ``NAME.npz`` in ADM's layout (``arr_0`` uint8 [N, H, W, C], ``arr_1`` labels), ``NAME.zip`` of PNG files,
            or a folder of PNG files. Files are named by index, ``000042.png``; an array is in the order of ``indices``.
        indices: int64 [N], none below 0.
        batch_size: B; it belongs to the settings, since the last bit of a pixel can depend on it.
        settings: JSON values that decide the pixels, e.g. the checkpoint's hash, sampler, guidance and seed. Kept in
            ``manifest.json`` of a folder, in ``NAME.npz.json`` beside a file; going on with others is refused.
        labels: int64 [N], stored by an ``.npz`` only.
        rgb: store grey images with three equal channels, as ADM's evaluator wants them.
        group: the ranks that share the work.
        progress: see ``generate``; counts what this call makes.

    Returns:
        How many images were made by this call, over all ranks.

    Raises:
        ValueError: what is at ``path`` was made with other settings, is not ours, or is being written by another
            process; on every rank alike.
        RuntimeError: rank 0 could not put the parts together; on every rank alike.
    """
    writer = Writer(path, indices, batch_size, settings, labels=labels, rgb=rgb, group=group)
    made = 0

    def count(done: int, total: int) -> None:
        nonlocal made
        made = done
        if progress:
            progress(done, total)

    with writer:
        for chosen, pixels in generate(images, indices, batch_size, group, count, writer.done):
            writer.write(chosen, pixels)
        writer.finish()
    return made


def read_settings(path: str | Path) -> dict[str, Any] | None:
    """The ``settings`` that ``write_images`` was given for what lies at ``path``; None where none are there.

    Raises:
        ValueError: they are there but damaged.
    """
    path = Path(path)
    manifest = path / MANIFEST if path.is_dir() else path.with_name(path.name + ".json")
    if not manifest.is_file():
        return None
    try:
        found = json.loads(manifest.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{manifest}: is damaged, so nobody knows how the images were made; take it away") from error
    settings = found.get("settings") if isinstance(found, dict) and "written" in found else None
    return settings if isinstance(settings, dict) else None  # else it is another program's


class Writer:
    """The steps of ``write_images``, for a caller that does more with each batch, such as extracting features.

    A context manager: until its end, or that of this process, no other process can write there.

    Attributes:
        done: int64, indices that need not be made, the same on every rank; hand it to ``generate``.
    """

    def __init__(
        self,
        path: str | Path,
        indices: Tensor,
        batch_size: int,
        settings: Mapping[str, Any],
        *,
        labels: Tensor | None = None,
        rgb: bool = False,
        group: dist.ProcessGroup | None = None,
    ):
        self._path, self._rgb, self._group = Path(path), rgb, group
        self._indices, self._labels = indices, labels = indices.cpu(), None if labels is None else labels.cpu()
        suffix = self._path.suffix.lower()
        _check(self._path, suffix, indices, batch_size, labels)
        self._packed = suffix in (".npz", ".zip")
        self._place = self._beside(".parts") if self._packed else self._path
        self._parts = (
            ArrayParts(self._place, indices, batch_size) if suffix == ".npz" else PngParts(self._place, indices)
        )
        self._manifest = _manifest(settings, indices, batch_size, labels, rgb)
        self._lock: FolderLock | None = None  # of rank 0
        self.done: Tensor = from_main(self._begin, group)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.release()

    def write(self, indices: Tensor, images: Tensor) -> None:
        """Store a batch of this rank as ``generate`` yields it: int64 [b], uint8 [b, C, H, W] with C 1 or 3."""
        channels = images.shape[1]
        if channels not in (1, 3):
            raise ValueError(f"images must have 1 or 3 channels to be stored, not {channels}")
        self._parts.write(indices, images.expand(-1, 3, -1, -1) if self._rgb else images)

    def finish(self) -> None:
        """Check that all is there and put a zip or array together; every rank calls it, after its last ``write``.

        Raises:
            RuntimeError: images are missing, e.g. since ranks write to different disks.
        """
        from_main(self._finish, self._group)

    def _beside(self, end: str) -> Path:
        return self._path.with_name(self._path.name + end)

    def _begin(self) -> Tensor:
        """What is done already, by the disk, after it was made sure that it is of these settings. Rank 0 only."""
        if self._is_finished():
            return self._indices
        self._check_ours()
        self._place.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(self._place, self._path)
        try:
            if self._is_finished():  # by the process that held it until now
                return self._indices
            if not (self._place / MANIFEST).exists():
                self._tell(self._place / MANIFEST)
            return self._parts.done()
        except BaseException:
            self._lock.release()
            raise

    def _check_ours(self) -> None:
        """Raise ValueError where something lies that we did not begin, or began with other settings."""
        place, manifest = self._place, self._place / MANIFEST
        if manifest.exists():
            self._agree(manifest)
        elif place.exists() and not _is_empty(place):
            raise ValueError(f"{place}: no {MANIFEST} tells how it was made; take it away or write elsewhere")
        elif self._packed and self._path.exists():
            beside = self._beside(".json").name
            raise ValueError(f"{self._path}: no {beside} tells how it was made; take it away or write elsewhere")

    def _is_finished(self) -> bool:
        """Whether the zip or array is there with its manifest. Raises ValueError where it is of other settings."""
        if not (self._packed and self._path.exists() and self._beside(".json").exists()):
            return False
        self._agree(self._beside(".json"))
        shutil.rmtree(self._place, ignore_errors=True)  # what an interrupted clean-up left
        return True

    def _finish(self) -> None:
        if self._is_finished():
            return
        missing = self._indices[~torch.isin(self._indices, self._parts.done())]
        if len(missing):
            raise RuntimeError(
                f"{self._place}: {len(missing)} of {len(self._indices)} images are missing, first {int(missing[0])}: "
                "do all ranks see this disk?"
            )
        if isinstance(self._parts, ArrayParts):
            self._parts.pack(self._path, self._labels)
        elif self._packed:
            self._parts.pack(self._path)
        if self._packed:
            self._tell(self._beside(".json"))  # from here on it is finished, whatever happens to the parts
            shutil.rmtree(self._place, ignore_errors=True)

    def _tell(self, path: Path) -> None:
        with replacing(path) as file:
            file.write(json.dumps(self._manifest, indent=1).encode())

    def _agree(self, path: Path) -> None:
        """Raise a ValueError that names the first key in which the manifest at ``path`` differs from ours."""
        try:
            found = dict(_flat(json.loads(path.read_text())))
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{path}: is no manifest of generated images ({error}); write elsewhere") from error
        ours = dict(_flat(self._manifest))
        for key in (*ours, *found):
            old, new = found.get(key, "absent"), ours.get(key, "absent")
            if old != new:
                name = key.partition(".")[2]
                raise ValueError(
                    f"{self._path}: was begun with {name} = {old}, now it is {new}; go on with the same settings, or "
                    "write elsewhere"
                )


def _check(path: Path, suffix: str, indices: Tensor, batch_size: int, labels: Tensor | None) -> None:
    if suffix in _NO_FOLDERS:
        raise ValueError(f"{path}: images go into a folder, a .zip (both of PNG files) or an .npz, not into {suffix}")
    if indices.dtype != torch.int64 or indices.ndim != 1:
        raise TypeError(f"indices must be int64 [N], not {indices.dtype} {list(indices.shape)}")
    if batch_size < 1 or len(indices) < 1:
        raise ValueError(f"nothing to write: {len(indices)} indices in batches of {batch_size}")
    if int(indices.min()) < 0:
        raise ValueError(f"index {int(indices.min())} is below 0 and names no file")
    if len(indices.unique()) != len(indices):
        raise ValueError("a sample index occurs twice: every image must be counted once")
    if labels is not None and suffix != ".npz":
        raise ValueError(f"{path}: only an .npz holds labels; leave them out or write one")
    if labels is not None and (labels.dtype != torch.int64 or labels.shape != indices.shape):
        raise ValueError(f"labels must be int64 [{len(indices)}], not {labels.dtype} {list(labels.shape)}")


def _is_empty(place: Path) -> bool:
    """Whether a folder holds nothing but hidden files, such as what a killed start left."""
    return place.is_dir() and all(file.name.startswith(".") for file in place.iterdir())


def _manifest(
    settings: Mapping[str, Any], indices: Tensor, batch_size: int, labels: Tensor | None, rgb: bool
) -> dict[str, Any]:
    """All that decides the bytes. Raises TypeError or ValueError where a setting is no JSON value."""
    own = {
        "images": len(indices),
        "batch_size": batch_size,
        "indices_sha256": _sha256(indices),
        "labels_sha256": None if labels is None else _sha256(labels),
        "rgb": rgb,
    }
    # the count before a hash that follows from it: the first difference is what `_agree` names
    return json.loads(json.dumps({"written": own, "settings": dict(settings)}, allow_nan=False))


def _sha256(x: Tensor) -> str:
    return hashlib.sha256(x.cpu().contiguous().numpy().tobytes()).hexdigest()


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested dicts by their dotted names."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
