"""The training loop: batch → loss → gradients → clip → optimizer → EMA → metrics, and what is due now and then."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from dit_train import exits
from dit_train.config import ConfigError
from dit_train.diffusion.objectives import velocity_loss
from dit_train.parallel.mesh import joined
from dit_train.preflight import Plan
from dit_train.run import checkpoint, faults, schedule
from dit_train.run.batch import Batch, Prefetcher, share
from dit_train.run.evaluation import Evaluation
from dit_train.run.faults import StopRequest
from dit_train.run.metrics import Stopwatch
from dit_train.run.setup import Run, prepare


def train(plan: Plan) -> int:
    """Train, or go on, to the last step; returns the exit code, on which all ranks agree unless one met bad input."""
    folder = plan.config.run.folder
    try:
        with joined(plan.config.parallel) as world, StopRequest() as stop:
            run = prepare(plan, world)
            finished = _train(run, stop)
            code = exits.DONE if finished else exits.STOPPED
            message = "done" if finished else f"stopped after step {run.state.step}; the same command goes on"
            run.reporter.close(message)
            if world.is_main:
                exits.record(folder, code, message)
            return exits.of_rank(code)
    except ConfigError as error:
        # met by this rank alone, for example an image that cannot be read: torchrun ends the others
        exits.record(folder, exits.BAD_INPUT, str(error))
        print(f"dit_train: {error}", file=sys.stderr, flush=True)
        return exits.BAD_INPUT
    except RuntimeError:
        if exits.recorded(folder) == exits.BAD_INPUT:
            return exits.BAD_INPUT  # a peer has left with bad input and said so; the broken collective is its echo
        raise


def _train(run: Run, stop: StopRequest) -> bool:
    """Steps to the end, or until a rank is asked to stop; whether the end was reached."""
    config, state = run.config, run.state
    steps = config.train.steps
    batches = Prefetcher(config, run.data, share(config.train.batch, run.world.rank, run.world.size))
    evaluation = Evaluation(run)
    optimizer_time = Stopwatch(run.world.device)
    try:
        while state.step < steps:
            start = time.perf_counter()
            batch = batches.take(state.step).to(run.world.device)
            waited = time.perf_counter() - start
            loss, norm, stopping = _forward_backward(run, batch, stop)
            lr = _set_learning_rate(run)
            if math.isfinite(loss) and math.isfinite(norm):
                with optimizer_time.running():
                    run.optimizer.step()
                run.ema.update()
            else:
                state.skipped += 1  # all ranks see the same two numbers, so all skip
            run.optimizer.zero_grad(set_to_none=True)
            state.step += 1
            row: dict[str, Any] = {
                "step": state.step,
                "images": state.step * config.train.batch,
                "loss": loss,
                "lr": lr,
                "grad_norm": norm,
                "optimizer_ms": optimizer_time.milliseconds(),
                "wire_bytes": run.optimizer.wire_bytes,
                "data_wait_ms": 1e3 * waited,
                "skipped": state.skipped,
            }
            seconds = time.perf_counter() - start
            state.train_seconds += seconds
            run.reporter.step({**row, "step_ms": 1e3 * seconds, "train_seconds": state.train_seconds})
            evaluation.after_step()
            if stopping or state.step == steps or state.step % config.run.checkpoint_every == 0:
                save(run)
            if stopping and state.step < steps:
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
        losses = velocity_loss(run.model(part.x_t, part.t, part.labels), part.target)
        (losses.sum() / size).backward()  # FSDP2 averages over ranks, whose shares are equal
        loss_sum += losses.detach().sum()
    norm = faults.gradient_norm(run.model)
    total, stopping = faults.agree(loss_sum, stop.asked)
    if train.clip_norm is not None:
        faults.clip(run.model, train.clip_norm, norm)
    return total / train.batch, norm.item(), stopping


def _set_learning_rate(run: Run) -> float:
    """Give each group its peak times the schedule's factor; returns the first group's."""
    factor = schedule.factor(run.config.schedule, run.state.step, run.config.train.steps)
    for group, peak in zip(run.optimizer.param_groups, run.peak_lrs, strict=True):
        group["lr"] = peak * factor
    return run.optimizer.param_groups[0]["lr"]


def save(run: Run) -> None:
    """Write a checkpoint and say so."""
    start = time.perf_counter()
    folder = checkpoint.save(
        run.config.run.folder,
        run.model,
        run.ema,
        run.optimizer,
        run.state,
        fixed=run.plan.fixed,
        keep=run.config.run.keep_checkpoints,
    )
    dist.barrier()
    run.reporter.say(f"saved {folder} in {time.perf_counter() - start:.1f} s")
