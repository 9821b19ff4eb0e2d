"""Randomness as a pure function of its keys: nothing to save, nothing that depends on ranks.

Each draw has a Philox generator of its own, keyed by a hash of (seed, purpose, step, sample index, …). So 1, 2 or 64
ranks and any micro-batch see the same noise, and a resumed run goes on with the noise it would have had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence


class _Key(ISeedSequence):
    """Hands a generator its key as it is; by ``Philox(key=...)`` numpy would first ask the system for entropy."""

    def __init__(self, digest: bytes) -> None:
        self._words = np.frombuffer(digest, dtype="<u8")

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray:
        """The key, two words of 64 bits."""
        return self._words


def _hash(*keys: int | str) -> hashlib.blake2b:
    return hashlib.blake2b(":".join(str(key) for key in keys).encode(), digest_size=16)


def stream(seed: int, *keys: int | str) -> np.random.Generator:
    """A generator that depends on the seed and the keys alone (Philox4x64, keyed by BLAKE2b)."""
    return np.random.Generator(np.random.Philox(_Key(_hash(seed, *keys).digest())))


def _streams(seed: int, keys: tuple[int | str, ...], samples: Iterable[int]) -> Iterator[np.random.Generator]:
    """``stream(seed, *keys, sample)`` of each sample; what their keys share is hashed once."""
    shared = _hash(seed, *keys)
    for sample in samples:
        whole = shared.copy()
        whole.update(f":{int(sample)}".encode())
        yield np.random.Generator(np.random.Philox(_Key(whole.digest())))


def normal(shape: tuple[int, ...], seed: int, *keys: int | str, samples: Iterable[int]) -> torch.Tensor:
    """Standard normal noise, fp32 [len(samples), *shape] on the CPU, one stream a sample index."""
    rows = [draw.standard_normal(shape, dtype=np.float32) for draw in _streams(seed, keys, samples)]
    return torch.from_numpy(np.stack(rows)) if rows else torch.empty((0, *shape))


def uniform(seed: int, *keys: int | str, samples: Iterable[int]) -> torch.Tensor:
    """Uniform numbers in [0, 1), fp32 [len(samples)] on the CPU, one stream a sample index."""
    return torch.tensor([draw.random(dtype=np.float32) for draw in _streams(seed, keys, samples)])
