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
from eval.references import Reference
from eval.statistics import GaussianStats

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
        ValueError: n differs, the reference is of another extractor or image size, features are not finite.
    """
    _check_match(reference, extractor, len(indices))
    features, order = _features(images, indices, reference, extractor, batch_size, group, progress)
    value, kid_mean, kid_error = _distances(features, reference, seed, group)
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
        ValueError: fewer training images than the reference holds, or as in ``score``.
    """
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
    done = [torch.empty(0, dtype=torch.int64)]
    rows = [torch.empty(0, extractor.num_features)]
    for batch, made in generate(images, indices, batch_size, group, progress):
        if tuple(made.shape[1:]) != reference.image_shape:
            raise ValueError(f"images are {list(made.shape[1:])}, the reference's {list(reference.image_shape)}")
        done.append(batch)
        rows.append(extractor(made).cpu())
    return gather(torch.cat(rows), torch.cat(done), group)


def _distances(
    features: Tensor, reference: Reference, seed: int, group: dist.ProcessGroup | None
) -> tuple[float, float, float]:
    """(Fréchet, KID, its standard error), computed by rank 0 and told to the others."""
    stats = GaussianStats(features.shape[1])
    stats.update(features)  # raises on NaN, and on every rank alike
    rank, ranks = world(group)
    values = torch.zeros(3, dtype=torch.float64)
    if rank == 0:
        mean, error = kid(features, reference.features, KID_SUBSET_SIZE, KID_SUBSETS, seed)
        values = torch.tensor([frechet(stats, reference.stats), mean, error], dtype=torch.float64)
    if ranks > 1:
        values = values.to(communication_device(group))
        dist.broadcast(values, group=group, group_src=0)
    return tuple(values.tolist())
