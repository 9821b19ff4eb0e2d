"""The training loop: batch → loss → gradients → clip → optimizer → EMA → metrics, and what is due now and then."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dit_train import exits
from dit_train.checkpoint import listing
from dit_train.checkpoint.manifest import RunState
from dit_train.checkpoint.saving import Saver
from dit_train.checkpoint.writing import Retention
from dit_train.diffusion.objectives import velocity_loss
from dit_train.parallel import roll_call
from dit_train.parallel.mesh import World, joined
from dit_train.preflight import Plan
from dit_train.run import failure, faults, folder, metrics, schedule
from dit_train.run.batch import Batch, Prefetcher, share
from dit_train.run.evaluation import Evaluation
from dit_train.run.figures import Figures
from dit_train.run.metrics import LateRow, Stopwatch
from dit_train.run.peers import Peers
from dit_train.run.profiling import Profiler
from dit_train.run.setup import Run, determinism, hold_folder, prepare
from dit_train.run.stop import StopRequest
from dit_train.run.watchdog import Watchdog

_SAVE_SECONDS_UNMEASURED = 20.0
_SAVE_PATIENCE = 60.0  # seconds that a save may take before it counts as no progress


def train(plan: Plan, stop: StopRequest) -> int:
    """Train, or go on, to the last step; returns the exit code, on which all ranks agree.

    Raises:
        ConfigError: the run folder cannot be had; on all ranks.
    """
    config = plan.config
    try:
        with determinism(config.train.deterministic), joined(config.parallel) as world, hold_folder(plan, world):
            peers = [Peers(world.store, world.rank, world.size) for _ in range(2)]  # one a thread
            with Watchdog(config.run, stop, peers[1]) as watchdog:
                try:
                    return _run(plan, world, stop, watchdog, peers[0])
                except Exception as error:
                    raise failure.leave(config.run.folder, peers[0], error) from None
    except failure.Left as left:
        return left.code
    except roll_call.Absent as absent:
        failure.tell_absent(config.run.folder, absent)
        return exits.FAILED


def _run(plan: Plan, world: World, stop: StopRequest, watchdog: Watchdog, peers: Peers) -> int:
    """Everything that a rank does while it holds the run folder."""
    settings = plan.config.run
    file = Path(settings.folder) / folder.STOP_FILE
    stop.heed(file=file if world.is_main else None, time_limit=settings.time_limit)
    run = prepare(plan, world, watchdog.beat)
    with run.reporter:
        with saver_of(run) as saver:
            try:
                with Profiler(run) as profiler:
                    code, message = _train(run, stop, saver, profiler)
            except Exception as error:  # told before the saver waits for a save in flight
                raise failure.leave(settings.folder, peers, error) from None
        run.reporter.say(message)
    stop.consume()
    if world.is_main:
        folder.record(settings.folder, code, message)
    dist.barrier()  # the watchdog gives signs of life until all are done
    return exits.of_rank(code)


def _train(run: Run, stop: StopRequest, saver: Saver, profiler: Profiler) -> tuple[int, str]:
    """Steps to the end, or until a rank is asked to stop or no step is sound; exit code and what happened."""
    config, state = run.config, run.state
    steps = config.train.steps
    slots = share(config.train.batch, run.world.data_rank, run.world.data_size)
    batches = Prefetcher(config, run.data, slots)
    evaluation = Evaluation(run, stop)
    optimizer_time, figures = Stopwatch(run.world.device), Figures(run)
    late = LateRow(run.reporter.step, late=metrics.is_late(run.world.device))
    if not state.evaluated:  # an earlier start was stopped before what was due
        state.evaluated = evaluation.after_step()
        if not state.evaluated:
            return _stopped(run, stop)
        if run.world.is_main and run.plan.resume:
            listing.mark_evaluated(run.plan.resume)
    try:
        while state.step < steps:
            profiler.before_step()
            start = time.perf_counter()
            batch = batches.take(state.step).to(run.world.device)
            waited = time.perf_counter() - start
            loss, norm, stopping = _forward_backward(run, batch, stop)
            late.flush()  # the device has been waited for just now
            figures.before_step()
            lr = _set_learning_rate(run)
            verdict = faults.judge(state, config.faults, loss, norm)  # the same on all ranks
            if verdict == "sound":
                figures.before_update(norm)
                with optimizer_time.running():
                    run.optimizer.step()
                figures.after_update()
                run.ema.update(state.step)
            run.optimizer.zero_grad(set_to_none=True)
            state.step += 1
            row: dict[str, Any] = {
                "step": state.step,
                "images": state.step * config.train.batch,
                "loss": loss,
                "lr": lr,
                "grad_norm": norm,
                "wire_bytes": run.optimizer.wire_bytes if verdict == "sound" else 0,
                "data_wait_ms": 1e3 * waited,
                "skipped": state.skipped,
                "spikes": state.spikes,
                "unreadable": state.unreadable,
            }
            seconds = time.perf_counter() - start
            state.train_seconds += seconds
            state.save_seconds = saver.seconds or state.save_seconds
            stop.reserve = _reserve(state, seconds)
            row |= {"step_ms": 1e3 * seconds, "train_seconds": state.train_seconds, **figures.of_step(seconds, waited)}
            late.hold(row, lambda: {"optimizer_ms": optimizer_time.milliseconds(), **figures.of_update()})
            profiler.after_step()
            if verdict != "sound":
                _say_skipped(run, verdict, loss, norm)
            run.beat(f"step {state.step}")
            if verdict != "sound" or stopping or evaluation.is_due() or _saves(run):
                late.flush()
            if state.bad_in_a_row >= config.faults.stop_after:
                return _unsound(run, saver)
            saver.poll()
            state.evaluated = not stopping and evaluation.after_step()
            stopping = not state.evaluated
            if stopping or _saves(run):
                _save(run, saver)
            if stopping:
                return _stopped(run, stop)
        return exits.DONE, "done"
    finally:  # a row that is held is not asked for: after an error of the device that would raise another
        batches.close()


def _saves(run: Run) -> bool:
    """Whether a checkpoint is due after this step."""
    return run.state.step == run.config.train.steps or run.state.step % run.config.run.checkpoint_every == 0


def _stopped(run: Run, stop: StopRequest) -> tuple[int, str]:
    reason = faults.stop_reason(stop.reason)
    return exits.STOPPED, f"stopped after step {run.state.step} ({reason}); the same command goes on"


def _unsound(run: Run, saver: Saver) -> tuple[int, str]:
    """End a run that makes no more updates, with a checkpoint if the weights are of use."""
    state = run.state
    what = f"no update since step {state.step - state.bad_in_a_row}: {state.bad_in_a_row} in a row were left out"
    state.bad_in_a_row, state.evaluated = 0, True  # a resume gets as many steps again
    if faults.weights_are_finite(run.model):
        _save(run, saver)
        fix = "the weights are sound and saved; lower optimizer.lr, or raise faults.spike_sigmas if they were spikes"
    else:
        fix = "the weights are not finite and not saved; lower optimizer.lr and go on from the last checkpoint"
    return exits.FAILED, f"{what}; {fix}"


def _reserve(state: RunState, step_seconds: float) -> float:
    """Seconds to keep for three saves and a step."""
    return 3 * (state.save_seconds or _SAVE_SECONDS_UNMEASURED) + 2 * step_seconds


def _say_skipped(run: Run, verdict: faults.Verdict, loss: float, norm: float) -> None:
    count = run.state.skipped if verdict == "not finite" else run.state.spikes
    if count.bit_count() == 1:  # the 1st, 2nd, 4th, 8th …
        what = f"loss {loss:.4g} or gradient norm {norm:.4g} is {'a spike' if verdict == 'spike' else verdict}"
        run.reporter.say(f"step {run.state.step}: {what}; update left out, {count} so far")


def _forward_backward(run: Run, batch: Batch, stop: StopRequest) -> tuple[float, float, bool]:
    """Clipped gradients of the global batch's mean loss; (loss, gradient norm, stop asked), alike on all ranks."""
    train, steps = run.config.train, run.optimizer
    unsound = 0.0
    if steps.takes_previous:
        with steps.at_previous_weights():
            _accumulate(run, batch)
            unsound = 0 * faults.gradient_squares(run.model)  # not a number where the gradients are not finite
    loss_sum = _accumulate(run, batch)
    squares = faults.gradient_squares(run.model) + unsound
    part = 1 / run.world.tensor_size  # ranks of a tensor group have seen the same images
    total, norm, replaced, stopping = faults.agree(part * loss_sum, squares, part * batch.replaced, stop.asked)
    faults.clip(run.model, train.clip_norm, norm, steps.previous_gradients())
    run.state.unreadable += replaced
    return total / train.batch, norm, stopping


def _accumulate(run: Run, batch: Batch) -> torch.Tensor:
    """Forward and backward of this rank's micro-batches; the sum of their losses."""
    size = len(batch.t)
    micro_batches = list(batch.split(run.config.train.micro_batch or size))
    loss_sum = torch.zeros((), device=run.world.device)
    for i, part in enumerate(micro_batches):
        last = i == len(micro_batches) - 1
        run.model.set_requires_gradient_sync(last or run.config.parallel.sync_every_micro_batch)
        run.model.set_requires_all_reduce(last)  # over replicas once, of what the shards have added up
        losses = velocity_loss(run.model(part.x_t, part.t, part.labels), part.target)
        (losses.sum() / size).backward()  # FSDP2 averages over data ranks, whose shares are equal
        loss_sum += losses.detach().sum()
    return loss_sum


def _set_learning_rate(run: Run) -> float:
    """Give each group its peak times the schedule's factor; returns the first group's."""
    factor = schedule.factor(run.config.schedule, run.state.step, run.config.train.steps)
    for group, peak in zip(run.optimizer.param_groups, run.peak_lrs, strict=True):
        group["lr"] = peak * factor
    return run.optimizer.param_groups[0]["lr"]


def _save(run: Run, saver: Saver) -> None:
    """Write a checkpoint, or begin to; the watchdog is told that it may take longer than a step."""
    patience = max(_SAVE_PATIENCE, 3 * run.state.save_seconds)
    run.beat(f"step {run.state.step}", patience=patience)
    saver.save(run.state)
    run.beat(f"the save of step {run.state.step}", patience=patience if saver.busy else 0.0)


def saver_of(run: Run) -> Saver:
    """What writes a run's checkpoints, as its config has it; collective."""
    settings = run.config.run
    return Saver(
        settings.folder,
        run.model,
        run.ema,
        run.optimizer,
        fixed=run.plan.fixed,
        retention=Retention(settings.keep_checkpoints, settings.keep_every),
        background=settings.async_checkpoint,
        say=run.reporter.say,
    )
