"""One pass over a set of images: everything that scores need of it, in memory that does not grow with their number.

Sums of features (for Fréchet distances) and of class probabilities (for the Inception Score) take every image. Features
themselves are kept of ``keep`` images at most, which are drawn beforehand: for KID, precision and recall and whatever
else looks at single images.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from eval.extractors import FeatureExtractor, Observation
from eval.files import DAMAGED, replacing
from eval.generate import Images, generate
from eval.images import ImageSet
from eval.inception_score import InceptionSums
from eval.ranks import gather, world
from eval.statistics import GaussianStats, fp64_device

KEEP = 10_000
"""Images whose features are kept: 80 MB of the FID network's."""


@dataclass
class Features:
    """What is known of a set of images, seen through one extractor.

    Attributes:
        stats: sums over all images.
        spatial: the same of the spatial features, where the extractor has them.
        inception: sums for the Inception Score, where they were asked for.
        kept: fp32 [k, d] on the CPU, in the order of ``indices``.
        indices: int64 [k], rising: which images ``kept`` are.
        labels: int64 [k], their classes, where they are known.
        meta: what they are of, as JSON values: ``name``, ``extractor``, ``weights_sha256``, ``resize``, and more.
    """

    stats: GaussianStats
    spatial: GaussianStats | None = None
    inception: InceptionSums | None = None
    kept: Tensor = field(default_factory=lambda: torch.empty(0, 0), repr=False)
    indices: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64), repr=False)
    labels: Tensor | None = field(default=None, repr=False)
    meta: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        """Images in the sums; 0 where a file did not tell."""
        return self.stats.n or 0

    def save(self, path: str | Path) -> None:
        """Write an ``.npz`` with ``mu`` and ``sigma``, as FID tools read them, ``mu_s`` and ``sigma_s``, and the rest.

        The file appears whole or not at all. Sums for the Inception Score are left out: no reference needs them.
        """
        arrays: dict[str, Any] = {"meta": json.dumps(self.meta)}
        if self.stats.n is not None:
            arrays["n"] = self.stats.n
        for suffix, stats in (("", self.stats), ("_s", self.spatial)):
            if stats is not None:
                arrays[f"mu{suffix}"], arrays[f"sigma{suffix}"] = stats.mean.cpu(), stats.covariance.cpu()
        arrays |= {"features": self.kept, "indices": self.indices}
        if self.labels is not None:
            arrays["labels"] = self.labels
        with replacing(Path(path)) as file:
            np.savez(file, **{key: np.asarray(value) for key, value in arrays.items()})

    @classmethod
    def load(cls, path: str | Path, device: str | torch.device = "cpu") -> "Features":
        """Read what ``save`` wrote, or another tool's statistics (see ``GaussianStats.load``), which are all then.

        Raises:
            ValueError: the file holds no statistics, or is damaged.
        """
        path = Path(path)
        stats, names, ours = GaussianStats.load(path, device), set(), {}
        if path.suffix != ".pkl":
            try:
                with np.load(path, allow_pickle=False) as file:
                    names = set(file.files)
                    ours = {name: torch.from_numpy(file[name]) for name in {"features", "indices", "labels"} & names}
            except (ValueError, TypeError, *DAMAGED) as error:
                raise ValueError(f"{path}: damaged ({error}); make it anew") from error
        spatial = GaussianStats.load(path, device, spatial=True) if "mu_s" in names else None
        if not {"features", "indices"} <= ours.keys():
            about = {"name": path.name, "file_sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
            return cls(stats, spatial, meta=about | stats.meta)
        _check_kept(path, stats.num_features, **ours)
        if spatial is not None and stats.n is not None:
            spatial = GaussianStats.given(spatial.mean, spatial.covariance, stats.n, spatial.meta)
        return cls(stats, spatial, None, ours["features"], ours["indices"], ours.get("labels"), stats.meta)


def extract(
    images: Images | ImageSet,
    indices: Tensor,
    extractor: FeatureExtractor,
    batch_size: int,
    *,
    group: dist.ProcessGroup | None = None,
    keep: int = KEEP,
    splits: int = 0,
    labels: Callable[[Tensor], Tensor] | None = None,
    seed: int = 0,
    shape: Sequence[int] | None = None,
    meta: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Features:
    """See the images ``indices`` through ``extractor``. Every rank of ``group`` calls it and gets the same.

    Args:
        images: int64 indices [B] to uint8 images [B, C, H, W], or images on disk, which are read ahead.
        indices: int64 [n], each once.
        extractor: the network, the same on every rank.
        batch_size: B, images per call; it belongs to the result as far as rounding goes.
        group: the ranks that share the work.
        keep: features of so many images are kept, drawn by ``seed`` if there are more.
        splits: of an Inception Score; 0 takes none.
        labels: int64 indices [N] to classes int64 [N]; called for the kept ones.
        seed: of the draw.
        shape: (C, H, W) that images must have, if any.
        meta: goes into ``Features.meta`` beside what the extractor is.
        progress: see ``generate``.

    Raises:
        ValueError: features that are not finite, on every rank alike; an extractor without class scores for splits.
    """
    sums = _Sums(extractor, indices, splits)
    chosen = _draw(indices, keep, seed)
    if isinstance(images, ImageSet):
        _check_shape(images.shape, shape)
        shapes, batches = {images.shape}, images.batches(indices, batch_size, group, progress)
    else:
        watched, shapes = _watched(images, extractor, shape)
        batches = generate(watched, indices, batch_size, group, progress)
    rows, done = [torch.empty(0, extractor.num_features)], [torch.empty(0, dtype=torch.int64)]
    for batch, made in batches:
        seen = extractor.observe(made)
        sums.update(batch, seen)
        held = torch.isin(batch, chosen)
        rows.append(seen.features.cpu()[held])
        done.append(batch[held])
    sums.pool(group)
    if len(shapes) > 1:
        raise ValueError(f"images of different shapes: {' and '.join(map(str, sorted(shapes)))}")
    kept, order = gather(torch.cat(rows), torch.cat(done), group)
    about = {
        **(meta or {}),
        "extractor": extractor.name,
        "weights_sha256": extractor.weights_sha256,
        "resize": extractor.resize,
        "extractor_device": extractor.device.type,
        "batch_size": batch_size,
        "image_shape": list(*shapes),
        "first_index": int(indices.min()),
        "last_index": int(indices.max()),
        "torch": str(torch.__version__),
    }
    return Features(sums.stats, sums.spatial, sums.inception, kept, order, labels(order) if labels else None, about)


def _watched(
    images: Images, extractor: FeatureExtractor, shape: Sequence[int] | None
) -> tuple[Images, set[tuple[int, ...]]]:
    """``images`` with checks of each batch, and the set of shapes, which fills as it is called.

    It is called equally often on every rank, so that all see what does not fit, also those whose share has run out.
    """
    shapes: set[tuple[int, ...]] = set()

    def watched(wanted: Tensor) -> Tensor:
        made = images(wanted)
        _check_shape(made.shape[1:], shape)
        extractor.check(made)
        shapes.add(tuple(made.shape[1:]))
        return made

    return watched, shapes


def _check_shape(found: Sequence[int], wanted: Sequence[int] | None) -> None:
    if wanted is not None and list(found) != list(wanted):
        raise ValueError(f"images are {list(found)}, the reference's {list(wanted)}")


def of_images(
    images: Tensor,
    extractor: FeatureExtractor,
    batch_size: int,
    name: str,
    labels: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Features:
    """Features of all real images uint8 [n, C, H, W] that lie in memory, kept one and all; ranks share the work.

    Args:
        images: the same on every rank.
        extractor: as for ``extract``.
        batch_size: as for ``extract``.
        name: which images they are, e.g. ``"digits held out"``.
        labels: int64 [n], their classes.
        group: as for ``extract``.

    Raises:
        TypeError: images are not uint8.
        ValueError: images have not the shape that the extractor takes, or hold 0..1 instead of 0..255.
    """
    check_range(images, name)
    pixels = images.cpu().contiguous()
    about = {"name": name, "images_sha256": hashlib.sha256(pixels.numpy().tobytes()).hexdigest()}
    classes = None if labels is None else lambda chosen: labels[chosen]
    everything = torch.arange(len(images))
    return extract(
        lambda chosen: pixels[chosen], everything, extractor, batch_size,
        group=group, keep=len(images), labels=classes, meta=about,
    )  # fmt: skip


def check_range(images: Tensor, name: str) -> None:
    """Raise ValueError where a whole set of real uint8 images holds nothing brighter than 1: it was cast from 0..1.

    For images that a user supplies, not for generated ones: those of a collapsed model can be as dark.
    """
    if images.dtype == torch.uint8 and images.numel() and images.max() == 1:
        raise ValueError(f"{name}: the brightest pixel is 1, but uint8 images must span 0..255, not 0..1")


class _Sums:
    """What takes every image. Those whose features are not finite are told of when all ranks are done."""

    def __init__(self, extractor: FeatureExtractor, indices: Tensor, splits: int):
        device, n = fp64_device(extractor.device), len(indices)
        if splits and not extractor.num_classes:
            raise ValueError(f"{extractor.name} gives no class scores: there is no Inception Score of it")
        self.stats = GaussianStats(extractor.num_features, device)
        layout = {"layout": "NHWC"}  # as ADM flattens them
        self.spatial = GaussianStats(extractor.num_spatial, device, layout) if extractor.num_spatial else None
        self.inception = InceptionSums(extractor.num_classes, n, splits, device=device) if splits else None
        self._sorted, self._positions = indices.cpu().sort()
        self._bad: list[int] = []

    def update(self, batch: Tensor, seen: Observation) -> None:
        finite = torch.isfinite(seen.features).all(1)
        if not finite.all():  # the other ranks know nothing of it yet, and wait in the next collective
            self._bad += batch[~finite.cpu()].tolist()
            return
        self.stats.update(seen.features)
        if self.spatial is not None:
            self.spatial.update(seen.spatial)
        if self.inception is not None:
            self.inception.update(self._positions[torch.searchsorted(self._sorted, batch)], seen.logits)

    def pool(self, group: dist.ProcessGroup | None) -> None:
        """Sums over all ranks. Raises ValueError on every rank if one saw features that are not finite."""
        told = [self._bad] * world(group)[1]
        if len(told) > 1:
            dist.all_gather_object(told, self._bad, group=group)
        if bad := sorted(index for one in told for index in one):
            count = f"features of {len(bad)} of {len(self._sorted)} images"
            raise ValueError(f"{count} hold NaN or infinity, first of the image with index {bad[0]}")
        for sums in (self.stats, self.spatial, self.inception):
            if sums is not None:
                sums.all_reduce(group)


def _check_kept(path: Path, d: int, features: Tensor, indices: Tensor, labels: Tensor | None = None) -> None:
    """Raise ValueError unless they are what `Features.save` writes."""
    count = len(indices) if indices.ndim else -1
    wrong = {
        f"features must be floats [{count}, {d}]": not features.dtype.is_floating_point
        or (count != 0 and tuple(features.shape) != (count, d)),  # another tool's statistics have none
        "features hold NaN or infinity": not torch.isfinite(features).all(),
        "indices must be int64 [k] and rise": indices.dtype != torch.int64
        or indices.ndim != 1
        or bool((indices[1:] <= indices[:-1]).any()),
        "labels must be int64, one an image, 0 or more": labels is not None
        and (labels.dtype != torch.int64 or labels.shape != indices.shape or bool((labels < 0).any())),
    }
    if found := [what for what, so in wrong.items() if so]:
        raise ValueError(f"{path}: damaged ({found[0]}); make it anew")


def _draw(indices: Tensor, keep: int, seed: int) -> Tensor:
    """The ``keep`` of ``indices`` whose features are kept; all of them if there are no more."""
    if len(indices) <= keep:
        return indices
    return indices[torch.randperm(len(indices), generator=torch.Generator().manual_seed(seed))[:keep]]
