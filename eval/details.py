"""What a score can be asked beyond itself: intervals, extrapolation, single classes, memorisation."""

from typing import Any

import torch

from eval.bootstrap import frechet_interval, frechet_standard_error
from eval.extrapolate import fid_infinity
from eval.features import Features
from eval.kernel import cmmd
from eval.memorisation import memorisation
from eval.per_class import per_class


def details(
    generated: Features,
    reference: Features,
    *,
    intervals: bool = False,
    infinity: bool = False,
    classes: bool = False,
    training: Features | None = None,
) -> dict[str, Any]:
    """Further keys for a record; from the features that were kept.

    Args:
        generated: of the images that are scored.
        reference: of real images.
        intervals: ``value_low``, ``value_high`` (95 %, of the distance without its bias) and ``standard_error``.
        infinity: ``infinity`` and ``infinity_standard_error``, FID∞.
        classes: ``classes``, a row a class; both sides need labels.
        training: of the training images: ``share_near``, ``auth_pct`` and the nearest pairs, as ``Memorisation``.

    CLIP embeddings give ``cmmd`` unasked. ``details_count`` says of how many images these are: those kept, which are
    fewer than the score's beyond a protocol's ``keep``.

    Raises:
        ValueError: features or labels that are needed were not kept, or images are too few.
    """
    asked = intervals or infinity or classes or training is not None
    found: dict[str, Any] = {"details_count": len(generated.kept)} if asked else {}
    if asked and not len(generated.kept):
        raise ValueError("details need single images, but no features were kept")
    if intervals:
        interval = frechet_interval(generated.kept, reference.stats)
        found |= {"value_low": interval.low, "value_high": interval.high, "bias": interval.bias}
        found["standard_error"] = frechet_standard_error(generated.kept, reference.stats)
    if infinity:
        line = fid_infinity(generated.kept, reference.stats)
        found |= {"infinity": line.value, "infinity_standard_error": line.standard_error}
    if classes:
        if generated.labels is None or reference.labels is None:
            raise ValueError("scores by class need classes on both sides: label the images and the reference")
        found["classes"] = per_class(generated.kept, generated.labels, reference.kept, reference.labels)
    if training is not None:
        check_training(training, reference)
        near = memorisation(generated.kept, training.kept, reference.kept)
        found |= near._asdict() | {
            "generated": generated.indices[torch.tensor(near.generated)].tolist(),
            "training": training.indices[torch.tensor(near.training)].tolist(),
            "training_sha256": training.meta.get("images_sha256"),
            "training_count": len(training.kept),
        }
    if generated.meta["extractor"].startswith("clip-") and len(reference.kept):
        found["cmmd"] = cmmd(generated.kept, reference.kept)
    return found


def check_training(training: Features, reference: Features) -> None:
    """Raise the ValueError that ``details`` would for such training images, before any image is made."""
    _check_single(reference, "the reference")
    _check_single(training, "the reference of training images")
    for key in ("extractor", "weights_sha256", "resize"):
        if training.meta.get(key) != reference.meta.get(key):
            raise ValueError(f"the training images were seen through another {key}: make their reference anew")
    theirs = training.meta.get("images_sha256")
    if theirs is not None and theirs == reference.meta.get("images_sha256"):
        raise ValueError("the training images are those of the reference, which must be held out from training")


def _check_single(features: Features, name: str) -> None:
    if not len(features.kept):
        raise ValueError(f"{name} holds sums alone, but single images are needed")
