"""Scores of few images, protocol ``small``: Fréchet distance and KID against as many held-out real images."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from eval.extractors import FeatureExtractor, score_name
from eval.frechet import frechet
from eval.generate import Images, generate
from eval.kernel import kid
from eval.ranks import communication_device, gather, world
from eval.references import Reference, check_range
from eval.statistics import GaussianStats, fp64_device

KID_SUBSETS = 100
KID_SUBSET_SIZE = 1000


def score(
    images: Images,
    indices: Tensor,
    reference: Reference,
    extractor: FeatureExtractor,
    batch_size: int,
    group: dist.ProcessGroup | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Score the images ``indices`` against ``reference``. Every rank of ``group`` calls it and gets the same record.

    The record is the same for any number of ranks: batches are composed alike (see ``generate``) and features are put
    in the order of their indices before anything is summed. It holds what makes a number comparable: names, counts,
    hashes, resize, KID's seed. The caller adds what it alone knows, such as sampler, guidance and EMA.

    The distances are computed by rank 0 on the extractor's device (``mps`` has no fp64: on the CPU); where that fails,
    every rank raises the same error. What ``images`` or the extractor raises on one rank alone, for example for want
    of memory, is raised there while the others wait in a collective: let it end the process, and torchrun ends them.

    Args:
        images: int64 indices [B] to uint8 images [B, C, H, W].
        indices: int64 [n], n equal to ``len(reference)``: a Fréchet distance is biased by about 1/n.
        reference: held-out images, seen through the same extractor.
        extractor: the network, the same on every rank.
        batch_size: B, images per call; it belongs to the result as far as rounding goes.
        group: the ranks that share the work.
        seed: of KID's subsets.
        progress: see ``generate``.

    Returns:
        JSON values; ``value`` is the Fréchet distance, ``kid`` and ``kid_standard_error`` are unscaled.

    Raises:
        ValueError: n differs, the reference is of another extractor or image size, features are not finite; on
            every rank alike.
        RuntimeError: rank 0 could not compute the distances; on every rank alike.
    """
    _check_match(reference, extractor, len(indices))
    features, order = _features(images, indices, reference, extractor, batch_size, group, progress)
    _check_finite(features, order)
    value, kid_mean, kid_error = _distances(features, reference, fp64_device(extractor.device), seed, group)
    return {
        "protocol": "small",
        "metric": score_name(extractor.name, len(features)),
        "value": value,
        "kid": kid_mean,
        "kid_standard_error": kid_error,
        "kid_subsets": KID_SUBSETS,
        "kid_subset_size": min(KID_SUBSET_SIZE, len(features) // 2),
        "kid_seed": seed,
        "n_gen": len(features),
        "n_ref": len(reference),
        "num_features": extractor.num_features,
        "first_index": int(order[0]),
        "last_index": int(order[-1]),
        "batch_size": batch_size,
        "image_shape": list(reference.image_shape),
        "extractor": extractor.name,
        "weights_sha256": extractor.weights_sha256,
        "resize": extractor.resize,
        "extractor_device": extractor.device.type,
        "reference": reference.name,
        "reference_sha256": reference.images_sha256,
        "torch": str(torch.__version__),
    }


def floor(
    train_images: Tensor,
    reference: Reference,
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


def _check_match(reference: Reference, extractor: FeatureExtractor, n: int) -> None:
    if (reference.extractor, reference.weights_sha256) != (extractor.name, extractor.weights_sha256):
        raise ValueError(
            f"the reference was seen through {reference.extractor} ({reference.weights_sha256[:8]}), "
            f"not {extractor.name} ({extractor.weights_sha256[:8]}): make it anew"
        )
    if n != len(reference):
        raise ValueError(f"{n} images against {len(reference)} in the reference: use equal n, the bias is about 1/n")
    if n < 4:
        raise ValueError(f"{n} images cannot be scored: KID needs at least 4")


def _features(
    images: Images,
    indices: Tensor,
    reference: Reference,
    extractor: FeatureExtractor,
    batch_size: int,
    group: dist.ProcessGroup | None,
    progress: Callable[[int, int], None] | None,
) -> tuple[Tensor, Tensor]:
    """Features [n, d] of all ranks' images in the order of their indices [n]."""

    def checked(chosen: Tensor) -> Tensor:
        made = images(chosen)  # checked here, where also a rank whose share has run out sees a wrong shape
        if tuple(made.shape[1:]) != reference.image_shape:
            raise ValueError(f"images are {list(made.shape[1:])}, the reference's {list(reference.image_shape)}")
        return made

    done = [torch.empty(0, dtype=torch.int64)]
    rows = [torch.empty(0, extractor.num_features)]
    for batch, made in generate(checked, indices, batch_size, group, progress):
        done.append(batch)
        rows.append(extractor(made).cpu())
    return gather(torch.cat(rows), torch.cat(done), group)


def _check_finite(features: Tensor, order: Tensor) -> None:
    """Every rank holds all features by now, so all raise or none does."""
    bad = ~torch.isfinite(features).all(1)
    if bad.any():
        where = f"first of the image with index {int(order[bad][0])}"
        raise ValueError(f"features of {int(bad.sum())} of {len(bad)} images hold NaN or infinity, {where}")


def _distances(
    features: Tensor, reference: Reference, device: torch.device, seed: int, group: dist.ProcessGroup | None
) -> tuple[float, float, float]:
    """(Fréchet, KID, its standard error), computed by rank 0 on ``device`` and told to the others, failure included."""
    rank, ranks = world(group)
    told: list[Any] = [None]
    cause = None
    if rank == 0:
        try:
            told = [_computed(features.to(device), reference, seed)]
        except Exception as error:  # whatever it is, the others wait to hear of it
            cause = error
            told = [f"no distances: {type(error).__name__}: {str(error).partition(chr(10))[0]}"]
    if ranks > 1:
        dist.broadcast_object_list(told, group=group, device=communication_device(group), group_src=0)
    if isinstance(told[0], str):
        raise RuntimeError(told[0]) from cause
    return told[0]


def _computed(features: Tensor, reference: Reference, seed: int) -> tuple[float, float, float]:
    stats = GaussianStats(features.shape[1], features.device)
    stats.update(features)
    return frechet(stats, reference.stats), *kid(features, reference.features, KID_SUBSET_SIZE, KID_SUBSETS, seed)
