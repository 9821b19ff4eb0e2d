"""State tensors: made, moved with their parameter, checked and kept in their dtype when a checkpoint is loaded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .algorithm import ALGORITHMS
from .column_state import columns_of
from .forms import OF_OPTIONS, Form, absmax_key, expected, forms_of, new_absmax, new_state, wide
from .jobs import label, split_of


class Stored:
    """A tensor that passes through ``Optimizer.load_state_dict`` untouched, because it does not look like one.

    torch would cast it to the dtype of its parameter.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def wrap_tensors(state: Mapping[Any, Mapping[str, Any]]) -> dict[Any, dict[str, Any]]:
    """The state with every tensor as a ``Stored``."""
    return {
        key: {k: Stored(v) if isinstance(v, Tensor) else v for k, v in values.items()} for key, values in state.items()
    }


def unwrap_tensors(state: Mapping[Any, Mapping[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Copies of the stored tensors, in their own dtype, on the devices of their parameters."""
    result: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
    for p, values in state.items():
        for key, value in values.items():
            stored = isinstance(value, Stored)
            result[p][key] = value.tensor.detach().to(p.device, copy=True) if stored else value
    return result


def complete(state: dict[str, Tensor], group: Mapping[str, Any], i: int, name: str, place: Any) -> None:
    """Give the i-th parameter of a group what its state lacks; let what there is follow one that was moved or cast.

    What belongs to options that were switched off is dropped. New state is zero, or a copy of the weights; that per
    column depends on ``place``, which is the same on all ranks and no other parameter's.

    Raises:
        ValueError: if the group has taken steps and the parameter is now sharded differently, or its state is of
            another kind than the options of the group ask for; for state per column, if the layout is not supported.
    """
    started, p = group["step"] > 0, group["params"][i]
    wanted = dict(_keys(group, i, p, name, place))
    for key in OF_OPTIONS:
        if key not in wanted:
            state.pop(key, None)
    for key, form in wanted.items():
        buffer = state.get(key)
        wrong = None if buffer is None else difference(buffer, p, form, key)
        if wrong is not None and started:
            raise ValueError(f"{name}: state {key!r} {wrong}")
        if buffer is None or wrong is not None or buffer.is_meta:
            state[key] = new_absmax(p) if key.endswith("_absmax") else new_state(p, form)
        elif form.code is not None:
            state[key] = buffer.to(p.device)
        else:  # a loaded state may be of 16 bit, and stays so
            doubled = torch.float64 in (p.dtype, buffer.dtype)
            state[key] = buffer.to(p.device, form.dtype or (wide(p.dtype) if doubled else buffer.dtype))


def _keys(group: Mapping[str, Any], i: int, p: Tensor, name: str, place: Any = None) -> Iterator[tuple[str, Form]]:
    """The state keys of the i-th parameter of a group, those of scales among them."""
    for key, form in forms_of(ALGORITHMS[group["algorithm"]].state, group, p).items():
        if form.per_column:
            form = replace(form, columns=columns_of(group, p, split_of(group, i), name, place))
        yield key, form
        if form.code is not None:
            yield absmax_key(key), form


def check_stored(groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]], state: Mapping) -> None:
    """Compare a checkpoint's state with the parameters of ``groups``; ``saved`` are its groups, with the same members.

    Raises:
        ValueError: naming the parameter whose state is missing or lies differently.
    """
    for number, (group, stored) in enumerate(zip(groups, saved, strict=True)):
        for i, (p, key) in enumerate(zip(group["params"], stored["params"], strict=True)):
            name = label(f"group {number}", group, i)
            found = state.get(key, {})
            for what, form in _keys({**group, **stored}, i, p, name):
                if what in found:
                    if (wrong := difference(found[what], p, form, what)) is not None:
                        raise ValueError(f"{name}: state {what!r} {wrong}")
                elif p.requires_grad and stored["step"] > 0:
                    raise ValueError(
                        f"{name}: the checkpoint is of step {stored['step']} but has no state {what!r} for it; load it "
                        "with this parameter frozen, as it was saved, or remove the parameter from the group"
                    )


def difference(value: Tensor, p: Tensor, form: Form, key: str) -> str | None:
    """How a state tensor's kind, shape or placement differs from what a parameter needs, and what to do about it."""
    if not isinstance(value, Tensor):
        return f"is {value!r} and no tensor; load what state_dict() of an optimizer gave"
    shape, placements = expected(p, form, key)
    if tuple(value.shape) != shape:
        return (
            f"of shape {tuple(value.shape)} cannot be used for a parameter of shape {tuple(p.shape)}, which needs "
            f"{shape}; build the optimizer with the parameter order and the options that were saved"
            + (", on ranks that divide columns as then" if key.endswith("_absmax") else "")
        )
    coded = form.code is not None and not key.endswith("_absmax")
    if coded != (not value.dtype.is_floating_point) or (coded and value.dtype != form.dtype_for(p)):
        return f"has dtype {value.dtype}, which is not of the group's momentum_dtype; set the one that was saved"
    how = "load with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
    if isinstance(value, DTensor) != isinstance(p, DTensor):
        return f"of shape {tuple(p.shape)} is not sharded as its parameter is; {how}"
    if isinstance(p, DTensor) and tuple(value.placements) != placements:
        return f"has placements {tuple(value.placements)}, its parameter {tuple(p.placements)}; {how}"
    if isinstance(p, DTensor) and value.device_mesh != p.device_mesh:
        return f"lies on {value.device_mesh}, its parameter on {p.device_mesh}; {how}"
    return None
