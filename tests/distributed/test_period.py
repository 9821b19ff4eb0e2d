"""``optimizer.period: auto`` on two real ranks: what a slow link costs, and that nothing of the measurement is left.

The clock of the first is not the computer's: it moves on by a millisecond at each look, and by what a link of some
speed takes for the bytes that a collective sends. So times are exact, and do not depend on how busy the computer is.
"""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dit_train import overlays, preflight
from dit_train.data import sources
from dit_train.parallel.mesh import joined
from dit_train.planning.period import StepTimes, choose
from dit_train.run import loop, period
from dit_train.run.stop import StopRequest
from tests.distributed.ranks import run

TINY = (
    "--model.width 32 --model.depth 1 --model.heads 2 --train.batch 8 --train.steps 6 --train.compute_dtype fp32 "
    "--sample.grid 0 --run.validate_every 0 --run.tensorboard false --parallel.device cpu "
    "--schedule.warmup_steps 1 --optimizer.name periodic_row_muon --optimizer.lr 0.02"
).split()
AUTO = ("--optimizer.period", "auto")
EXCHANGES = (0.25e-3, 2.02e-3, 1.0)
"""Seconds that an exchange takes, from a fast link to a slow one."""


class Clock:
    """Stands still but for looks at it and links."""

    def __init__(self, monkeypatch, seconds_per_byte):
        self.now, self.sent = 0.0, 0
        monkeypatch.setattr(period, "_now", self)
        for name in ("all_to_all_single", "all_gather_single", "reduce_scatter_single"):
            monkeypatch.setattr(dist, name, self.linked(getattr(dist, name), seconds_per_byte, "all_to_all" in name))

    def __call__(self):
        self.now += 1e-3
        return self.now

    def linked(self, real, seconds_per_byte, exchange):
        def call(output, input, *args, **kwargs):
            self.now += max(output.nbytes, input.nbytes) * seconds_per_byte
            self.sent += input.nbytes if exchange else 0
            return real(output, input, *args, **kwargs)

        return call


def on_a_link(seconds_per_byte) -> StepTimes:
    config = overlays.read([], [*TINY, *AUTO])
    with pytest.MonkeyPatch.context() as patched, joined(config.parallel) as world:
        Clock(patched, seconds_per_byte)
        return period.measure(config, sources.load(config.data, "cpu"), world, torch.float32)


def train(folder, *arguments) -> float:
    """Train; the last loss."""
    dist.barrier()
    config = overlays.read([], [*TINY, "--run.folder", str(folder), *arguments])
    plan = preflight.check(config, dist.get_world_size())
    dist.barrier()
    assert loop.train(plan, StopRequest()) == 0
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["loss"]


def measured_and_trained(folder: Path):
    """Times on each link; then the losses of a run with auto and of one with the same period given."""
    a_byte = on_a_link(1.0)
    exchanged = round(a_byte.refresh - a_byte.between)
    found = [on_a_link(seconds / exchanged) for seconds in EXCHANGES]
    real = period.measure
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(period, "measure", lambda *about: (real(*about), StepTimes(9, 9, 1, 1, 3))[1])
        losses = [train(folder / "auto", *AUTO)]
    losses.append(train(folder / "given", "--optimizer.period", "4"))
    return exchanged, found, losses


def test_a_slow_link_lengthens_refreshes_and_periods_and_nothing_of_a_measurement_is_left(tmp_path):
    by_rank = run(measured_and_trained, 2, tmp_path)
    assert by_rank[0] == by_rank[1]  # all agree
    exchanged, found, (auto, given) = by_rank[0]
    assert exchanged > 0
    for seconds, times in zip(EXCHANGES, found, strict=True):
        assert (times.computing, times.adamw, times.between) == pytest.approx((1e-3, 1e-3, 1e-3))
        assert times.refresh == pytest.approx(1e-3 + seconds)
        # of AdamW's step, 2 ms without links, 5 % are 0.1 ms
        expected = max(1, math.ceil(seconds / 0.1e-3 - 1e-9))
        assert choose(times, 0.05) == (min(expected, 64), expected <= 64)
    waiting = [times.waiting for times in found]
    assert waiting == sorted(waiting) and waiting[-1] > 1
    assert auto == given
    stored = [(tmp_path / name / "checkpoints/step_0000006").glob("*.distcp") for name in ("auto", "given")]
    ours, theirs = ([file.read_bytes() for file in sorted(files)] for files in stored)
    assert ours == theirs and len(ours) == 2
