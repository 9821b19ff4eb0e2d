"""Exact variance reduction in a run: each batch's gradients at the present weights and at the last ones."""

import math

import pytest
import torch

from dit_train import overlays, preflight
from dit_train.parallel.mesh import joined
from dit_train.run import batch, loop, setup
from dit_train.run.stop import StopRequest

TINY = (
    "--model.width 32 --model.depth 1 --model.heads 2 --train.batch 8 --train.compute_dtype fp32 --sample.grid 0 "
    "--run.validate_every 0 --schedule.warmup_steps 0 --run.tensorboard false --parallel.device cpu "
    "--optimizer.name mars_muon --optimizer.lr 0.01"
).split()
EXACT = ("--optimizer.mars_exact", "true")


@pytest.fixture(scope="module")
def world():
    with joined(overlays.read([], TINY).parallel) as joined_world:
        yield joined_world


def prepared(tmp_path, world, *arguments):
    """A run before its first step; nothing in it is zero, as gates are at the start."""
    plan = preflight.check(overlays.read([], [*TINY, "--run.folder", str(tmp_path / "run"), *arguments]), 1)
    with setup.hold_folder(plan, world):
        run = setup.prepare(plan, world)
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in run.model.parameters():
            p.to_local().normal_(0, 0.1, generator=draws)
    return run


def forward_backward(run, step):
    slots = batch.share(run.config.train.batch, 0, 1)
    return loop._forward_backward(run, batch.draw(run.config, run.data, step, slots), StopRequest())


def gradients(run):
    return {name: p.grad.full_tensor().clone() for name, p in run.model.named_parameters()}


def last_gradients(run):
    state = {name: run.optimizer.state[p] for name, p in run.model.named_parameters()}
    return {name: one["last_gradient"].full_tensor() for name, one in state.items() if "last_gradient" in one}


def two_batches(run):
    """Matrices before the only step, then gradients of the batch after it."""
    forward_backward(run, 0)
    assert last_gradients(run) and all(torch.equal(gradients(run)[n], g) for n, g in last_gradients(run).items())
    before = {name: p.to_local().clone() for name, p in run.model.named_parameters() if name in last_gradients(run)}
    run.optimizer.step()
    run.optimizer.zero_grad()
    forward_backward(run, 1)
    return before, gradients(run)


def difference(a, b):
    """Relative to b."""
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize(("clip", "micro_batch"), [("null", "8"), ("0.01", "8"), ("null", "2")])
def test_the_last_gradient_is_of_this_batch_at_the_last_weights_and_clipped_as_the_present_one(
    tmp_path, world, clip, micro_batch
):
    run = prepared(tmp_path, world, *EXACT, "--train.clip_norm", clip, "--train.micro_batch", micro_batch)
    before, present = two_batches(run)
    plain = prepared(tmp_path / "plain", world, "--train.clip_norm", "null")
    weights = dict(plain.model.named_parameters())
    with torch.no_grad():
        for name, p in run.model.named_parameters():
            weights[name].to_local().copy_(p.to_local())
    _, norm, _ = forward_backward(plain, 1)
    by = 1.0 if clip == "null" else float(clip) / norm
    assert by == 1 or by < 0.1
    for name, gradient in gradients(plain).items():
        assert difference(present[name], by * gradient) < 1e-4, name
    plain.optimizer.zero_grad()
    with torch.no_grad():
        for name, weight in before.items():
            weights[name].to_local().copy_(weight)
    forward_backward(plain, 1)
    for name, last in last_gradients(run).items():
        assert difference(last, by * gradients(plain)[name]) < 1e-4, name
        assert difference(last, present[name]) > 1e-2, name


def test_a_last_gradient_that_is_not_finite_leaves_the_step_out(tmp_path, world):
    run = prepared(tmp_path, world, *EXACT)
    two_batches(run)
    run.optimizer.zero_grad()
    for p in run.model.parameters():
        if "last_weight" in run.optimizer.state[p]:
            run.optimizer.state[p]["last_weight"].fill_(math.inf)
    loss, norm, _ = forward_backward(run, 2)
    assert math.isfinite(loss) and math.isnan(norm)
    assert all(p.to_local().isfinite().all() for p in run.model.parameters())


def test_it_is_refused_without_a_correction():
    with pytest.raises(
        overlays.ConfigError, match=r"^optimizer\.mars_exact: does nothing beside optimizer\.mars_gamma 0"
    ):
        overlays.read([], ["--optimizer.name", "muon", *EXACT])


def test_no_period_is_chosen_by_a_budget_that_the_second_pass_exceeds_at_any():
    words = [*EXACT, "--optimizer.mars_gamma", "0.025", "--optimizer.period", "auto"]
    with pytest.raises(overlays.ConfigError, match=r"^optimizer\.period: auto compares with AdamW, .*; name a number"):
        overlays.read([], ["--optimizer.name", "muon_bp", *words])
