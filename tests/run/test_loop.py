"""The parts of a run do what the metrics say: rates, averages, clipping, precision, scores, samples."""

import dataclasses
import json
import math
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist

from dit_train import overlays, preflight
from dit_train.checkpoint import manifest
from dit_train.checkpoint.saving import Saver
from dit_train.data import sources
from dit_train.parallel import precision
from dit_train.parallel.mesh import joined
from dit_train.parallel.shard import local
from dit_train.run import evaluation, loop, metrics, optimizer, references, sampling, schedule, tracking
from dit_train.run.batch import draw, share
from dit_train.run.ema import EMA
from dit_train.run.setup import hold_folder, prepare
from dit_train.run.stop import StopRequest
from tests.checkpoint.trained import full_disk, names

TINY = (
    "--model.width 32 --model.depth 1 --model.heads 2 --train.batch 8 --train.steps 4 --train.compute_dtype fp32 "
    "--optimizer.name muon --schedule.warmup_steps 2 --sample.steps 2 --sample.grid 0 --run.validate_count 16 "
    "--run.tensorboard false --parallel.device cpu"
).split()


@pytest.fixture(scope="module")
def world():
    with joined(overlays.read([], TINY).parallel) as joined_world:
        yield joined_world


def plan(tmp_path, *arguments):
    return preflight.check(overlays.read([], [*TINY, "--run.folder", str(tmp_path / "run"), *arguments]), 1)


def prepared(made, world):
    with hold_folder(made, world):
        return prepare(made, world)


def rows(tmp_path, name):
    return [json.loads(line) for line in (tmp_path / "run" / name).read_text().splitlines()]


def test_rates_averages_and_losses_are_what_the_optimizer_and_the_weights_had(tmp_path, world, monkeypatch):
    seen, rates = [], []
    update = EMA.update

    def spy(ema, step):
        seen.append([parameter.full_tensor().clone() for parameter in ema.model.parameters()])
        update(ema, step)
        spy.ema = ema

    build = optimizer.build

    def built(config, model):
        steps = build(config, model)
        inner = steps.step
        monkeypatch.setattr(steps, "step", lambda: (rates.append([g["lr"] for g in steps.param_groups]), inner())[1])
        seen.append([parameter.full_tensor().clone() for parameter in model.parameters()])
        return steps

    monkeypatch.setattr(EMA, "update", spy)
    made = plan(tmp_path, "--optimizer.adamw.lr", "0.5", "--train.ema_decay", "0.9")
    monkeypatch.setattr(optimizer, "build", built)
    assert loop.train(made, StopRequest()) == 0
    config = made.config
    factors = [schedule.factor(config.schedule, step, 4) for step in range(4)]
    assert rates == [[1e-3 * factor, 0.5 * factor, 0.5 * factor] for factor in factors]
    assert [row["lr"] for row in rows(tmp_path, "metrics.jsonl")] == [1e-3 * factor for factor in factors]
    average = seen[0]
    for step, weights in enumerate(seen[1:]):
        decay = min(0.9, (1 + step) / (10 + step))
        average = [decay * a + (1 - decay) * w for a, w in zip(average, weights, strict=True)]
    for ours, theirs in zip(average, spy.ema.weights.values(), strict=True):
        assert torch.allclose(ours, theirs.full_tensor(), atol=1e-6)
    losses = rows(tmp_path, "scores.jsonl")[-1]
    assert losses["heldout_loss"] != losses["heldout_loss_raw"] and losses["heldout_count"] == 16


def test_clipped_gradients_and_the_unclipped_norm_in_the_log(tmp_path, world):
    with StopRequest() as stop:
        run = prepared(plan(tmp_path, "--train.clip_norm", "0.1"), world)
        batch = draw(run.config, run.data, 0, share(8, 0, 1))
        _, norm, stopping = loop._forward_backward(run, batch, stop)
    clipped = math.sqrt(sum(p.grad.full_tensor().square().sum().item() for p in run.model.parameters()))
    assert norm > 0.2 and clipped == pytest.approx(0.1, rel=1e-3) and not stopping


def test_rows_that_wait_for_the_next_step_are_the_same_and_lie_before_what_is_evaluated(tmp_path, world, monkeypatch):
    """Where a GPU would have to be waited for after each step: no row is lost or late for a save, score or stop."""
    told, evaluated, found = tracking.Reporter.step, tracking.Reporter.evaluation, []

    def step(self, row):
        seen.append(row["step"])
        told(self, row)

    def evaluation(self, row, text):
        seen.append(row["kind"])
        evaluated(self, row, text)

    monkeypatch.setattr(tracking.Reporter, "step", step)
    monkeypatch.setattr(tracking.Reporter, "evaluation", evaluation)
    for name, late in (("at_once", False), ("late", True)):
        monkeypatch.setattr(metrics, "is_late", lambda device, late=late: late)
        seen = []
        settings = ("--train.steps", "7", "--run.validate_every", "3", "--run.checkpoint_every", "5")
        assert loop.train(plan(tmp_path / name, *settings), StopRequest()) == 0
        found.append((seen, rows(tmp_path / name, "metrics.jsonl")))
    (seen, rows_at_once), (seen_late, rows_late) = found
    assert seen == seen_late == [1, 2, 3, "held-out", 4, 5, 6, "held-out", 7, "held-out"]
    assert [row.keys() for row in rows_at_once] == [row.keys() for row in rows_late]
    assert [row["loss"] for row in rows_at_once] == [row["loss"] for row in rows_late]
    assert all(row["optimizer_ms"] > 0 and row["optimizer_update_ms"] > 0 for row in rows_late)


def test_auto_takes_the_faster_dtype_and_a_resume_keeps_it(tmp_path, world, monkeypatch):
    auto = ("--train.compute_dtype", "auto", "--run.checkpoint_every", "2")
    monkeypatch.setattr(precision, "measure", lambda *_: {"fp32": 2.0, "bf16": 1.0})
    assert loop.train(plan(tmp_path, *auto, "--train.steps", "2"), StopRequest()) == 0
    assert "compute dtype bf16 (measured: fp32 2.0 ms, bf16 1.0 ms)" in (tmp_path / "run" / "config.yaml").read_text()
    monkeypatch.setattr(precision, "measure", lambda *_: {"fp32": 1.0, "bf16": 2.0})
    assert loop.train(plan(tmp_path, *auto), StopRequest()) == 0
    assert "compute dtype bf16 (as measured when" in (tmp_path / "run" / "config.yaml").read_text()


def test_both_dtypes_can_be_measured(tmp_path, world):
    made = plan(tmp_path)
    found = precision.measure(made.config, prepared(made, world).data, world)
    assert found.keys() == {"fp32", "bf16"} and all(0 < ms < math.inf for ms in found.values())


def test_scores_compare_averaged_weights_with_held_out_images_and_their_classes(tmp_path, world, monkeypatch):
    run = prepared(plan(tmp_path, "--score.every", "4", "--sample.batch", "64"), world)
    for average in run.ema.weights.values():
        average.fill_(0.25)
    real, drawn, weights = {}, [], []
    of = references.of_images

    def spy(images, *about):
        real["images"] = images
        return of(images, *about)

    monkeypatch.setattr(references, "of_images", spy)
    monkeypatch.setattr(
        references.eval.score, "floor", lambda images, *_: drawn.append(images) or {"value": 1, "kid": 1}
    )
    scorer = evaluation.Scorer(run)
    heldout = run.data.heldout.images(range(359))
    assert torch.equal(real["images"], heldout)
    trained = {bytes(image) for image in run.data.train.images(range(1438)).flatten(1).numpy()}
    assert len(drawn) == 5 and all(bytes(image) in trained for image in drawn[0].flatten(1).numpy())

    class Sampler(sampling.Sampler):
        def __init__(self, config, data, model, device, labels):
            self.model, self.broken = model, {3}
            assert torch.equal(labels(torch.arange(359)), run.data.heldout.labels(range(359)))

        def __call__(self, indices):
            weights.append(next(self.model.parameters()).full_tensor().flatten()[0].item())
            return heldout[indices]

    monkeypatch.setattr(sampling, "Sampler", Sampler)
    record = scorer.score(StopRequest())
    assert set(weights) == {0.25}
    assert record["value"] < 1e-6 and record["n_gen"] == 359 and record["not_finite"] == 1


@pytest.mark.parametrize("end", ["failed", "stopped"])
def test_trained_weights_are_back_after_a_score_that_did_not_end(tmp_path, world, monkeypatch, end):
    run = prepared(plan(tmp_path, "--score.every", "4", "--sample.batch", "16", "--score.count", "64"), world)
    trained = [parameter.full_tensor().clone() for parameter in run.model.parameters()]
    for average in run.ema.weights.values():
        average.fill_(0.25)
    scorer, stop, sampled, sampler = evaluation.Scorer(run), StopRequest(), [], sampling.Sampler.__call__

    def second_ends(self, indices):
        sampled.append(local(next(run.model.parameters()).detach()).unique().tolist())
        if len(sampled) == 2 and end == "failed":
            raise torch.OutOfMemoryError
        stop._signalled = "SIGTERM" if len(sampled) == 2 else None
        return sampler(self, indices)

    monkeypatch.setattr(sampling.Sampler, "__call__", second_ends)
    with pytest.raises({"failed": torch.OutOfMemoryError, "stopped": evaluation.Stopped}[end]):
        scorer.score(stop)
    assert sampled == [[0.25], [0.25]] and run.model.training and torch.is_grad_enabled()
    assert all(map(torch.equal, trained, [parameter.full_tensor() for parameter in run.model.parameters()]))
    assert all((local(average) == 0.25).all() for average in run.ema.weights.values())


def test_a_stop_in_the_middle_of_a_score_saves_and_leaves_the_score_to_the_next_start(tmp_path, world, monkeypatch):
    arguments = ("--score.every", "2", "--sample.batch", "16", "--score.count", "64")
    stop = StopRequest()
    sampler = sampling.Sampler.__call__

    def asked(self, indices):
        stop._signalled = "SIGTERM"
        return sampler(self, indices)

    monkeypatch.setattr(sampling.Sampler, "__call__", asked)
    assert loop.train(plan(tmp_path, *arguments), stop) == 85
    assert (rows(tmp_path, "metrics.jsonl")[-1]["step"], rows(tmp_path, "scores.jsonl")[-1]["kind"]) == (2, "held-out")
    monkeypatch.setattr(sampling.Sampler, "__call__", sampler)
    assert loop.train(plan(tmp_path, *arguments), StopRequest()) == 0
    kinds = [(row["step"], row["kind"]) for row in rows(tmp_path, "scores.jsonl")]
    assert kinds == [(step, kind) for step in (2, 4) for kind in ("held-out", "score")]
    assert [row["step"] for row in rows(tmp_path, "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_last_evaluation_that_was_made_up_for_is_not_made_again(tmp_path, world):
    assert loop.train(plan(tmp_path), StopRequest()) == 0
    folder = tmp_path / "run" / "checkpoints" / "step_0000004"
    content = manifest.read(folder)
    manifest.write(folder, dataclasses.replace(content, run=dataclasses.replace(content.run, evaluated=False)))
    assert not plan(tmp_path).finished
    before = rows(tmp_path, "scores.jsonl")
    assert loop.train(plan(tmp_path), StopRequest()) == 0
    assert plan(tmp_path).finished
    assert [row["step"] for row in rows(tmp_path, "scores.jsonl")] == [row["step"] for row in before]


@pytest.mark.parametrize("background", ["true", "false"])
def test_a_last_save_on_a_full_disk_is_one_line_and_keeps_the_checkpoint_before(tmp_path, world, capsys, background):
    saved = ("--run.async_checkpoint", background)
    assert loop.train(plan(tmp_path, "--train.steps", "2", *saved), StopRequest()) == 0
    made = plan(tmp_path, *saved)
    with full_disk(20_000):
        assert loop.train(made, StopRequest()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the last checkpoint could not be saved" in line and "File too large" in line
    assert plan(tmp_path).resume.state.step == 2
    assert json.loads((tmp_path / "run" / "exit.json").read_text())["code"] == 2


@pytest.mark.parametrize("background", ["true", "false"])
def test_a_full_disk_on_the_way_leaves_the_run_alive(tmp_path, world, capsys, monkeypatch, background):
    saved = ("--run.async_checkpoint", background, "--run.checkpoint_every", "1")
    save, limits = Saver.save, ExitStack()

    def until_the_last(saver, state):
        saver.finish()
        limits.close()
        if state.step in (2, 3):
            limits.enter_context(full_disk(20_000))
        save(saver, state)

    monkeypatch.setattr(Saver, "save", until_the_last)
    assert loop.train(plan(tmp_path, *saved), StopRequest()) == 0
    shown = capsys.readouterr().out
    assert [f"step_000000{step} could not be saved" in shown for step in (1, 2, 3, 4)] == [False, True, True, False]
    assert names(tmp_path / "run") == ["step_0000001", "step_0000004"]
    assert [row["step"] for row in rows(tmp_path, "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_flipped_bit_is_found_before_a_resume_and_not_where_that_is_switched_off(tmp_path, world, capsys):
    assert loop.train(plan(tmp_path, "--train.steps", "2"), StopRequest()) == 0
    part = tmp_path / "run" / "checkpoints" / "step_0000002" / "__0_0.distcp"
    raw = bytearray(part.read_bytes())
    raw[-1] ^= 1  # the end of a zip record, which torch does not look at
    part.write_bytes(raw)
    assert loop.train(plan(tmp_path), StopRequest()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "__0_0.distcp is not as it was written" in line and "remove that folder" in line
    assert loop.train(plan(tmp_path, "--run.verify_checkpoint", "false"), StopRequest()) == 0


def test_changed_settings_are_said_on_a_resume(tmp_path, world, capsys):
    assert loop.train(plan(tmp_path, "--train.steps", "1"), StopRequest()) == 0
    assert loop.train(plan(tmp_path, "--train.steps", "2", "--optimizer.lr", "0.5"), StopRequest()) == 0
    shown = capsys.readouterr().out
    assert "changed since the last start: optimizer.lr: 0.001 -> 0.5" in shown


class Recorder(torch.nn.Module):
    """A model that keeps the labels it is asked for and knows one class from another."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def forward(self, x, t, labels):
        self.asked.append(labels.tolist())
        return x * labels.view(-1, 1, 1, 1) / 10


def samples(indices, **changes):
    config = overlays.read([], TINY)
    config = dataclasses.replace(config, sample=dataclasses.replace(config.sample, **changes))
    data = sources.check(config.data)
    model = Recorder()
    made = sampling.Sampler(config, data, model, torch.device("cpu"), lambda i: i % 10)(torch.tensor(indices))
    return made, model.asked


def test_a_sample_depends_on_its_index_and_the_seed_alone():
    eight, _ = samples(list(range(8)))
    two, _ = samples([3, 5])
    assert torch.equal(two, eight[[3, 5]])
    assert not torch.equal(eight[3], eight[5])
    assert not torch.equal(eight, samples(list(range(8)), seed=9)[0])


def test_guidance_asks_for_the_null_class_beside_each():
    _, plain = samples([3, 14])
    _, guided = samples([3, 14], guidance=2.0)
    assert plain[0] == [3, 4] and guided[0] == [3, 4, 10, 10]


def test_a_grid_has_a_class_a_column(tmp_path, world, monkeypatch):
    run = prepared(plan(tmp_path, "--sample.grid", "3", "--sample.batch", "4"), world)
    monkeypatch.setattr(
        sampling,
        "Sampler",
        lambda *args: lambda i: (10 * args[-1](i) + 1).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 8, 8),
    )
    picture = sampling.grid(run.config, run.data, run.model, world)
    assert picture.shape == (1, 27, 27) and dist.get_world_size() == 1
    assert picture[0, ::9, ::9].tolist() == [[1, 11, 21]] * 3


def test_tensorboard_and_the_newest_checkpoints_are_written(tmp_path, world):
    arguments = ("--run.tensorboard", "true", "--run.checkpoint_every", "1", "--run.keep_checkpoints", "2")
    assert loop.train(plan(tmp_path, *arguments, "--sample.grid", "2"), StopRequest()) == 0
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2
    assert (tmp_path / "run" / "samples" / "step_0000004.png").is_file()


def test_the_real_model_is_routed_as_documented(tmp_path, world):
    run = prepared(plan(tmp_path, "--optimizer.adamw.betas", "0.8", "0.9", "--model.swiglu", "true"), world)
    matrices, decayed, plain = run.optimizer.param_groups
    assert {name.split(".", 2)[2] for name in matrices["param_names"]} == {
        *(f"attention.{part}.weight" for part in ("query", "key", "value", "output")),
        *(f"mlp.{part}.weight" for part in ("gate", "up", "down")),
    }
    assert (matrices["algorithm"], decayed["algorithm"], plain["algorithm"]) == ("muon", "adamw", "adamw")
    assert "blocks.0.modulation.linear.weight" in decayed["param_names"]
    assert (matrices["weight_decay"], decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.1, 0.0)
    assert tuple(decayed["betas"]) == tuple(plain["betas"]) == (0.8, 0.9)
