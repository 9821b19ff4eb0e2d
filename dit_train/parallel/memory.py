"""Activation checkpointing: what a block keeps for its backward, which computes the rest again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_aten = torch.ops.aten
_DEAR = frozenset(
    getattr(_aten, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
)
"""Matrix products and attention: most of the time to compute, and a small part of the memory to keep."""


def checkpointing(which: Literal["none", "selective", "full"]) -> Callable[..., Tensor] | None:
    """What calls a block's function: ``full`` keeps its inputs alone, ``selective`` what is dear to compute as well."""
    if which == "none":
        return None
    # a block draws no random numbers, whose state would be kept
    full = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    return full if which == "full" else partial(full, context_fn=partial(create_selective_checkpoint_contexts, _policy))


def _policy(_context: object, operator: object, *_: object, **__: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _DEAR else CheckpointPolicy.PREFER_RECOMPUTE
