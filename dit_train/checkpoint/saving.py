"""When checkpoints are written: one at a time, between steps or, in the background, beside them.

In the background the tensors are copied into host memory, and a thread with a gloo group of its own writes the copy
while training goes on; its messages never meet those of the training.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from dit_train.checkpoint import contents, listing
from dit_train.checkpoint.agreement import on_main
from dit_train.checkpoint.manifest import Manifest, RunState
from dit_train.checkpoint.snapshot import Snapshot
from dit_train.checkpoint.writing import Outcome, Retention, write
from dit_train.config import ConfigError
from dit_train.run.ema import EMA

_LONGEST_WRITE = timedelta(hours=2)
"""How long a rank waits for the slowest one's disk; one that has died is noticed at once."""
_SECONDS_AFTER_AN_ERROR = 15


class Saver:
    """Writes the checkpoints of a run; every rank makes one and calls the same methods at the same steps.

    A save that fails is said in one line and leaves the checkpoints before it as they are; the run goes on and tries
    again when the next is due. Only where the last one of a start fails does leaving the context raise.
    """

    def __init__(
        self,
        run: str | Path,
        model: nn.Module,
        ema: EMA,
        optimizer: Optimizer,
        *,
        fixed: dict[str, Any],
        retention: Retention,
        background: bool,
        say: Callable[[str], None],
    ) -> None:
        """Make the group that ranks agree over; collective.

        Args:
            run: the run folder.
            model, ema, optimizer: what is saved.
            fixed: settings that a resume may not change.
            retention: which checkpoints stay.
            background: write beside the steps, from a copy in host memory, or between them.
            say: takes a line for a person.

        Raises:
            ConfigError: no host memory for the copy.
        """
        self._run, self._parts, self._fixed, self._retention = Path(run), (model, ema, optimizer), fixed, retention
        self._say = say
        self._group = dist.new_group(backend="gloo", timeout=_LONGEST_WRITE)
        # there from the start, so that steps without a checkpoint are told from checkpoints that were taken away
        on_main(lambda: listing.folder_of(run).mkdir(parents=True, exist_ok=True), self._group)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if background else None
        self.snapshot = Snapshot(contents.tensors(model, ema, optimizer) if background else {})
        self._flight: Future[Outcome] | None = None
        self.seconds = 0.0
        """What the last save took, from its beginning to its commit; 0 before there was one."""
        self._waited = 0.0
        self._problem: str | None = None

    def save(self, state: RunState) -> None:
        """Write a checkpoint of the present step, or begin to, once the one before is done. Collective."""
        self.finish()
        start = time.perf_counter()
        model, ema, optimizer = self._parts
        tensors = contents.tensors(model, ema, optimizer)
        about = Manifest(replace(state), self._fixed, [group["step"] for group in optimizer.param_groups], {})
        if self._pool is None:
            self._tell(write(self._run, tensors, None, about, self._retention, self._group))
            return
        self.snapshot.take(tensors)

        def from_snapshot() -> Outcome:
            self.snapshot.wait()
            return write(self._run, tensors, self.snapshot.host, about, self._retention, self._group)

        self._flight = self._pool.submit(from_snapshot)
        self._waited = time.perf_counter() - start

    @property
    def busy(self) -> bool:
        """Whether a save in the background is being written on this rank."""
        return self._flight is not None and not self._flight.done()

    def poll(self) -> None:
        """Say how a save ended that has ended since; never waits."""
        if not self.busy:
            self.finish()

    def finish(self) -> None:
        """Wait for the save in flight, if there is one."""
        if self._flight is not None:
            start = time.perf_counter()
            flight, self._flight = self._flight, None
            outcome = flight.result()
            self._waited += time.perf_counter() - start
            self._tell(outcome)

    def _tell(self, outcome: Outcome) -> None:
        self._problem = outcome.problem
        if outcome.problem is not None:
            self._say(f"{outcome.folder.name} could not be saved ({outcome.problem}); the checkpoints before it stay")
            return
        self.seconds = outcome.seconds
        held = f", {self._waited:.2f} s of them between steps" if self._pool is not None else ""
        self._say(f"saved {outcome.folder} in {outcome.seconds:.1f} s{held}")
        if outcome.unpruned is not None:
            self._say(f"older checkpoints could not be removed: {outcome.unpruned}")

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Wait for the save in flight and commit it.

        Raises:
            ConfigError: the last save failed, and no error is on its way already; raised on all ranks.
        """
        if error is not None and self._flight is not None:
            wait([self._flight], _SECONDS_AFTER_AN_ERROR)  # its peers may be gone; what it tells is of no use now
        if self._pool is not None:
            self._pool.shutdown(wait=False)
        if error is not None:
            return
        self.finish()
        dist.barrier(self._group)  # gloo aborts now and then when a peer leaves while another still talks
        dist.destroy_process_group(self._group)
        if self._problem is not None:
            raise ConfigError(
                f"run.folder: the last checkpoint could not be saved ({self._problem}); the one before it stays; "
                "mend that and run the same command"
            )
