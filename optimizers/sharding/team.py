"""The ranks that meet to see whole matrices."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist


@dataclass(frozen=True)
class Team:
    """Global ranks in the order of their process group.

    ``group`` is the one of a mesh axis. Teams over several axes have none yet: a group is made when it is first asked
    for, which is collective, so that an error of one rank can be told to all before.
    """

    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = field(default=None, compare=False)

    def open(self) -> dist.ProcessGroup:
        """The process group of these ranks. Collective among them the first time."""
        if self.group is not None:
            return self.group
        world = dist.group.WORLD
        if self.ranks == tuple(range(dist.get_world_size())):
            return world
        made_in, group = _opened.get(self.ranks, (None, None))
        if made_in is not world:  # a group of an earlier init_process_group is dead
            group = dist.new_group(list(self.ranks), use_local_synchronization=True)
            _opened[self.ranks] = (world, group)
        return group


_opened: dict[tuple[int, ...], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
