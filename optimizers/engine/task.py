"""A job in one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..sharding import exchange, gather
from ..sharding.plan import AnyBucket, GatherBucket
from .algorithm import Algorithm
from .jobs import Job

if TYPE_CHECKING:
    from .selection import Selected


@dataclass
class Task:
    """A job in one step. ``weights`` and ``gradients`` are local, read once.

    ``clipped``: ‖C‖_F² of each entry's parameter if gradients are corrected. ``squares``: ‖G‖_F² [matrices] of each
    entry if step sizes depend on it.
    """

    job: Job
    group: dict[str, Any]
    algorithm: Algorithm
    refresh: bool
    weights: list[Tensor]
    gradients: list[Tensor | None]
    clipped: list[Tensor | None] = field(default_factory=list)
    squares: list[Tensor] = field(default_factory=list)
    selected: Selected | None = None

    @property
    def travels(self) -> bool:
        """Whether it communicates in this step."""
        return self.refresh and self.job.bucket is not None

    @property
    def adds_up(self) -> bool:
        """Whether ranks may have to add up squares before it can take its step, which is no refresh."""
        unit = None if self.refresh else self.algorithm.unit
        return unit in ("columns", "matrix") or (unit == "rows" and bool(self.job.layouts[0].column_groups))

    @property
    def bucket(self) -> AnyBucket | None:
        """What travels, if it does: the plan's bucket, or what is selected of it."""
        return self.job.bucket if self.selected is None else self.selected.bucket

    @property
    def route(self) -> Any:
        """The module that moves its bucket: depart, turn, land."""
        return gather if isinstance(self.job.bucket, GatherBucket) else exchange

    def views(self, of_entries: Sequence[Tensor]) -> list[Tensor]:
        """What entries hold, by matrix: in the order of ``Step.weights`` on a refresh."""
        pairs = zip(self.job.layouts, of_entries, strict=True)
        return [view for layout, entry in pairs for view in layout.views(entry)]

    def dense_gradients(self) -> list[Tensor]:
        """The gradients, zeros for those that are None."""
        return [torch.zeros_like(w) if g is None else g for g, w in zip(self.gradients, self.weights, strict=True)]


class Member(NamedTuple):
    """A task with its state by key and its gradients, as tensors of floats."""

    task: Task
    state: dict[str, list[Tensor]]
    gradients: list[Tensor]

    @property
    def buffers(self) -> list[Tensor]:
        """Its momentum."""
        return self.state["momentum_buffer"]
