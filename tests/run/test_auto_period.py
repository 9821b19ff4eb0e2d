"""``optimizer.period: auto``: what it leaves behind is its choice and its reasons, nothing else."""

import json

import pytest
import torch

from dit_train import overlays, preflight
from dit_train.parallel.mesh import joined
from dit_train.planning.period import StepTimes
from dit_train.run import loop, period
from dit_train.run.setup import hold_folder, prepare
from dit_train.run.stop import StopRequest

TINY = (
    "--model.width 32 --model.depth 1 --model.heads 2 --train.batch 8 --train.compute_dtype fp32 --sample.grid 0 "
    "--run.validate_every 0 --schedule.warmup_steps 1 --run.tensorboard false --parallel.device cpu "
    "--optimizer.lr 0.02 --optimizer.name periodic_row_muon"
).split()
AUTO = ("--optimizer.period", "auto")
TIMES = StepTimes(computing=0.09, waiting=0.1, adamw=0.01, between=0.012, refresh=0.0235)
"""The smallest period within 5 % of 0.1 s: 2 ms + 11.5 ms / P is at most 5 ms from P = 4 on; within 10 %: P = 2."""


@pytest.fixture(scope="module")
def world():
    with joined(overlays.read([], TINY).parallel) as joined_world:
        yield joined_world


@pytest.fixture
def measured(monkeypatch):
    """Measures, but what comes of it is `TIMES`; counts."""
    real, calls = period.measure, []

    def measure(*about):
        calls.append(real(*about))
        return TIMES

    monkeypatch.setattr(period, "measure", measure)
    return calls


def plan(folder, *arguments):
    return preflight.check(overlays.read([], [*TINY, "--run.folder", str(folder), *arguments]), 1)


def train(folder, *arguments):
    assert loop.train(plan(folder, *arguments), StopRequest()) == 0
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def prepared(folder, world, *arguments):
    made = plan(folder, *arguments)
    with hold_folder(made, world):
        return prepare(made, world)


def tensors(run) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in run.model.named_parameters():
        parts = {"model": parameter.detach(), "ema": run.ema.weights[name], **run.optimizer.state[parameter]}
        found |= {f"{name} {kind}": tensor.full_tensor() for kind, tensor in parts.items()}
    return found


def groups(run) -> list[tuple[int, int | None]]:
    return [(group["step"], group.get("period")) for group in run.optimizer.param_groups]


def test_a_run_with_auto_is_bit_for_bit_the_run_with_that_period_in_its_config(tmp_path, world, measured):
    random = torch.get_rng_state()
    auto = train(tmp_path / "auto", *AUTO, "--train.steps", "6")
    assert len(measured) == 1 and torch.equal(torch.get_rng_state(), random)
    given = train(tmp_path / "given", "--optimizer.period", "4", "--train.steps", "6")
    assert auto == given and len(measured) == 1
    assert train(tmp_path / "other", "--optimizer.period", "3", "--train.steps", "6") != given  # a period matters here
    ours = prepared(tmp_path / "auto", world, *AUTO, "--train.steps", "7")
    theirs = prepared(tmp_path / "given", world, "--optimizer.period", "4", "--train.steps", "7")
    assert groups(ours) == groups(theirs) == [(6, 4), (6, None), (6, None)]
    a, b = tensors(ours), tensors(theirs)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", ["muon_bp", "periodic_row_muon", "periodic_sign_muon"])
def test_what_was_measured_is_real(tmp_path, world, measured, name):
    prepared(tmp_path / "run", world, *AUTO, "--optimizer.name", name)
    (times,) = measured
    assert min(times.computing, times.adamw, times.between, times.refresh) > 0 <= times.waiting


@pytest.mark.parametrize(
    "model",
    [
        "--model.adaln lora --model.adaln_rank 4 --model.position rope --parallel.activation_checkpointing full",
        "--model.adaln single --model.swiglu true --train.compute_dtype bf16 --train.micro_batch 4",
        "--model.adaln noshift --model.qk_norm true --parallel.compile true --parallel.compile_backend aot_eager",
    ],
)
def test_every_form_of_block_can_be_measured(tmp_path, world, model):
    state = prepared(tmp_path / "run", world, *AUTO, *model.split()).state
    assert len(state.period_times) == 6 and state.period_times[0] == 1 and state.period_times[1] > 0


def test_a_resume_keeps_the_choice_and_measures_nothing(tmp_path, world, measured, monkeypatch):
    folder = tmp_path / "run"
    train(folder, *AUTO, "--train.steps", "2")
    config, record = (folder / "config.yaml").read_text(), json.loads((folder / "period.json").read_text())
    assert "\n# period: period 4, the smallest within 5.0% of AdamW's step: +4.9%; ms: " in config
    assert "(measured)\n" in config and "\n  period: auto\n" in config
    assert (record["period"], record["budget"], record["within_budget"], record["ranks"]) == (4, 0.05, True, 1)
    assert record["milliseconds"] == pytest.approx(
        {"computing": 90, "waiting": 100, "adamw": 10, "between": 12, "refresh": 23.5}
    )
    rows = record["periods"]
    assert [row["period"] for row in rows] == list(range(1, 65))
    assert rows[3] == pytest.approx(
        {"period": 4, "step_ms": 204.875, "against_adamw": 0.024375, "against_hidden": 0.04875}
    )
    monkeypatch.setattr(period, "measure", lambda *_: pytest.fail("measured again"))
    (folder / "period.json").unlink()  # it is told from the checkpoint
    assert groups(prepared(folder, world, *AUTO, "--train.steps", "4"))[0] == (2, 4)
    assert json.loads((folder / "period.json").read_text()) == record
    assert "(as measured when the run began)\n" in (folder / "config.yaml").read_text()


def test_other_settings_on_a_resume_win_and_are_listed(tmp_path, world, measured, capsys):
    folder = tmp_path / "run"
    train(folder, "--optimizer.period", "5", "--train.steps", "2")
    assert not measured and not (folder / "period.json").exists()
    train(folder, *AUTO, "--train.steps", "4")  # nothing has been measured: now it is
    assert "changed since the last start: optimizer.period: 5 -> auto" in capsys.readouterr().out
    assert len(measured) == 1 and json.loads((folder / "period.json").read_text())["period"] == 4
    run = prepared(folder, world, *AUTO, "--optimizer.period_budget", "0.1", "--train.steps", "6")
    assert groups(run)[0] == (4, 2) and json.loads((folder / "period.json").read_text())["period"] == 2
    assert "changed since the last start: optimizer.period_budget: 0.05 -> 0.1" in capsys.readouterr().out
    assert groups(prepared(folder, world, "--optimizer.period", "7", "--train.steps", "6"))[0] == (4, 7)
    assert "changed since the last start: optimizer.period: auto -> 7" in capsys.readouterr().out
    assert not (folder / "period.json").exists()
    assert groups(prepared(folder, world, *AUTO, "--train.steps", "6"))[0] == (4, 4) and len(measured) == 1


def test_where_no_period_fits_it_takes_the_longest_and_warns(tmp_path, world, measured, capsys):
    run = prepared(tmp_path / "run", world, *AUTO, "--optimizer.period_budget", "0.01")
    assert groups(run)[0] == (0, 64)
    assert "WARNING: no period is within 1.0% of AdamW's step; period 64, the longest: +2.2%" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "period.json").read_text())["within_budget"] is False


@pytest.mark.parametrize("times", [[1.0], [1, 0, 0, 0, 0, 0], [1, 1, -1, 1, 1, 1], [[1.0]] * 6, [1] * 7])
def test_times_of_a_checkpoint_that_no_measurement_gives_are_measured_anew(tmp_path, world, measured, times):
    made = plan(tmp_path / "run", *AUTO)
    state = preflight.listing.RunState(compute_dtype="fp32", period_times=times)
    run = prepared(tmp_path / "run", world, *AUTO)
    settings, note = period.settle(made.config, run.data, world, state)
    assert settings.period == 4 and note.endswith("(measured)") and state.period_times == run.state.period_times


def test_options_that_do_not_fit_the_shards_are_one_line(tmp_path, world):
    run = prepared(tmp_path / "run", world)
    bad = overlays.read([], [*TINY[:-2], "--optimizer.name", "muon_bp", *AUTO, "--optimizer.ns_steps", "500"])
    with pytest.raises(preflight.ConfigError, match=r"^optimizer: .*ns_steps"):
        period.measure(bad, run.data, world, torch.float32)
