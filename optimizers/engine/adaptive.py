"""Step sizes that depend on the norm of the gradient, in the place of learning rate and scale: see ``adago.py``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from .directions import Step
from .sums import Groups
from .task import Task
from .update import decay_and_add


def squares_of(task: Task) -> Iterator[tuple[Tensor, Groups]]:
    """‖G‖_F² of this rank's part of every matrix of every entry, [matrices] in fp64, and which ranks hold the rest."""
    for layout, gradient in zip(task.job.layouts, task.dense_gradients(), strict=True):
        found = torch.zeros(len(layout.matrices), dtype=torch.float64, device=gradient.device)
        for view, (matrix, _, _) in zip(layout.views(gradient), layout.here, strict=True):
            norm = torch.linalg.vector_norm(view, dtype=torch.float64)
            found[layout.places[matrix]] = norm.square()
        yield found, layout.groups


def apply_adaptive(task: Task, step: Step, rows: Mapping[str, Sequence[Tensor]]) -> None:
    """W ← (1 − η·λ)·W − α·O with the α of every matrix; ``rows``: state of the entries that is per row."""
    squares = [
        total[layout.places[matrix]]
        for layout, total in zip(task.job.layouts, task.squares, strict=True)
        for matrix, _, _ in layout.here
    ]
    states = list(zip(*(task.views(entries) for entries in rows.values()), strict=True))
    for weight, direction, square, state in zip(step.weights, step.directions, squares, states, strict=True):
        alpha = task.algorithm.step_sizes(square, list(state), task.group)
        wide = torch.promote_types(direction.dtype, torch.float32)
        decay_and_add([weight], [direction.to(wide) * -alpha.to(wide)], task.group)
