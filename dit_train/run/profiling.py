"""torch.profiler on demand: a Chrome trace a rank of a few steps, asked for by the config or by a file RUN/profile."""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from dit_train import console
from dit_train.config import MOST_PROFILED_STEPS
from dit_train.run import folder
from dit_train.run.setup import Run

_STEPS = 3
"""Recorded where the file does not say how many."""

_SECONDS_BETWEEN_LOOKS = 1.0  # at the file, which may lie on a slow shared disk
_PATIENCE = 120.0  # seconds that writing a trace may take before it counts as no progress


class Profiler:
    """Records steps into RUN/profiles/; at most one stretch at a time, of at most `MOST_PROFILED_STEPS`.

    The step before is recorded too where there is one, as a warm-up that the trace leaves out.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._folder = run, Path(run.config.run.folder)
        self._looked = 0.0
        self._profile: profile | None = None
        self._steps = range(0)  # that are being recorded
        wanted = run.config.run.profile
        self._planned = [] if wanted is None else [range(wanted[0], wanted[0] + wanted[1])]

    def before_step(self) -> None:
        """Begin to record if it is time."""
        step = self._run.state.step + 1
        steps = next((planned for planned in self._planned if step in (planned.start - 1, planned.start)), None)
        if steps is None or self._profile is not None:
            return
        self._planned.remove(steps)
        self._steps = steps
        activities = [ProfilerActivity.CPU]
        if self._run.world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no warm-up, where it is the first step
            phases = schedule(wait=0, warmup=steps.start - step, active=len(steps), repeat=1)
        self._profile = profile(activities=activities, schedule=phases, on_trace_ready=self._write)
        self._profile.start()

    def after_step(self) -> None:
        """End, and write the trace, if it is time; look now and then whether somebody asks for one. Collective."""
        step = self._run.state.step
        if self._profile is not None and step in (self._steps[-1], self._run.config.train.steps):
            self._end()
        elif self._profile is not None:
            self._profile.step()
        if self._profile is None and step % self._run.config.run.log_every == 0:  # else a wish would go by unheard
            count = torch.tensor(self._asked())
            dist.all_reduce(count)
            if count:
                self._planned.append(range(step + 2, step + 2 + int(count)))

    def _asked(self) -> int:
        """How many steps the file asks for, which is removed; 0 for none, and on all but the main rank."""
        if not self._run.world.is_main or time.monotonic() - self._looked < _SECONDS_BETWEEN_LOOKS:
            return 0
        self._looked = time.monotonic()
        file = self._folder / folder.PROFILE_FILE
        try:
            text = file.read_text(errors="replace").strip()
            file.unlink()
        except OSError:  # none is there
            return 0
        count = int(text) if text.isdecimal() and len(text) < 4 else 0 if text else _STEPS
        if 1 <= count <= MOST_PROFILED_STEPS:
            return count
        self._run.reporter.say(
            f"{file}: {text[:20]!r} is no number of steps; leave it empty or write 1 to {MOST_PROFILED_STEPS} into it"
        )
        return 0

    def _end(self) -> None:
        self._profile.stop()
        self._profile = None

    def _write(self, recorded: profile) -> None:
        last = min(self._run.state.step, self._steps[-1])
        if last < self._steps.start:
            return
        where = self._folder / folder.PROFILES / f"steps_{self._steps.start:07d}-{last:07d}"
        self._run.beat(f"step {last}", patience=_PATIENCE)
        try:
            where.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(where / f"rank_{self._run.world.rank}.json.gz"))
        except (OSError, RuntimeError) as error:
            console.err(f"{where} could not be written ({error}); the run goes on")
        else:
            self._run.reporter.say(f"steps {self._steps.start} to {last} in {where}, for ui.perfetto.dev")

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self._profile is not None and kind is None:  # stopped amid it; after an error others may wait for this rank
            self._end()
