"""Counts collectives, the bytes that this rank sends, and the FLOPs of its matrix products."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class census(TorchDispatchMode):
    """``with census() as c:`` counts every collective of any process group that this thread issues inside.

    ``c.calls`` is a Counter of calls by operator name, ``c.collectives`` their sum, ``c.bytes_sent`` the bytes that
    this rank puts on the wire. Bytes are exact for ``all_to_all_single``; the others are counted by the ring
    model, with N ranks: all-gather (N−1)·input, reduce-scatter and all-to-all (N−1)/N·input, all-reduce
    2(N−1)/N·input; broadcast input and scatter (N−1)/N·input, on their root alone; reduce and gather input, on all
    but their root; else input.

    ``c.flops`` are those of the products that this rank computes, 2·m·k·n for [m, k] times [k, n], and of whatever else
    ``torch.utils.flop_counter`` has a formula for; elementwise work is not counted. All counts hold for real tensors,
    for fake ones (enter ``FakeTensorMode`` before the census) and for fake process groups.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes_sent = 0
        self.flops = 0

    @property
    def collectives(self) -> int:
        """How many collectives were issued."""
        return sum(self.calls.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # let DTensor act first: its collectives then come by here
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if func.namespace in ("c10d", "_c10d_functional") and "barrier" not in name:
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
            if "process_group" in given or "group_name" in given:  # a wait, for instance, names no group
                self.calls[name] += 1
                self.bytes_sent += _bytes_sent(name, given)
        result = func(*args, **kwargs)
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        return result


_FROM_ROOT = ("broadcast_", "broadcast", "scatter_")
_INPUTS = ("input", "input_tensor", "input_tensors", "input_list", "inputs", "tensors")


def _bytes_sent(name: str, given: dict[str, Any]) -> int:
    group = _group(given)
    ranks = dist.get_world_size(group)
    source = _tensors(next(given[key] for key in _INPUTS if given.get(key) is not None))
    size = sum(t.numel() * t.element_size() for t in source)
    splits = given.get("input_split_sizes")
    if splits:
        row_bytes = math.prod(source[0].shape[1:]) * source[0].element_size()
        return (sum(splits) - splits[dist.get_rank(group)]) * row_bytes
    if "recv" in name:
        return 0
    root = given.get("root_rank", given.get("src"))
    if root is not None:
        if (name in _FROM_ROOT) != (dist.get_rank(group) == root):
            return 0
        return size * (ranks - 1) // ranks if name == "scatter_" else size
    if "gather" in name:
        return size * (ranks - 1)
    if "allreduce" in name or "all_reduce" in name:
        return 2 * size * (ranks - 1) // ranks
    if "alltoall" in name or "all_to_all" in name or "reduce_scatter" in name:
        return size * (ranks - 1) // ranks
    return size


def _group(given: dict[str, Any]) -> dist.ProcessGroup:
    if "process_group" in given:
        return dist.ProcessGroup.unbox(given["process_group"])
    group = given["group_name"]
    return dist.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for item in value for t in _tensors(item)]
