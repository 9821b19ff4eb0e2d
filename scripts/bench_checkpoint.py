"""Times checkpoints of a DiT, written between the steps and beside them, in turns within one run.

usage: torchrun --nproc-per-node N scripts/bench_checkpoint.py --json FILE

The training thread makes steps throughout. `blocked` is what a save takes of it: all of the save between the steps, the
copy into host memory alone beside them. Steps that a save in the background slows are counted separately: of those made
while it was written the mean is compared with the median of undisturbed ones.

FILE holds
  torch, device, ranks, threads, parameters, megabytes, rounds: what ran; megabytes of a checkpoint (10^6);
  sync, async (over the rounds, in seconds):
    blocked, low, high, whole: medians of what the training thread waits and of a whole save; quartiles of the first;
  blocked_ratio: the median over rounds of async over sync, which follow each other within a round;
  step, step_beside, slowdown: seconds of an undisturbed step and of one beside a save, and their ratio;
  lost_ratio: what a save in the background costs in all (blocked, and the delay of steps) over one between them;
  sha256_gbps: what one core hashes, 10^9 bytes a second.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import optimizers
from dit_train.checkpoint import files, listing
from dit_train.checkpoint.manifest import RunState
from dit_train.checkpoint.saving import Saver
from dit_train.checkpoint.writing import Retention
from dit_train.command_line import Parser, new_file
from dit_train.config import ModelConfig, ParallelConfig
from dit_train.data.sources import Summary
from dit_train.parallel import shard
from dit_train.parallel.mesh import World, joined
from dit_train.run.ema import EMA


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=new_file, required=True, metavar="FILE", help="where all numbers go")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured (default: one beside FILE)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where the model lies")
    parser.add_argument("--rounds", type=int, default=5, help="saves of each kind (default 5)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model: whether it runs, not how fast")
    chosen = parser.parse_args(arguments)
    if chosen.rounds < 2:
        parser.error(f"--rounds is {chosen.rounds} but has to be at least 2")
    return chosen


class Training:
    """A DiT of 100 million parameters that makes steps on noise."""

    def __init__(self, world: World, smoke: bool) -> None:
        size = ModelConfig(width=64, depth=2, heads=2) if smoke else ModelConfig(width=768, depth=9, heads=12)
        images = Summary(channels=4, image_size=8, num_classes=10, train_count=100, heldout_count=10)
        self.model = shard.build(size, ParallelConfig(), images, world, torch.float32, seed=0)
        self.optimizer = optimizers.AdamW(optimizers.param_groups(self.model), lr=1e-4)
        self.ema = EMA(self.model, 0.999)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.x = torch.randn((2, 4, 8, 8), generator=generator).to(world.device)
        self.t = torch.rand(2, generator=generator).to(world.device)
        self.labels = torch.tensor([1, 2], device=world.device)
        self.made = 0

    def step(self) -> float:
        """One step; its seconds."""
        start = time.perf_counter()
        self.model(self.x, self.t, self.labels).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ema.update(self.made)
        self.made += 1
        _finished(self.x.device)
        return time.perf_counter() - start

    def saver(self, run: Path, background: bool) -> Saver:
        """As a run has it."""
        parts = (self.model, self.ema, self.optimizer)
        return Saver(run, *parts, fixed={}, retention=Retention(1), background=background, say=_refuse_failures)


def _refuse_failures(line: str) -> None:
    if "could not be saved" in line:
        raise SystemExit(line)


def _finished(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(training: Training, run: Path, rounds: int) -> dict[str, list[Any]]:
    """Seconds of every save and step, after a first save of each kind, which allocates and is not counted."""
    found: dict[str, list[Any]] = {key: [] for key in ("sync", "sync_whole", "async", "async_whole", "step", "beside")}
    with training.saver(run / "sync", False) as between, training.saver(run / "async", True) as beside:
        for counted in [False] + [True] * rounds:
            steps = [training.step() for _ in range(3)]
            blocked = _timed(lambda: between.save(RunState(step=training.made)))
            seconds, whole, slow = _save_beside(training, beside)
            if counted:
                found["step"] += steps
                found["sync"].append(blocked)
                found["sync_whole"].append(blocked)
                found["async"].append(seconds)
                found["async_whole"].append(whole)
                found["beside"].append(slow)
    return found


def _save_beside(training: Training, saver: Saver) -> tuple[float, float, list[float]]:
    """Seconds blocked, seconds until it is committed, and those of the steps made meanwhile."""
    start, slow = time.perf_counter(), []
    blocked = _timed(lambda: saver.save(RunState(step=training.made)))
    writing = torch.ones(1)
    while writing.item():  # all ranks make as many steps
        slow.append(training.step())
        writing.fill_(saver.busy)
        dist.all_reduce(writing)
    whole = time.perf_counter() - start
    saver.finish()
    return blocked, whole, slow


def _timed(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def summary(found: dict[str, list[Any]]) -> dict[str, Any]:
    """The numbers of FILE that are measured."""
    step = statistics.median(found["step"])
    beside = [statistics.mean(steps) for steps in found["beside"]]
    pairs = list(zip(found["async"], found["sync"], strict=True))
    delays = [sum(steps) - step * len(steps) for steps in found["beside"]]
    lost = [(a + delay) / s for (a, s), delay in zip(pairs, delays, strict=True)]
    return {
        **{
            kind: {
                "blocked": statistics.median(found[kind]),
                "low": statistics.quantiles(found[kind], n=4)[0],
                "high": statistics.quantiles(found[kind], n=4)[2],
                "whole": statistics.median(found[f"{kind}_whole"]),
            }
            for kind in ("sync", "async")
        },
        "blocked_ratio": statistics.median(a / s for a, s in pairs),
        "step": step,
        "step_beside": statistics.median(beside),
        "slowdown": statistics.median(beside) / step,
        "lost_ratio": statistics.median(lost),
        "sha256_gbps": _hashing(),
    }


def _hashing() -> float:
    with tempfile.NamedTemporaryFile() as file:
        file.write(os.urandom(1 << 26))
        file.flush()
        return (1 << 26) / 1e9 / min(_timed(lambda: files.sha256(Path(file.name))) for _ in range(5))


def main() -> int:
    """Measure and write; 0."""
    chosen = parse()
    with joined(ParallelConfig(device=chosen.device)) as world:
        training = Training(world, chosen.smoke)
        run = chosen.folder or chosen.json.absolute().with_suffix(".checkpoints")
        found = measure(training, run, chosen.rounds)
        saved = listing.find_latest(run / "sync")
        dist.barrier()
        if world.is_main:
            result = {
                "torch": torch.__version__,
                "device": torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu",
                "ranks": world.size,
                "threads": torch.get_num_threads(),
                "parameters": sum(parameter.numel() for parameter in training.model.parameters()),
                "megabytes": saved.bytes / 1e6 if saved else 0.0,
                "rounds": chosen.rounds,
                **summary(found),
            }
            chosen.json.write_text(json.dumps(result, indent=1) + "\n")
            shutil.rmtree(run / "sync")
            shutil.rmtree(run / "async")
            beside, between = result["async"]["blocked"], result["sync"]["blocked"]
            print(
                f"a save holds up the steps for {beside:.2f} s beside them, {between:.2f} s between them (ratio "
                f"{result['blocked_ratio']:.3f}); steps beside one take {result['slowdown']:.2f} x as long; lost in "
                f"all: {result['lost_ratio']:.2f} x"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
