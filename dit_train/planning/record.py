"""Writes down what code does on a rank: its operators with their FLOPs and bytes, and its collectives."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from optimizers import census

_aten = torch.ops.aten
_MOVES_NOTHING = ("empty", "new_empty", "_unsafe_view", "all_gather_copy_in")
"""Memory that is asked for; other shapes for it; and what copies a shard, but is handed the whole weights."""


class Operator(NamedTuple):
    """One call of a kernel."""

    flops: int
    """Of matrix products."""
    bytes: int
    """That it reads and writes, as if nothing stayed in caches."""
    dtype: str
    """``bf16`` if its largest tensor is of 16 bits, else ``fp32``."""


class Collective(NamedTuple):
    """One call of a collective."""

    name: str
    bytes_sent: int
    ranks: tuple[int, ...]


class Recorder(census):
    """A census that keeps every operator and collective by itself, and knows the FLOPs of attention on CPUs as well.

    DTensors find out the shapes of results by operators on whole tensors, once for each kind, which would be recorded
    too: whoever has any runs the code once before.

    ``with Recorder() as seen:`` fills ``seen.operators`` and ``seen.links``, Counters of calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[Operator] = Counter()
        self.links: Counter[Collective] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        calls, sent, flops = self.collectives, self.bytes_sent, self.flops
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is NotImplemented:
            return result
        if self.collectives > calls:
            name = func._schema.name.split("::")[1]
            self.links[Collective(name, self.bytes_sent - sent, _ranks(func, args, kwargs))] += 1
        elif func.namespace in ("aten", "fsdp") and not _is_free(func):
            self.flops += _attention_flops(func, args)
            self.operators[_operator(self.flops - flops, (args, kwargs, result))] += 1
        return result


def _operator(flops: int, values: Any) -> Operator:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    sizes = [min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors]
    half = bool(sizes) and tensors[sizes.index(max(sizes))].element_size() == 2
    return Operator(flops, sum(sizes), "bf16" if half else "fp32")


def _is_free(func: Any) -> bool:
    """Whether a call moves no data: views, and memory that is only asked for."""
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    return views or func._schema.name.split("::")[1].startswith(_MOVES_NOTHING)


def _attention_flops(func: Any, args: tuple) -> int:
    """The counter of torch has no formula for the CPU's attention, which does what the others do."""
    if func is _aten._scaled_dot_product_flash_attention_for_cpu.default:
        return sdpa_flop_count(*(t.shape for t in args[:3]))
    if func is _aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return sdpa_backward_flop_count(*(t.shape for t in args[:4]))
    return 0


def _ranks(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[int, ...]:
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    group = given.get("process_group", given.get("group_name"))
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)
    elif "process_group" in given:
        group = dist.ProcessGroup.unbox(group)
    return tuple(dist.get_process_group_ranks(group))
