"""The order of the training images, a pure function of the seed: resuming at any position costs nothing."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from dit_train.rng import stream


def positions(seed: int, first: int, count: int, size: int) -> np.ndarray:
    """Sample indices of images first..first+count−1 of an endless stream over `size` images; [count] int64.

    Epoch e, the images e·size..(e+1)·size−1 of the stream, is a permutation of range(size) drawn from (seed, e).
    Only the epochs touched are drawn. Raises `ValueError` where first or count is negative or size is not positive.
    """
    if first < 0 or count < 0 or size < 1:
        raise ValueError(f"no images {first}..{first + count} in a stream over {size}")
    parts = [np.empty(0, dtype=np.int64)]
    end = first + count
    while first < end:
        epoch, start = divmod(first, size)
        part = _permutation(seed, epoch, size)[start : start + end - first]
        parts.append(part)
        first += len(part)
    return np.concatenate(parts)


@lru_cache(maxsize=2)  # a batch meets two epochs at most, unless it is larger than an epoch
def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    return stream(seed, "order", epoch).permutation(size)
