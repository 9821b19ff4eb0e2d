"""The optimizer that a config names, over the model's routed parameter groups."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

import optimizers
from dit_train.optimizer_config import OptimizerConfig

_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "adago": optimizers.AdaGO,
    "adamw": optimizers.AdamW,
    "adamw_8bit": optimizers.AdamW8bit,
    "auon": optimizers.AuON,
    "block_muon": optimizers.BlockMuon,
    "dion": optimizers.Dion,
    "dion2": optimizers.Dion2,
    "lion": optimizers.Lion,
    "mars_adamw": optimizers.MarsAdamW,
    "mars_muon": optimizers.MarsMuon,
    "muon": optimizers.Muon,
    "muon_8bit": optimizers.Muon8bit,
    "muon_bp": optimizers.MuonBP,
    "muon_eq": optimizers.MuonEq,
    "normuon": optimizers.NorMuon,
    "periodic_row_muon": optimizers.PeriodicRowMuon,
    "periodic_sign_muon": optimizers.PeriodicSignMuon,
    "row_muon": optimizers.RowMuon,
    "scion": optimizers.Scion,
    "sgd": optimizers.SGD,
}
_DTYPES = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16}
_KEPT = {"fp32": None, "bf16": torch.bfloat16}
"""The rest of momentum_dtype is named alike."""


def is_auto(config: OptimizerConfig) -> bool:
    """Whether its period is still to be chosen."""
    return getattr(config, "period", None) == "auto"


def with_period(config: OptimizerConfig, period: int) -> OptimizerConfig:
    """The same with a number where its period is ``auto``."""
    return dataclasses.replace(config, period=period) if is_auto(config) else config


def batch_passes(config: OptimizerConfig) -> int:
    """Forwards and backwards of the batch in a step: exact variance reduction takes another at the last weights."""
    return 2 if getattr(config, "mars_exact", False) else 1


def build(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """An elementwise optimizer takes every parameter; another the matrices of attention and MLP, AdamW the rest.

    A period is a number by now.
    """
    settings: dict[str, Any] = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    name = settings.pop("name")
    settings.pop("period_budget", None)
    if "adamw" not in settings:
        return _CLASSES[name](_every_parameter(model, name), **settings)
    adamw = {key: value for key, value in dataclasses.asdict(settings.pop("adamw")).items() if value is not None}
    for key in settings.keys() & {"ns_dtype", "wire_dtype"}:
        settings[key] = _DTYPES[settings[key]]
    settings["momentum_dtype"] = _KEPT.get(settings["momentum_dtype"], settings["momentum_dtype"])
    bucket = settings.pop("bucket_mib")
    settings["bucket_bytes"] = "auto" if bucket is None else int(min(bucket * 2**20, 2.0**62))
    return _CLASSES[name](optimizers.param_groups(model, adamw_options=adamw), **settings)


def _every_parameter(model: nn.Module, name: str) -> list[dict[str, Any]]:
    """Groups of one algorithm, vectors without weight decay; those of MARS go to AdamW, as its authors have it."""
    groups = optimizers.param_groups(model)
    for group in groups:
        if name != "mars_adamw" or any(p.ndim >= 2 for p in group["params"]):
            group["algorithm"] = name
    return groups
