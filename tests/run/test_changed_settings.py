"""What a resume takes from the command line, and what from the checkpoint: tensors and counters, nothing else."""

import json
import math

import pytest
import torch

from dit_train import overlays, preflight
from dit_train.parallel.mesh import joined
from dit_train.run import loop, optimizer, schedule
from dit_train.run.setup import hold_folder, prepare
from dit_train.run.stop import StopRequest

TINY = (
    "--model.width 32 --model.depth 1 --model.heads 2 --train.batch 8 --train.compute_dtype fp32 --sample.grid 0 "
    "--run.validate_every 0 --schedule.warmup_steps 2 --run.tensorboard false --parallel.device cpu"
).split()


@pytest.fixture(scope="module")
def world():
    with joined(overlays.read([], TINY).parallel) as joined_world:
        yield joined_world


def plan(tmp_path, *arguments):
    return preflight.check(overlays.read([], [*TINY, "--run.folder", str(tmp_path / "run"), *arguments]), 1)


def train(tmp_path, *arguments) -> list[dict]:
    """Train to the end; the lines of metrics.jsonl."""
    assert loop.train(plan(tmp_path, *arguments), StopRequest()) == 0
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def resumed(tmp_path, world, *arguments):
    """The run as it stands before its next step."""
    made = plan(tmp_path, *arguments)
    assert made.resume is not None
    with hold_folder(made, world):
        return prepare(made, world)


def rates(config, first: int, last: int) -> list[float]:
    """Learning rates of steps first+1..last under a config alone."""
    steps = config.train.steps
    return [config.optimizer.lr * schedule.factor(config.schedule, step, steps) for step in range(first, last)]


def state(run) -> dict[str, torch.Tensor]:
    """Every tensor by the parameter's name."""
    found = {}
    for name, parameter in run.model.named_parameters():
        parts = {"model": parameter.detach(), "ema": run.ema.weights[name], **run.optimizer.state[parameter]}
        found |= {f"{name} {kind}": tensor.full_tensor() for kind, tensor in parts.items()}
    return found


def test_a_learning_rate_and_a_length_on_the_command_line_win_over_the_checkpoint(tmp_path, world):
    rows = train(tmp_path, "--train.steps", "3", "--optimizer.lr", "1e-3")
    assert [row["lr"] for row in rows] == rates(overlays.read([], [*TINY, "--train.steps", "3"]), 0, 3)
    changed = ("--train.steps", "8", "--optimizer.lr", "0.02", "--schedule.final_fraction", "0.5")
    rows = train(tmp_path, *changed)
    expected = rates(overlays.read([], [*TINY, *changed]), 3, 8)
    assert [row["lr"] for row in rows[3:]] == expected and expected[-1] == pytest.approx(0.01)


def test_a_resumed_schedule_is_that_of_the_config_and_not_begun_anew(tmp_path, world):
    arguments = ("--schedule.kind", "constant", "--schedule.warmup_steps", "4")
    train(tmp_path, *arguments, "--train.steps", "2")
    rows = train(tmp_path, *arguments, "--train.steps", "5")
    assert [row["lr"] for row in rows] == pytest.approx([1e-3 * f for f in (0.25, 0.5, 0.75, 1, 1)])


def test_every_option_of_the_optimizer_is_the_command_lines(tmp_path, world):
    train(tmp_path, "--optimizer.name", "muon_bp", "--train.steps", "3")
    changed = {"lr": 0.5, "weight_decay": 0.0, "momentum": 0.5, "nesterov": False, "period": 7, "phase": 2}
    changed |= {"block_lr_ratio": 0.25, "block_grid": 4}
    words = [word for key, value in changed.items() for word in (f"--optimizer.{key}", json.dumps(value))]
    words += ["--optimizer.adamw.lr", "0.25", "--optimizer.adamw.betas", "0.5", "0.75"]
    run = resumed(tmp_path, world, "--optimizer.name", "muon_bp", "--train.steps", "9", *words)
    matrices, *others = run.optimizer.param_groups
    assert {key: matrices[key] for key in changed} == changed
    assert run.peak_lrs == [0.5, 0.25, 0.25]
    assert all(tuple(group["betas"]) == (0.5, 0.75) for group in others)
    assert [group["step"] for group in run.optimizer.param_groups] == [3, 3, 3]


def test_options_of_features_are_the_command_lines_too(tmp_path, world):
    kept = "--optimizer.name normuon --optimizer.momentum_dtype int8 --optimizer.mars_gamma 0.5".split()
    train(tmp_path, *kept, "--train.steps", "3")
    changed = {"mars_gamma": 0.25, "mars_clip": 0.5, "neuron_beta2": 0.5, "neuron_eps": 0.125}
    changed |= {"neuron_norm": "direction", "equilibrate": "c", "momentum_form": "heavy_ball"}
    words = [word for key, value in changed.items() for word in (f"--optimizer.{key}", str(value))]
    run = resumed(tmp_path, world, *kept, *words, "--train.steps", "4")
    assert {key: run.optimizer.param_groups[0][key] for key in changed} == changed
    moved = {name.split()[-1] for name, tensor in state(run).items() if tensor.count_nonzero()}
    assert moved >= {"momentum_buffer", "momentum_buffer_absmax", "neuron_second_moment", "last_gradient"}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("auon", "--optimizer.form hybrid", "optimizer.form: 'hybrid', but"),
        ("scion", "--optimizer.ball row", "optimizer.ball: 'row', but"),
        ("muon_eq", "--optimizer.momentum_dtype int8", "optimizer.momentum_dtype: 'int8', but"),
        ("muon_bp", "--optimizer.mars_gamma 0.1", "optimizer.mars_gamma (whether it is above 0"),
        ("mars_muon", "--optimizer.mars_exact true", "optimizer.mars_exact: True, but"),
        ("periodic_sign_muon", "--optimizer.neuron_beta2 0.9", "optimizer.neuron_beta2 (whether it is set"),
        (
            "mars_adamw",
            "--optimizer.mars_gamma 0",
            "optimizer.mars_gamma (whether it is above 0",
        ),
    ],
)
def test_what_would_need_other_state_is_refused_in_one_line(tmp_path, world, before, after, said):
    train(tmp_path, "--optimizer.name", before, "--train.steps", "1")
    with pytest.raises(overlays.ConfigError) as caught:
        plan(tmp_path, "--optimizer.name", before, *after.split(), "--train.steps", "2")
    assert str(caught.value).startswith(said) and "was trained with" in str(caught.value)


def test_another_precision_or_decay_of_the_average_takes_effect_and_what_is_kept_stays_fp32(tmp_path, world):
    train(tmp_path, "--train.steps", "2")
    run = resumed(tmp_path, world, "--train.steps", "4", "--train.compute_dtype", "bf16", "--train.ema_decay", "0.05")
    assert run.state.compute_dtype == "bf16" and run.ema.decay(10) == 0.05
    assert {tensor.dtype for tensor in state(run).values()} == {torch.float32}
    assert all(
        math.isfinite(row["loss"]) for row in train(tmp_path, "--train.steps", "4", "--train.compute_dtype", "bf16")
    )


def test_parameter_groups_in_another_order_get_their_own_state_and_rates_back(tmp_path, world, monkeypatch):
    arguments = ("--optimizer.name", "muon", "--optimizer.adamw.lr", "0.25")
    groups = optimizer.optimizers.param_groups
    with monkeypatch.context() as patched:
        patched.setattr(optimizer.optimizers, "param_groups", lambda *args, **kwargs: groups(*args, **kwargs)[::-1])
        train(tmp_path, *arguments, "--train.steps", "3")
        before = resumed(tmp_path, world, *arguments, "--train.steps", "4")
    after = resumed(tmp_path, world, *arguments, "--train.steps", "4")
    assert (before.peak_lrs, after.peak_lrs) == ([0.25, 0.25, 1e-3], [1e-3, 0.25, 0.25])
    ours, theirs = state(after), state(before)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert any(tensor.count_nonzero() for name, tensor in ours.items() if name.endswith("momentum_buffer"))
