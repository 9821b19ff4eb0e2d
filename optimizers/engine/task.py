"""A job in one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..sharding import exchange, gather
from ..sharding.plan import GatherBucket
from .algorithm import Algorithm
from .jobs import Job


@dataclass
class Task:
    """A job in one step. ``weights`` and ``gradients`` are local, read once."""

    job: Job
    group: dict[str, Any]
    algorithm: Algorithm
    refresh: bool
    weights: list[Tensor]
    gradients: list[Tensor | None]

    @property
    def travels(self) -> bool:
        """Whether it communicates in this step."""
        return self.refresh and self.job.bucket is not None

    @property
    def shares_rows(self) -> bool:
        """Whether it takes a row step although ranks share its rows."""
        row_step = self.algorithm.whole_rows and not self.refresh
        return row_step and bool(self.job.layouts[0].column_groups)

    @property
    def route(self) -> Any:
        """The module that moves its bucket: depart, turn, land."""
        return gather if isinstance(self.job.bucket, GatherBucket) else exchange

    def dense_gradients(self) -> list[Tensor]:
        """The gradients, zeros for those that are None."""
        return [torch.zeros_like(w) if g is None else g for g, w in zip(self.gradients, self.weights, strict=True)]
