"""The optimizer that a config names, over the model's routed parameter groups."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

import optimizers
from dit_train.config import AdamWConfig, OptimizerConfig

_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": optimizers.AdamW,
    "muon": optimizers.Muon,
    "block_muon": optimizers.BlockMuon,
    "muon_bp": optimizers.MuonBP,
    "periodic_row_muon": optimizers.PeriodicRowMuon,
}
_DTYPES = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16}


def is_auto(config: OptimizerConfig) -> bool:
    """Whether its period is still to be chosen."""
    return getattr(config, "period", None) == "auto"


def with_period(config: OptimizerConfig, period: int) -> OptimizerConfig:
    """The same with a number where its period is ``auto``."""
    return dataclasses.replace(config, period=period) if is_auto(config) else config


def build(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Attention and MLP matrices go to the named optimizer, everything else to AdamW; its period is a number."""
    settings: dict[str, Any] = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    name = settings.pop("name")
    settings.pop("period_budget", None)
    if isinstance(config, AdamWConfig):
        return _CLASSES[name](optimizers.param_groups(model), **settings)
    adamw = {key: value for key, value in dataclasses.asdict(settings.pop("adamw")).items() if value is not None}
    settings["ns_dtype"] = _DTYPES[settings["ns_dtype"]]
    settings["wire_dtype"] = _DTYPES[settings["wire_dtype"]]
    bucket = settings.pop("bucket_mib")
    settings["bucket_bytes"] = "auto" if bucket is None else int(bucket * 2**20)
    return _CLASSES[name](optimizers.param_groups(model, adamw_options=adamw), **settings)
