"""The ranks that meet to see whole matrices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class Team:
    """Global ranks in the order of their process group.

    ``group`` is the one of a mesh axis, or the user's. Teams over several axes have none yet: a group is made when it
    is first asked for, which is collective, so that an error of one rank can be told to all before.
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

    def __deepcopy__(self, memo: dict[int, Any]) -> Team:
        return self  # copies of an optimizer meet in the same group: there is no copying one


_opened: dict[tuple[int, ...], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def team_of(process_group: Any) -> Team:
    """The ranks of a process group that a user passed.

    Raises:
        ValueError: if it is none, or if this rank does not belong to it.
    """
    if process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"process_group does not contain rank {dist.get_rank()}; pass it on its own ranks only")
    if not isinstance(process_group, dist.ProcessGroup):
        raise ValueError(
            f"process_group is {process_group!r} but has to be a torch.distributed.ProcessGroup or None, for example "
            "torch.distributed.group.WORLD, or mesh.get_group() of a DeviceMesh"
        )
    return Team(tuple(dist.get_process_group_ranks(process_group)), process_group)
