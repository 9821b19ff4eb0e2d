"""Scores of each class by itself: a model can be good on average and bad at one class."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eval.distances import check_features
from eval.frechet import frechet
from eval.kernel import kid
from eval.statistics import GaussianStats


def per_class(
    generated: Tensor,
    generated_labels: Tensor,
    reference: Tensor,
    reference_labels: Tensor,
    names: Sequence[str] | None = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """KID, and the Fréchet distance where it means something, between the images of one class on both sides.

    Args:
        generated: features [n, d].
        generated_labels: int64 [n], the class that each image was asked to show.
        reference: features [m, d] of real images.
        reference_labels: int64 [m].
        names: of the classes by label. If given, a class absent on both sides has a row as well.
        seed: of KID's subsets.

    Returns:
        One row of JSON values per class, ascending: ``class``, ``name``, ``n_gen``, ``n_ref``, ``kid``,
        ``kid_standard_error``, ``frechet``, ``note``. What cannot be computed is None and ``note`` says why: a class
        without images on a side, fewer than 4 images (KID), or no more images than d (Fréchet, whose bias then
        outweighs the distance); else ``note`` is None. Fréchet distances of classes compare only at equal counts.

    Raises:
        ValueError: labels do not match features in number, lie outside of ``names``, or features are bad.
        TypeError: labels are not integers.
    """
    check_features(generated, reference)
    labels = [_checked(*pair, names) for pair in ((generated_labels, generated), (reference_labels, reference))]
    classes = set(labels[0].tolist()) | set(labels[1].tolist()) | set(range(len(names or ())))
    rows = []
    for number in sorted(classes):
        of_class = [x[(y == number).to(x.device)] for x, y in zip((generated, reference), labels, strict=True)]
        head = {"class": number, "name": names[number] if names else str(number)}
        rows.append(head | _scores(*of_class, seed))
    return rows


def _scores(generated: Tensor, reference: Tensor, seed: int) -> dict[str, Any]:
    counts, d = (len(generated), len(reference)), generated.shape[1]
    row: dict[str, Any] = {"n_gen": counts[0], "n_ref": counts[1], "kid": None, "kid_standard_error": None}
    row |= {"frechet": None, "note": None}
    if not all(counts):
        sides = [side for side, count in zip(("generated", "reference"), counts, strict=True) if not count]
        return row | {"note": f"no {' and no '.join(sides)} images"}
    if min(counts) < 4:
        return row | {"note": f"{min(counts)} images: KID needs 4"}
    row["kid"], row["kid_standard_error"] = kid(generated, reference, seed=seed)
    if min(counts) <= d:
        return row | {"note": f"no Fréchet distance: {min(counts)} images for {d} features"}
    return row | {"frechet": frechet(GaussianStats.of(generated), GaussianStats.of(reference))}


def _checked(labels: Tensor, features: Tensor, names: Sequence[str] | None) -> Tensor:
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise TypeError(f"labels must be integers, not {labels.dtype}")
    if labels.shape != (len(features),):
        raise ValueError(f"{len(features)} features but labels of shape {list(labels.shape)}")
    if names is not None and len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(names):
        raise ValueError(f"labels {int(labels.min())} … {int(labels.max())} but {len(names)} class names")
    return labels
