"""Live figures of a run: speed by the model's formula, norms, held-out losses by time, profiles."""

import gzip
import json
import math
import re
from pathlib import Path

import pytest
import torch

from dit_train import config as settings
from dit_train.diffusion.objectives import velocity_loss
from dit_train.model.flops import model_flops
from dit_train.run import figures, loop, metrics, norms, optimizer, tracking
from dit_train.run.stop import StopRequest
from dit_train.run.validation import BUCKETS, HeldOut
from tests.run.test_loop import plan, prepared, rows, world

__all__ = ["world"]  # the fixture

README = Path(__file__).parents[2] / "README.md"
SPANS = {f"optimizer_{part}_ms" for part in ("momentum", "exchange", "orthogonalisation", "update")}


def groups(row, what):
    return [value for key, value in row.items() if re.match(rf"{what}_norm/\d_", key)]


def parts(row, what):
    return [value for key, value in row.items() if re.match(rf"{what}_norm/[a-z]", key)]


def test_every_row_tells_speed_and_some_tell_norms_that_make_up_the_whole(tmp_path, world, monkeypatch):
    found, flops = {}, []

    def built(config, model):
        steps = build(config, model)
        inner = steps.step

        def step():
            before = [p.full_tensor().detach().double() for p in model.parameters()]
            inner()
            after = [p.full_tensor().detach().double() for p in model.parameters()]
            moved = math.sqrt(sum((a - b).square().sum() for a, b in zip(after, before, strict=True)))
            found[len(found) + 1] = (math.sqrt(sum(b.square().sum() for b in before)), moved)

        monkeypatch.setattr(steps, "step", step)
        flops.append(model_flops(model).total)
        return steps

    build = optimizer.build
    monkeypatch.setattr(figures, "peak_tflops", lambda name, dtype: {"fp32": 0.5}[dtype])
    made = plan(tmp_path, "--train.clip_norm", "0.1", "--run.norms_every", "3", "--run.log_every", "2")
    monkeypatch.setattr(optimizer, "build", built)
    assert loop.train(made, StopRequest()) == 0
    for row in rows(tmp_path, "metrics.jsonl"):
        seconds = row["step_ms"] / 1e3
        assert row["images_per_s"] * seconds == pytest.approx(8)
        assert row["tflops"] * seconds == pytest.approx(8 * flops[0] / 1e12)
        assert row["mfu"] == pytest.approx(row["tflops"] / 0.5)
        assert row["data_wait_share"] == pytest.approx(row["data_wait_ms"] / row["step_ms"])
        assert 0 < sum(row[key] for key in SPANS) <= row["optimizer_ms"] and row["optimizer_orthogonalisation_ms"] > 0
        assert ("memory_gib" in row) == ("data_wait_share_max" in row) == (row["step"] in (2, 4))
        weights, moved = found[row["step"]]
        if row["step"] not in (3, 4):  # the last, too
            assert not any("_norm/" in key for key in row)
            continue
        for marginal in (groups, parts):  # each makes up the whole; gradients as they were before they were clipped
            assert math.hypot(*marginal(row, "gradient")) == pytest.approx(row["grad_norm"], rel=1e-5)
            assert math.hypot(*marginal(row, "weight")) == pytest.approx(weights, rel=1e-6)
            assert math.hypot(*marginal(row, "update")) == pytest.approx(moved, rel=1e-6)
        assert row["grad_norm"] > 0.2 and len(groups(row, "update")) == 3
    assert 0.05 < row["memory_gib"] < 500
    table = README.read_text().split("### Live figures")[1].split("\n\n")[2]
    told = {key for line in table.splitlines() for key in re.findall(r"`([\w/]+)`", line.split("|")[1])}
    assert told - {"memory_reserved_gib"} == {re.sub("_norm/.*", "_norm/NAME", key) for key in row}


def test_a_device_without_a_known_peak_has_no_mfu_and_an_update_left_out_no_norms(tmp_path, world, monkeypatch):
    def broken(run, batch, stop):
        loss, norm, stopping = whole(run, batch, stop)
        return (math.nan if run.state.step == 1 else loss), norm, stopping

    whole = loop._forward_backward
    monkeypatch.setattr(loop, "_forward_backward", broken)
    assert loop.train(plan(tmp_path, "--run.norms_every", "1"), StopRequest()) == 0
    found = rows(tmp_path, "metrics.jsonl")
    assert [row["mfu"] for row in found] == [None] * 4
    assert [any("_norm/" in key for key in row) for row in found] == [True, False, True, True]
    assert [row["optimizer_update_ms"] > 0 for row in found] == [True, False, True, True]


def test_norms_can_be_switched_off(tmp_path, world):
    assert loop.train(plan(tmp_path, "--run.norms_every", "0", "--train.steps", "2"), StopRequest()) == 0
    assert not any("_norm/" in key for row in rows(tmp_path, "metrics.jsonl") for key in row)


def test_norms_are_not_waited_for_between_an_update_and_the_next_forward(tmp_path, world, monkeypatch):
    """Where a device is asked late, as a GPU is; each row still has its own norms, by its own clipping."""
    told, found, read, forward = [], [], norms.Norms.read, loop._forward_backward
    monkeypatch.setattr(norms.Norms, "read", lambda *given: (told.append("norms"), read(*given))[1])
    monkeypatch.setattr(loop, "_forward_backward", lambda *given: (told.append("forward"), forward(*given))[1])
    for name, late in (("at_once", False), ("late", True)):
        monkeypatch.setattr(metrics, "is_late", lambda device, late=late: late)
        told.clear()
        assert (
            loop.train(plan(tmp_path / name, "--run.norms_every", "1", "--train.clip_norm", "0.1"), StopRequest()) == 0
        )
        found.append([{k: v for k, v in row.items() if "_norm" in k} for row in rows(tmp_path / name, "metrics.jsonl")])
    assert told == ["forward", "forward", "norms", "forward", "norms", "forward", "norms", "norms"]
    assert found[0] == found[1] and len({row["update_norm/mlp"] for row in found[0]}) == 4


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("blocks.11.attention.query.weight", "attention"),
        ("blocks.0.modulation.linear.bias", "modulation"),
        ("modulation.linear.weight", "modulation"),
        ("final_layer.modulation.linear.weight", "final_layer"),
    ],
)
def test_a_parameter_belongs_to_a_part_of_the_model(name, part):
    assert norms.part_of(name) == part


# --- held-out losses by time


def test_the_losses_of_the_times_make_up_the_whole(tmp_path, world):
    run = prepared(plan(tmp_path, "--run.validate_count", "50", "--sample.batch", "16"), world)
    heldout = HeldOut(run.config, run.data, world)
    loss = heldout.loss(run.model)
    assert sum(heldout.counts) == 50 and len(heldout.counts) == BUCKETS
    filled = [count for count in heldout.counts if count]
    whole = sum(mean * count for mean, count in zip(loss.by_time.values(), filled, strict=True)) / 50
    assert whole == pytest.approx(loss.mean, rel=1e-12)
    # by hand, of the images of one tenth
    inside = []
    with torch.no_grad():
        for batch, members in heldout._batches:
            losses = velocity_loss(run.model(batch.x_t, batch.t, batch.labels), batch.target)
            real = members.sum(1) > 0
            inside += losses[real & (batch.t >= 0.4) & (batch.t < 0.5)].tolist()
    assert len(inside) == heldout.counts[4] > 3
    assert loss.by_time["t_0.4-0.5"] == pytest.approx(sum(inside) / len(inside), rel=1e-6)


def test_times_without_images_have_no_loss(tmp_path, world):
    run = prepared(plan(tmp_path, "--run.validate_count", "3"), world)
    heldout = HeldOut(run.config, run.data, world)
    assert heldout.counts.count(0) == BUCKETS - len(heldout.loss(run.model).by_time) > 5


def test_losses_by_time_are_in_the_scores(tmp_path, world):
    assert loop.train(plan(tmp_path, "--train.steps", "1"), StopRequest()) == 0
    (row,) = rows(tmp_path, "scores.jsonl")
    found = [value for key, value in row.items() if re.fullmatch(r"heldout_loss/t_0\.\d-[01]\.\d", key)]
    assert len(found) > 4 and min(found) <= row["heldout_loss"] <= max(found)


# --- profiles


def profiles(tmp_path):
    """Recorded steps and ranks, and for each how many steps and updates its trace shows."""
    found = {}
    for path in sorted((tmp_path / "run" / "profiles").glob("*/rank_*.json.gz")):
        names = [event.get("name", "") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]
        steps = len({name for name in names if name.startswith("ProfilerStep#")})
        updates = sum(name.startswith("Optimizer.step#") for name in names)
        assert any("scaled_dot_product" in name for name in names)
        found[path.parent.name, path.name[: -len(".json.gz")]] = (steps, updates)
    return found


def test_the_config_names_steps_to_be_profiled(tmp_path, world, capsys):
    assert loop.train(plan(tmp_path, "--run.profile", "2", "2"), StopRequest()) == 0
    assert profiles(tmp_path) == {("steps_0000002-0000003", "rank_0"): (2, 2)}
    assert "steps 2 to 3 in" in capsys.readouterr().out


def test_the_first_step_and_a_run_that_ends_amid_a_profile(tmp_path, world):
    assert loop.train(plan(tmp_path, "--run.profile", "1", "1", "--train.steps", "2"), StopRequest()) == 0
    assert profiles(tmp_path) == {("steps_0000001-0000001", "rank_0"): (1, 1)}
    assert loop.train(plan(tmp_path, "--run.profile", "4", "9"), StopRequest()) == 0
    assert profiles(tmp_path)["steps_0000004-0000004", "rank_0"] == (1, 1)


def test_a_file_that_is_there_amid_a_profile_is_heeded_after_it(tmp_path, world):
    made = plan(tmp_path, "--run.profile", "1", "3", "--run.log_every", "1", "--train.steps", "6")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").write_text("2")
    assert loop.train(made, StopRequest()) == 0
    assert profiles(tmp_path) == {
        ("steps_0000001-0000003", "rank_0"): (3, 3),
        ("steps_0000005-0000006", "rank_0"): (2, 2),
    }


def test_a_profile_that_cannot_be_written_leaves_the_run_alive(tmp_path, world, capsys):
    made = plan(tmp_path, "--run.profile", "2", "1")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profiles").touch()
    assert loop.train(made, StopRequest()) == 0
    assert "the run goes on" in capsys.readouterr().err


@pytest.mark.parametrize("wanted", [("0", "3"), ("5", "0"), ("5", str(settings.MOST_PROFILED_STEPS + 1))])
def test_a_profile_of_no_or_too_many_steps_is_refused(tmp_path, wanted):
    with pytest.raises(settings.ConfigError, match=r"run\.profile: must be the first step"):
        plan(tmp_path, "--run.profile", *wanted)


@pytest.mark.parametrize(
    ("text", "count"), [("", 3), ("7\n", 7), ("21", 0), ("0", 0), ("-1", 0), ("9" * 5000, 0), ("x", 0)]
)
def test_a_file_asks_for_steps(tmp_path, world, capsys, text, count):
    from dit_train.run.profiling import Profiler

    run = prepared(plan(tmp_path), world)
    file = tmp_path / "run" / "profile"
    file.write_text(text)
    profiler = Profiler(run)
    assert profiler._asked() == count and not file.exists()
    assert ("is no number of steps" in capsys.readouterr().out) == (count == 0)
    assert profiler._asked() == 0


# --- the line on the terminal


def test_the_line_tells_the_mean_speed_since_the_last(capsys):
    progress = tracking.Progress("run", 0, 100, 2)
    row = {"loss": 0.5, "lr": 1e-3, "grad_norm": 1.0}
    for step, (milliseconds, mfu) in enumerate([(10, None), (30, 0.5), (10, 0.3)], 1):
        progress.step({**row, "step": step, "step_ms": milliseconds, "images_per_s": 60e3 / milliseconds, "mfu": mfu})
    progress.step({**row, "step": 4, "step_ms": 10, "images_per_s": 2e3, "mfu": 0.4})
    first, second, third = capsys.readouterr().out.splitlines()
    assert "lr 1.00e-03  6,000 images/s  left" in first
    assert "2,000 images/s  MFU 50 %" in second
    assert "4,000 images/s  MFU 35 %" in third
