"""The training loop: batch → loss → gradients → clip → optimizer → EMA → metrics, and what is due now and then."""

from __future__ import annotations

import math
import os
import sys
import time
from typing import Any

import torch

from dit_train import exits
from dit_train.checkpoint import listing
from dit_train.checkpoint.saving import Saver
from dit_train.checkpoint.writing import Retention
from dit_train.config import ConfigError
from dit_train.diffusion.objectives import velocity_loss
from dit_train.parallel.mesh import joined
from dit_train.preflight import Plan
from dit_train.run import faults, folder, schedule
from dit_train.run.batch import Batch, Prefetcher, share
from dit_train.run.evaluation import Evaluation
from dit_train.run.metrics import Stopwatch
from dit_train.run.setup import Run, hold_folder, prepare
from dit_train.run.stop import StopRequest


def train(plan: Plan, stop: StopRequest) -> int:
    """Train, or go on, to the last step; returns the exit code, on which all ranks agree unless one met bad input."""
    try:
        with joined(plan.config.parallel) as world, hold_folder(plan, world):
            run = prepare(plan, world)
            with run.reporter, saver_of(run) as saver:
                finished = _train(run, stop, saver)
            code = exits.DONE if finished else exits.STOPPED
            message = "done" if finished else f"stopped after step {run.state.step}; the same command goes on"
            run.reporter.say(message)
            if world.is_main:
                folder.record(plan.config.run.folder, code, message)
            return exits.of_rank(code)
    except ConfigError as error:
        return _leave(plan.config.run.folder, error)
    except BrokenPipeError:
        raise  # whoever reads our output is gone; the folder is sound
    except OSError as error:  # no space, a disk that is gone, …
        return _leave(plan.config.run.folder, ConfigError(f"run.folder: {error}; mend it and run the same command"))
    except RuntimeError:
        if folder.recorded(plan.config.run.folder) == exits.BAD_INPUT:
            return exits.BAD_INPUT  # a peer has left with bad input and said so; the broken collective is its echo
        raise


def _leave(run_folder: str, error: ConfigError) -> int:
    """Bad input that this rank met after the start, for example an unreadable image: torchrun ends the others.

    Where all met it, one line is enough: whoever finds the code recorded keeps quiet.
    """
    for _ in range(30 if int(os.environ.get("RANK", 0)) else 0):
        if folder.recorded(run_folder) == exits.BAD_INPUT:
            break
        time.sleep(0.1)
    if folder.recorded(run_folder) != exits.BAD_INPUT:
        folder.record(run_folder, exits.BAD_INPUT, str(error))
        print(f"dit_train: {error}", file=sys.stderr, flush=True)
    return exits.BAD_INPUT


def _train(run: Run, stop: StopRequest, saver: Saver) -> bool:
    """Steps to the end, or until a rank is asked to stop; whether the end was reached."""
    config, state = run.config, run.state
    steps = config.train.steps
    slots = share(config.train.batch, run.world.data_rank, run.world.data_size)
    batches = Prefetcher(config, run.data, slots)
    evaluation = Evaluation(run, stop)
    optimizer_time = Stopwatch(run.world.device)
    if not state.evaluated:  # an earlier start was stopped before what was due
        state.evaluated = evaluation.after_step()
        if not state.evaluated:
            return False
        if run.world.is_main and run.plan.resume:
            listing.mark_evaluated(run.plan.resume)
    try:
        while state.step < steps:
            start = time.perf_counter()
            batch = batches.take(state.step).to(run.world.device)
            waited = time.perf_counter() - start
            loss, norm, stopping = _forward_backward(run, batch, stop)
            lr = _set_learning_rate(run)
            sound = math.isfinite(loss) and math.isfinite(norm)  # the same two numbers on all ranks
            if sound:
                with optimizer_time.running():
                    run.optimizer.step()
                run.ema.update(state.step)
            run.optimizer.zero_grad(set_to_none=True)
            state.step += 1
            state.skipped += not sound
            row: dict[str, Any] = {
                "step": state.step,
                "images": state.step * config.train.batch,
                "loss": loss,
                "lr": lr,
                "grad_norm": norm,
                "optimizer_ms": optimizer_time.milliseconds(),
                "wire_bytes": run.optimizer.wire_bytes if sound else 0,
                "data_wait_ms": 1e3 * waited,
                "skipped": state.skipped,
            }
            seconds = time.perf_counter() - start
            state.train_seconds += seconds
            run.reporter.step({**row, "step_ms": 1e3 * seconds, "train_seconds": state.train_seconds})
            if not sound and state.skipped.bit_count() == 1:  # the 1st, 2nd, 4th, 8th …
                run.reporter.say(f"loss or gradient of step {state.step} not finite; {state.skipped} updates skipped")
            saver.poll()
            state.evaluated = not stopping and evaluation.after_step()
            stopping = not state.evaluated
            if stopping or state.step == steps or state.step % config.run.checkpoint_every == 0:
                saver.save(state)
            if stopping:
                return False
        return True
    finally:
        batches.close()


def _forward_backward(run: Run, batch: Batch, stop: StopRequest) -> tuple[float, float, bool]:
    """Clipped gradients of the global batch's mean loss; (loss, gradient norm, stop asked), alike on all ranks."""
    train, size = run.config.train, len(batch.t)
    micro_batches = list(batch.split(train.micro_batch or size))
    loss_sum = torch.zeros((), device=run.world.device)
    for i, part in enumerate(micro_batches):
        last = i == len(micro_batches) - 1
        run.model.set_requires_gradient_sync(last or run.config.parallel.sync_every_micro_batch)
        run.model.set_requires_all_reduce(last)  # over replicas once, of what the shards have added up
        losses = velocity_loss(run.model(part.x_t, part.t, part.labels), part.target)
        (losses.sum() / size).backward()  # FSDP2 averages over data ranks, whose shares are equal
        loss_sum += losses.detach().sum()
    norm = faults.gradient_norm(run.model)
    total, stopping = faults.agree(loss_sum / run.world.tensor_size, stop.asked)
    if train.clip_norm is not None:
        faults.clip(run.model, train.clip_norm, norm)
    return total / train.batch, norm.item(), stopping


def _set_learning_rate(run: Run) -> float:
    """Give each group its peak times the schedule's factor; returns the first group's."""
    factor = schedule.factor(run.config.schedule, run.state.step, run.config.train.steps)
    for group, peak in zip(run.optimizer.param_groups, run.peak_lrs, strict=True):
        group["lr"] = peak * factor
    return run.optimizer.param_groups[0]["lr"]


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
