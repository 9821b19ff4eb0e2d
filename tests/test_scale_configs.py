"""Configs of published sizes: each with each optimizer reads, has the size in its name, and ships."""

import dataclasses
import fnmatch
import tomllib
from pathlib import Path

import pytest
import torch
import yaml

from dit_train import overlays
from dit_train.model.dit import DiT
from dit_train.model.sizes import SIZES, sized
from dit_train.preflight import check_batch
from dit_train.run import optimizer

ROOT = Path(__file__).parent.parent
SCALE = ROOT / "configs" / "scale"
# width, depth, heads and parameters; of the published ones (arXiv 2212.09748) with tables and sigma
PUBLISHED = {"S": (384, 12, 6, 33.0e6), "B": (768, 12, 12, 130.5e6)}
PUBLISHED |= {"L": (1024, 24, 16, 458.1e6), "XL": (1152, 28, 16, 675.1e6)}
LARGE = {"1.3B": (1664, 26, 13, 1.307e9), "2.3B": (2048, 30, 16, 2.281e9), "4B": (2560, 34, 20, 4.035e9)}
LARGE |= {"9B": (3840, 34, 30, 9.075e9), "15B": (4608, 39, 36, 14.978e9)}
OPTIMIZERS = ("adamw", "muon", "muon_bp", "periodic_row_muon")


def read(size: str, name: str):
    words = ["--data.path", "latents", "--data.vae", "vae"]
    return overlays.read([f"configs/scale/{size}.yaml", f"configs/scale/{name}.yaml"], words)


def test_there_is_a_file_for_each_size_and_optimizer_and_no_other():
    assert set(SIZES) == set(PUBLISHED | LARGE)
    assert {path.stem for path in SCALE.iterdir()} == set(SIZES) | set(OPTIMIZERS)
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
        assert config.train.compute_dtype == "bf16" and config.data.source == "latents"
    shape, (*expected, parameters) = configs[0].model, (PUBLISHED | LARGE)[size]
    assert [shape.width, shape.depth, shape.heads] == expected and shape.qk_norm == (size in LARGE)
    with torch.device("meta"):
        model = DiT(configs[0].model, channels=4, image_size=32, num_classes=1000)
        count = sum(parameter.numel() for parameter in model.parameters())
        assert count == pytest.approx(parameters, **({"abs": 0.5e6} if size in LARGE else {"rel": 0.005}))
        for config in configs:
            built = optimizer.build(config.optimizer, model)
            held = sum(parameter.numel() for group in built.param_groups for parameter in group["params"])
            assert held == count and config.optimizer.lr > 0


@pytest.mark.parametrize("size", SIZES)
def test_a_size_says_for_itself_how_long_and_on_what_it_trains_and_how_often_it_is_scored(size):
    config, said = read(size, "muon"), yaml.safe_load((SCALE / f"{size}.yaml").read_text())
    train, schedule, score = config.train, config.schedule, config.score
    asked = {"train": "steps batch ema_decay", "schedule": "kind warmup_steps", "score": "every count"}
    for section, keys in asked.items():
        assert set(keys.split()) <= said[section].keys(), section
    for ranks in (8, 64, 256):
        check_batch(config, ranks)
    assert 0.999 <= train.ema_decay < 1 and 0 < schedule.warmup_steps < train.steps / 10
    assert 5 < train.steps / score.every < 50 and train.steps % score.every == 0
    assert score.every % config.run.checkpoint_every == 0
    assert 4 <= score.count <= 1_281_167 // config.data.heldout_every  # ImageNet's


def test_matrix_optimizers_keep_what_the_papers_say():
    bp, rows = read("1.3B", "muon_bp").optimizer, read("1.3B", "periodic_row_muon").optimizer
    assert (bp.period, bp.momentum_form, bp.phase, bp.block_lr_ratio, bp.weight_decay) == (5, "heavy_ball", 0, 1.0, 0.1)
    assert (rows.period, rows.momentum, rows.adamw.lr, rows.adamw.weight_decay) == (3, 0.95, 1e-4, 0.01)
    assert read("S", "muon").optimizer.adamw == rows.adamw == bp.adamw
