"""Scores of generated images against real ones, as records that say everything a number depends on."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from eval.extractors import FeatureExtractor, score_name
from eval.features import Features, check_range, extract
from eval.frechet import frechet
from eval.generate import Images
from eval.images import ImageSet
from eval.kernel import kid
from eval.manifold import prdc
from eval.protocols import PROTOCOLS, Protocol
from eval.ranks import from_main

KID_SUBSETS = 100
KID_SUBSET_SIZE = 1000
DENSITY_NEIGHBOURS = 5
FLOOR = ("floor", "floor_kid", "floor_draws")
"""What the maker of a reference may put into its ``meta``: scores of other real images against it, at the same n."""
SMALL = PROTOCOLS["small"]


def score(
    images: Images | ImageSet,
    indices: Tensor,
    reference: Features,
    extractor: FeatureExtractor,
    batch_size: int,
    group: dist.ProcessGroup | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    protocol: Protocol = SMALL,
) -> dict[str, Any]:
    """Score the images ``indices`` against ``reference``: ``extract`` and ``compare`` in one call.

    Every rank of ``group`` calls it and gets the same record, for any number of ranks to rounding of fp64 sums. What
    ``images`` or the extractor raises on one rank alone, for example for want of memory, is raised there while the
    others wait in a collective: let it end the process, and torchrun ends them.

    Args and raises: as ``extract`` and ``compare``; what can be refused before an image is made, is.
    """
    check_comparable(len(indices), extractor, reference, protocol)
    generated = extract(
        images, indices, extractor, batch_size,
        group=group, keep=max(protocol.keep, len(reference.kept)), splits=protocol.splits, seed=seed, progress=progress,
        shape=reference.meta.get("image_shape"),
    )  # fmt: skip
    return compare(generated, reference, protocol, seed, group)


def compare(
    generated: Features,
    reference: Features,
    protocol: Protocol = SMALL,
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """The record of ``generated`` against ``reference``. Every rank of ``group`` calls it and gets the same.

    Distances are computed by rank 0 where the sums of ``generated`` lie; where that fails, every rank raises the same
    error. Metrics that need single images leave their keys out where the reference holds sums alone.

    Args:
        generated: of the images to be scored.
        reference: of real images, held out from training, seen through the same extractor; in protocol ``small`` as
            many, since a Fréchet distance is biased by about 1/n.
        protocol: which metrics, and what must have been the same.
        seed: of KID's subsets.
        group: the ranks that wait for the record.

    Returns:
        JSON values. ``value`` is the Fréchet distance and ``metric`` its name; ``kid``, ``kid_standard_error``
        (unscaled), ``precision``, ``recall``, ``density``, ``coverage``, ``sfid``, ``inception_score`` and
        ``inception_score_std`` as the protocol has them; then what was compared.

    Raises:
        ValueError: n differs, another extractor, resize or image size, too few images; on every rank alike.
        RuntimeError: rank 0 could not compute the distances; on every rank alike.
    """
    about = generated.meta
    _check_seen_alike(about["extractor"], about["weights_sha256"], about["resize"], reference)
    _check_count(len(generated), reference, protocol)
    theirs = reference.meta.get("image_shape")
    if theirs not in (None, about["image_shape"]):
        raise ValueError(f"images are {about['image_shape']}, the reference's {theirs}")
    record = {
        "protocol": protocol.name,
        "protocol_reference": protocol.reference,
        "metric": score_name(about["extractor"], len(generated)),
        **from_main(lambda: _distances(generated, reference, protocol, seed), group),
        "kid_seed": seed,
        "n_gen": len(generated),
        "n_ref": reference.stats.n,
        "num_features": generated.stats.num_features,
        "rank_deficient": len(generated) <= generated.stats.num_features,
        "reference": reference.meta.get("name", "statistics of another tool"),
        "reference_sha256": reference.meta.get("file_sha256", reference.meta.get("images_sha256")),
        "n_kept": [len(generated.kept), len(reference.kept)],
        **{key: reference.meta[key] for key in FLOOR if key in reference.meta},
    }
    return record | {key: value for key, value in about.items() if key not in record}  # what was measured wins


def floor(
    train_images: Tensor,
    reference: Features,
    extractor: FeatureExtractor,
    batch_size: int,
    group: dist.ProcessGroup | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """The score of n real training images, drawn by ``seed``: what a perfect model would get at this n.

    Without this row a Fréchet distance at small n cannot be read, since even real images are far from zero.

    Args:
        train_images: uint8 [N, C, H, W], N ≥ n.
        reference: as for ``score``.
        extractor: as for ``score``.
        batch_size: as for ``score``.
        group: as for ``score``.
        seed: of the draw and of KID's subsets.

    Raises:
        ValueError: fewer training images than the reference holds, or 0..1 instead of 0..255, or as in ``score``.
    """
    check_range(train_images, "training images")
    if len(train_images) < len(reference):
        raise ValueError(f"{len(train_images)} training images, but the floor needs {len(reference)} as the reference")
    draw = torch.randperm(len(train_images), generator=torch.Generator().manual_seed(seed))[: len(reference)]
    pick = train_images.cpu()
    return score(lambda chosen: pick[chosen], draw.sort().values, reference, extractor, batch_size, group, seed)


def check_comparable(n: int, extractor: FeatureExtractor, reference: Features, protocol: Protocol) -> None:
    """Raise the ValueError that ``compare`` would for n images seen through ``extractor``, before any is made."""
    protocol.check(extractor)
    _check_seen_alike(extractor.name, extractor.weights_sha256, extractor.resize, reference)
    if extractor.num_features != reference.stats.num_features:
        theirs = reference.stats.num_features
        raise ValueError(f"{extractor.name} gives {extractor.num_features} features, the reference has {theirs}")
    _check_count(n, reference, protocol)


def _check_seen_alike(extractor: str, weights: str, resize: str, reference: Features) -> None:
    """Statistics of other tools name no extractor; the user answers for them."""
    told, theirs = reference.meta.get("extractor"), str(reference.meta.get("weights_sha256"))
    if told is not None and (told, theirs) != (extractor, weights):
        raise ValueError(
            f"the reference was seen through {told} ({theirs[:8]}), not {extractor} ({weights[:8]}): make it anew"
        )
    if told is not None and reference.meta.get("resize") != resize:
        raise ValueError(f"the reference was resized by {reference.meta.get('resize')}, not {resize}: make it anew")


def _check_count(n: int, reference: Features, protocol: Protocol) -> None:
    if protocol.count is None and reference.stats.n is None:
        raise ValueError(
            f"protocol {protocol.name} wants equal n, but the reference does not say of how many images it is"
        )
    if protocol.count is None and n != len(reference):
        raise ValueError(f"{n} images against {len(reference)} in the reference: use equal n, the bias is about 1/n")
    held = len(reference.kept)
    if protocol.neighbours and protocol.equal_n and held and min(n, max(protocol.keep, held)) != held:
        raise ValueError(f"precision and recall want equal n, but {n} images meet {held} kept in the reference")
    if n < 4:
        raise ValueError(f"{n} images cannot be scored: KID needs at least 4")


def _distances(generated: Features, reference: Features, protocol: Protocol, seed: int) -> dict[str, Any]:
    """``_numbers``, with whatever goes wrong told as no distances."""
    try:
        return _numbers(generated, reference, protocol, seed)
    except ValueError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise RuntimeError(f"no distances: {type(error).__name__}: {reason}") from error


def _numbers(generated: Features, reference: Features, protocol: Protocol, seed: int) -> dict[str, Any]:
    found: dict[str, Any] = {"value": frechet(generated.stats, reference.stats)}
    device = generated.stats.sum.device
    a, b = generated.kept.to(device), reference.kept.to(device)
    if len(a) >= 4 and len(b) >= 4:
        found["kid"], found["kid_standard_error"] = kid(a, b, KID_SUBSET_SIZE, KID_SUBSETS, seed)
        found["kid_subsets"], found["kid_subset_size"] = KID_SUBSETS, min(KID_SUBSET_SIZE, len(a) // 2, len(b) // 2)
    if protocol.neighbours and min(len(a), len(b)) > DENSITY_NEIGHBOURS:
        balls = prdc(b, a, protocol.neighbours, DENSITY_NEIGHBOURS, allow_unequal=not protocol.equal_n)
        found |= balls._asdict() | {"neighbours": protocol.neighbours, "density_neighbours": DENSITY_NEIGHBOURS}
    if protocol.spatial and generated.spatial is not None and reference.spatial is not None:
        found["sfid"] = frechet(generated.spatial, reference.spatial)
    if generated.inception is not None:
        found["inception_score"], found["inception_score_std"] = generated.inception.score()
        found["inception_score_splits"] = generated.inception.splits
    return found
