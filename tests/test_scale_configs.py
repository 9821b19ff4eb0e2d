"""Configs of published sizes: each with each optimizer reads, has the size in its name, and ships."""

import dataclasses
import fnmatch
import tomllib
from pathlib import Path

import pytest
import torch

from dit_train import overlays
from dit_train.model.dit import DiT
from dit_train.model.sizes import SIZES, sized
from dit_train.run import optimizer

ROOT = Path(__file__).parent.parent
SCALE = ROOT / "configs" / "scale"
PARAMETERS = {"S": 33.0e6, "B": 130.5e6, "L": 458.1e6, "XL": 675.1e6}  # arXiv 2212.09748, with tables and sigma
PARAMETERS |= {"1.3B": 1.3e9, "2.3B": 2.3e9, "4B": 4e9, "9B": 9e9, "15B": 15e9}
OPTIMIZERS = ("adamw", "muon", "muon_bp", "periodic_row_muon")


def read(size: str, name: str):
    words = ["--data.path", "latents", "--data.vae", "vae"]
    return overlays.read([f"configs/scale/{size}.yaml", f"configs/scale/{name}.yaml"], words)


def test_there_is_a_file_for_each_size_and_optimizer_and_no_other():
    assert {path.stem for path in SCALE.iterdir()} == set(SIZES) | set(OPTIMIZERS) and set(SIZES) == set(PARAMETERS)
    packed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for path in SCALE.iterdir():
        name = path.relative_to(ROOT / "configs").as_posix()
        assert any(fnmatch.fnmatch(name, pattern) for pattern in packed["dit_train.configs"]), name


@pytest.mark.parametrize("size", SIZES)
def test_a_size_has_its_parameters_and_reads_with_each_optimizer(size):
    configs = [read(size, name) for name in OPTIMIZERS]
    for config, name in zip(configs, OPTIMIZERS, strict=True):
        assert config.optimizer.name == name and config.model == sized(size)
        assert dataclasses.replace(config, optimizer=configs[0].optimizer) == configs[0]
        assert config.train.batch % 256 == 0 and config.score.every % config.run.checkpoint_every == 0
        assert config.train.compute_dtype == "bf16" and config.data.source == "latents"
    with torch.device("meta"):
        model = DiT(configs[0].model, channels=4, image_size=32, num_classes=1000)
        count = sum(parameter.numel() for parameter in model.parameters())
        assert count == pytest.approx(PARAMETERS[size], rel=0.01 if count > 1e9 else 0.005)
        for config in configs:
            built = optimizer.build(config.optimizer, model)
            held = sum(parameter.numel() for group in built.param_groups for parameter in group["params"])
            assert held == count and config.optimizer.lr > 0


def test_matrix_optimizers_keep_what_the_papers_say():
    bp, rows = read("1.3B", "muon_bp").optimizer, read("1.3B", "periodic_row_muon").optimizer
    assert (bp.period, bp.momentum_form, bp.phase, bp.block_lr_ratio, bp.weight_decay) == (5, "heavy_ball", 0, 1.0, 0.1)
    assert (rows.period, rows.momentum, rows.adamw.lr, rows.adamw.weight_decay) == (3, 0.95, 1e-4, 0.01)
    assert read("S", "muon").optimizer.adamw == rows.adamw == bp.adamw
