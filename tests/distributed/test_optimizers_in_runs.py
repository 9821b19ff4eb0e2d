"""Every optimizer that a config can name: a run that was stopped goes on as if it never was, on 1 and on 2 ranks."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import typing
from pathlib import Path
from unittest import mock

import pytest
import torch

from dit_train.optimizer_config import OptimizerConfig
from tests.distributed.ranks import run

MEMBERS = typing.get_args(OptimizerConfig)
TINY = """
model: {width: 32, depth: 1, heads: 2, patch: 2}
data: {source: digits}
schedule: {kind: constant, warmup_steps: 2}
train: {steps: 6, batch: 8, ema_decay: 0.9, ema_ramp: false, compute_dtype: fp32}
parallel: {device: cpu}
sample: {grid: 0}
run: {log_every: 100, validate_every: 0, checkpoint_every: 3, keep_checkpoints: 9, tensorboard: false, norms_every: 0}
"""
# dynamic8 has the smallest values; a mean of rows and the last gradient are kept beside it
FEATURES = ["--optimizer.momentum_dtype", "dynamic8", "--optimizer.mars_gamma", "0.025"]
NEURONS = ["--optimizer.neuron_beta2", "0.9", "--optimizer.equilibrate", "rc"]
EXACT = {"ns_dtype": "fp32", "wire_dtype": "fp32"}


def cases() -> dict[str, list[str]]:
    """Command-line arguments by a folder's name: each optimizer and form alone, then with features."""
    found = {}
    for member in MEMBERS:
        names = {field.name for field in dataclasses.fields(member)}
        form = next((key for key in ("form", "ball") if key in names), "name")
        for value in typing.get_args(typing.get_type_hints(member)[form]):
            words = ["--optimizer.name", member.name, f"--optimizer.{form}", value]
            words += [word for key in EXACT.keys() & names for word in (f"--optimizer.{key}", EXACT[key])]
            words += ["--optimizer.adamw.eps", "1e-5"] * ("adamw" in names)  # see test_resume
            words += ["--optimizer.block_grid", "4"] * ("block_grid" in names)
            found["-".join(dict.fromkeys((member.name, value)))] = words
            if "mars_gamma" in names and "adamw" in names:
                more = FEATURES + NEURONS * ("neuron_beta2" in names)
                found["-".join(dict.fromkeys((member.name, value))) + "-features"] = words + more
    for name in ("mars_adamw", "mars_muon"):
        found[f"{name}-exact"] = [*found[name], "--optimizer.mars_exact", "true"]
    return found


CASES = cases()
FEW = ["adamw_8bit", "adago", "normuon-features", "mars_muon-exact"]
"""With every kind of state."""


def train(folder: Path, *arguments: str) -> tuple[dict[str, str], int, set[str]]:
    """Train, or go on, to the end: digests of all tensors then, bytes sent, and kinds of state with their dtypes."""
    import torch.distributed as dist

    from dit_train import overlays, preflight
    from dit_train.run import loop
    from dit_train.run.stop import StopRequest

    (folder.parent / "tiny.yaml").write_text(TINY) if dist.get_rank() == 0 else None
    dist.barrier()
    config = overlays.read([folder.parent / "tiny.yaml"], [*arguments, "--run.folder", str(folder)])
    plan = preflight.check(config, dist.get_world_size())
    dist.barrier()  # nobody writes before everybody has looked
    made = []
    prepare = loop.prepare
    with mock.patch.object(loop, "prepare", lambda *about: made.append(prepare(*about)) or made[0]):
        assert loop.train(plan, StopRequest()) == 0
    tensors, kinds = {}, set()
    for name, parameter in made[0].model.named_parameters():
        state = made[0].optimizer.state[parameter]
        parts = {"model": parameter.detach(), "ema": made[0].ema.weights[name], **state}
        tensors |= {f"{kind} {name}": digest(tensor.full_tensor()) for kind, tensor in parts.items()}
        kinds |= {f"{key} {str(value.dtype).removeprefix('torch.')}" for key, value in state.items()}
    return tensors, made[0].optimizer.wire_bytes, kinds


def digest(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()}"


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def whole_and_resumed(folder: Path, names: list[str]) -> dict[str, set[str]]:
    """By case, kinds of state; asserts that a run from the save in the middle ends as the whole one, bit for bit."""
    import torch.distributed as dist

    found = {}
    for name in names:
        whole, sent, kinds = train(folder / name, *CASES[name])
        if dist.get_rank() == 0:
            shutil.copytree(folder / name, folder / f"{name}-resumed")
            shutil.rmtree(folder / f"{name}-resumed" / "checkpoints" / "step_0000006")
        dist.barrier()
        resumed, sent_again, _ = train(folder / f"{name}-resumed", *CASES[name])
        differing = [key for key in whole if whole[key] != resumed[key]]
        assert whole.keys() == resumed.keys() and not differing, f"{name}: {differing}"
        assert sent == sent_again, name
        found[name] = kinds
    return found


def onwards(folder: Path, names: list[str]) -> None:
    """Go on from the save in the middle on this number of ranks."""
    import torch.distributed as dist

    for name in names:
        if dist.get_rank() == 0:
            shutil.rmtree(folder / f"{name}-resumed" / "checkpoints" / "step_0000006")
        dist.barrier()
        train(folder / f"{name}-resumed", *CASES[name])


def check(folder: Path, names: list[str]) -> None:
    two = run(whole_and_resumed, 2, folder / "two", names, timeout=500)[0]
    one = run(whole_and_resumed, 1, folder / "one", names, timeout=500)[0]
    assert one == two
    for name in names:
        found = losses(folder / "two" / name)
        assert found == pytest.approx(losses(folder / "one" / name), rel=2e-3), name
        assert found[-1] != found[0] and losses(folder / "two" / f"{name}-resumed") == found, name
    run(onwards, 1, folder / "two", names, timeout=500)
    for name in names:
        found = losses(folder / "two" / name)
        assert losses(folder / "two" / f"{name}-resumed") == pytest.approx(found, rel=2e-3), name


def test_state_of_every_kind_is_saved_and_resumed(tmp_path):
    for ranks in ("one", "two"):
        (tmp_path / ranks).mkdir()
    kinds = run(whole_and_resumed, 2, tmp_path / "two", FEW, timeout=100)[0]
    scales = {"exp_avg_absmax float32", "exp_avg_sq_absmax float32"}
    assert (
        kinds["adamw_8bit"] == {"exp_avg uint8", "exp_avg_sq uint8", "exp_avg float32", "exp_avg_sq float32"} | scales
    )
    assert kinds["adago"] >= {"momentum_buffer float32", "norm_sum float32"}
    assert kinds["normuon-features"] >= {"momentum_buffer uint8", "momentum_buffer_absmax float32"}
    assert kinds["mars_muon-exact"] >= {"last_gradient float32", "last_weight float32"}
    assert kinds["normuon-features"] >= {"neuron_second_moment float32", "last_gradient float32"}


@pytest.mark.long
def test_every_optimizer_goes_on_as_if_never_stopped(tmp_path):
    for ranks in ("one", "two"):
        (tmp_path / ranks).mkdir()
    check(tmp_path, list(CASES))
