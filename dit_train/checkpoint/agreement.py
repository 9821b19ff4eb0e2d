"""What ranks have to agree on before one of them goes on: whether any of them has met a problem."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist


def first_problem(problem: str | None, group: dist.ProcessGroup | None = None) -> str | None:
    """The problem of the lowest rank that has one, the same on all ranks of `group`, each of which calls it."""
    found: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, problem, group=group)
    return next((text for text in found if text is not None), None)


def on_main(action: Callable[[], object], group: dist.ProcessGroup | None = None) -> str | None:
    """Do something on rank 0 alone; the problem that it met, or None, on all ranks of `group`."""
    answer: list[str | None] = [None]
    if dist.get_rank(group) == 0:
        try:
            action()
        except Exception as error:  # whatever it is: the others wait for the answer
            answer = [one_line(error)]
    dist.broadcast_object_list(answer, src=0, group=group)
    return answer[0]


def one_line(error: BaseException) -> str:
    """An error's own words, or its kind where it has none."""
    return " ".join(str(error).split())[:200] or type(error).__name__
