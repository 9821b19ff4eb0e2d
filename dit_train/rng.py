"""Randomness as a pure function of its keys: nothing to save, nothing that depends on ranks.

Each draw has a Philox generator of its own, keyed by a hash of (seed, purpose, step, sample index, …). So 1, 2 or 64
ranks and any micro-batch see the same noise, and a resumed run goes on with the noise it would have had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import torch


def stream(seed: int, *keys: int | str) -> np.random.Generator:
    """A generator that depends on the seed and the keys alone (Philox4x64, keyed by BLAKE2b)."""
    text = ":".join(str(key) for key in (seed, *keys))
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest, dtype="<u8")))


def normal(shape: tuple[int, ...], seed: int, *keys: int | str, samples: Iterable[int]) -> torch.Tensor:
    """Standard normal noise, fp32 [len(samples), *shape] on the CPU, one stream a sample index."""
    rows = [stream(seed, *keys, int(sample)).standard_normal(shape, dtype=np.float32) for sample in samples]
    return torch.from_numpy(np.stack(rows)) if rows else torch.empty((0, *shape))


def uniform(seed: int, *keys: int | str, samples: Iterable[int]) -> torch.Tensor:
    """Uniform numbers in [0, 1), fp32 [len(samples)] on the CPU, one stream a sample index."""
    return torch.tensor([stream(seed, *keys, int(sample)).random(dtype=np.float32) for sample in samples])
