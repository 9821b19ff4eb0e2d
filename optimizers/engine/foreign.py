"""Reads what ``torch.optim.AdamW`` and ``torch.optim.Muon`` stored, so that a run can go on with this package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .algorithm import ALGORITHMS


def from_torch(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict of torch's AdamW or Muon as one of ours; one of ours as it is.

    Raises:
        ValueError: for groups that neither this package nor those two wrote, and for their variants that differ in
            more than options.
    """
    if lacking := [key for key in ("state", "param_groups") if key not in state_dict]:
        raise ValueError(f"no state dict of an optimizer: it lacks {' and '.join(map(repr, lacking))}")
    groups, state = [], dict(state_dict["state"])
    for number, stored in enumerate(state_dict["param_groups"]):
        if "algorithm" in stored:
            groups.append(stored)
        elif {"betas", "amsgrad"} <= stored.keys():
            groups.append(_adamw(stored, state, f"group {number}"))
        elif {"ns_coefficients", "adjust_lr_fn"} <= stored.keys():
            groups.append(_muon(stored, state))
        else:
            raise ValueError(
                f"group {number}: the checkpoint is of another optimizer (no 'algorithm' among its keys "
                f"{', '.join(stored)}); besides this package's, those of torch.optim.AdamW and torch.optim.Muon load"
            )
    return {**state_dict, "param_groups": groups, "state": state}


def _adamw(stored: Mapping[str, Any], state: dict[Any, Any], where: str) -> dict[str, Any]:
    """torch counts steps for each parameter in a 0-d tensor; here a group counts them."""
    for key, needed in (("amsgrad", False), ("maximize", False), ("decoupled_weight_decay", True)):
        if stored.get(key, needed) != needed:
            raise ValueError(
                f"{where}: the checkpoint of torch's Adam has {key}={stored[key]}, which this AdamW does not do; "
                f"only {key}={needed} can be loaded"
            )
    members = [key for key in stored["params"] if key in state]
    steps = sorted({int(state[key]["step"]) for key in members})
    if len(steps) > 1:
        raise ValueError(
            f"{where}: parameters of the checkpoint of torch.optim.AdamW took different numbers of steps "
            f"({steps[0]} to {steps[-1]}), but a group here has one; give each its own group"
        )
    for key in members:
        state[key] = {k: v for k, v in state[key].items() if k != "step"}
    return {**_shared(stored, "adamw"), "step": steps[0] if steps else 0}


def _muon(stored: Mapping[str, Any], state: Mapping[Any, Any]) -> dict[str, Any]:
    """torch's Muon counts no steps and needs none, nor does ours; 1 says that there has been one."""
    scale = stored["adjust_lr_fn"] or "original"
    started = any(key in state for key in stored["params"])
    return {**_shared(stored, "muon"), "adjust_lr_fn": scale, "momentum_form": "ema", "step": int(started)}


def _shared(stored: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    wanted: Sequence[str] = (*ALGORITHMS[algorithm].options, "params", "param_names", "initial_lr")
    return {"algorithm": algorithm, **{key: stored[key] for key in wanted if key in stored}}
