"""Ranks compare what they are about to do, and the error of one becomes an error of all.

A rank that raised alone would leave the others waiting for it in their next collective.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .team import Team


def agree(error: Exception | None, lines: Sequence[str], groups: Iterable[dist.ProcessGroup]) -> None:
    """Return if no rank has an error and all describe their plan by the same lines. Collective.

    Call it on every rank of ``groups`` with what went wrong locally, before raising it. Ranks exchange a line and a
    digest in each group in turn; what was learned in one is carried into the next, and raised after the last.

    Raises:
        Exception: ``error`` itself on the rank that has it.
        ValueError: elsewhere, with the text of the error and its rank, or with the first line that differs.
    """
    bad_news = None if error is None else _news(error)
    for group in groups:
        ranks = dist.get_world_size(group)
        if ranks == 1 or dist.get_backend(group) == "fake":
            continue
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        told: list[tuple[str | None, str]] = [(None, "")] * ranks
        dist.all_gather_object(told, (bad_news, digest), group=group)
        if any(news for news, _ in told):
            bad_news = bad_news or next(news for news, _ in told if news)
        elif len({digest for _, digest in told}) > 1:
            bad_news = _first_difference(lines, group)
    if error is not None:
        raise error
    if bad_news is not None:
        raise ValueError(bad_news)


def process_groups(tensors: Iterable[Tensor], holders: Team | None = None) -> list[dist.ProcessGroup]:
    """The groups over which the tensors are distributed, in their order, and that of the ``holders`` of plain ones."""
    found: dict[dist.ProcessGroup, None] = {}
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            found |= dict.fromkeys(tensor.device_mesh.get_all_groups())
    return list(found if holders is None else found | {holders.open(): None})


def _news(error: Exception) -> str:
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return f"rank {dist.get_rank() if dist.is_initialized() else 0}: {kind}{error}"


def _first_difference(lines: Sequence[str], group: dist.ProcessGroup) -> str:
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, list(lines), group=group)
    other = next(r for r, said in enumerate(everyone) if said != everyone[0])
    longest = max(len(everyone[0]), len(everyone[other]))
    first, second = ([*everyone[r], *["nothing"] * (longest - len(everyone[r]))] for r in (0, other))
    entry = next(i for i in range(longest) if first[i] != second[i])
    names = [dist.get_global_rank(group, r) for r in (0, other)]
    return (
        f"the optimizer differs between ranks at entry {entry}: rank {names[0]} has {first[entry]}, rank {names[1]} "
        f"has {second[entry]}; build the same parameter groups, in the same order, on every rank"
    )
