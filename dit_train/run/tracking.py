"""What a person sees of a run: a progress bar on a terminal, plain lines elsewhere, TensorBoard beside."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from dit_train import console
from dit_train.config import Config
from dit_train.run.metrics import JsonLines
from dit_train.run.sampling import save_picture


class Pace:
    """How fast steps were since it was last told: the mean over their time."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        """A finished step."""
        self._rows.append(row)

    def tell(self) -> str:
        """``1,234 images/s``, and ``MFU 41 %`` where it is known."""
        milliseconds = sum(row["step_ms"] for row in self._rows)
        rate, used = (
            sum((row[key] or 0.0) * row["step_ms"] for row in self._rows) / milliseconds
            for key in ("images_per_s", "mfu")
        )
        self._rows = []
        text = f"{rate:,.0f} images/s" if rate >= 10 else f"{rate:.2g} images/s"
        return f"{text}  MFU {100 * used:.0f} %" if used else text


class Progress:
    """Steps done, loss and time left, on the main rank."""

    def __init__(self, name: str, first: int, steps: int, every: int) -> None:
        self._name, self._first, self._steps, self._every = name, first, steps, every
        self._start = time.perf_counter()
        self._pace = Pace()
        self._bar = tqdm(total=steps, initial=first, desc=name, unit="step") if sys.stderr.isatty() else None

    def step(self, row: dict[str, Any]) -> None:
        """Show a finished step."""
        done = row["step"]
        self._pace.add(row)
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
            self._bar.set_postfix_str(f"loss {row['loss']:.4f}  {self._pace.tell()}", refresh=False)
        elif done % self._every == 0 or done == self._steps or done == self._first + 1:
            pace = (time.perf_counter() - self._start) / (done - self._first)
            left = clock(pace * (self._steps - done))
            console.out(
                f"{self._name}  step {done}/{self._steps}  loss {row['loss']:.4f}  lr {row['lr']:.2e}  "
                f"{self._pace.tell()}  left {left}"
            )

    def say(self, text: str) -> None:
        """A line between the steps."""
        if self._bar is not None:
            self._bar.write(text)
        else:
            console.out(f"{self._name}  {text}")

    def close(self) -> None:
        """Leave the bar."""
        if self._bar is not None:
            self._bar.close()


def clock(seconds: float) -> str:
    """``1:02:03`` or ``2:03``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def countdown(what: str, say: Callable[[str], None]) -> Callable[[int, int], None]:
    """A ``progress(done, total)`` that says how far `what` is and how long it will take, every ten seconds."""
    start = said = time.perf_counter()

    def progress(done: int, total: int) -> None:
        nonlocal said
        now = time.perf_counter()
        if now - said > 10 and done < total:
            said = now
            say(f"{what}: {done}/{total}, left {clock((now - start) / done * (total - done))}")

    return progress


class TensorBoard:
    """Scalars and pictures under RUN/tensorboard; does nothing when switched off."""

    def __init__(self, folder: Path, *, enabled: bool, purge_after: int) -> None:
        self._writer = None
        if enabled:
            from tensorboard.compat.proto.summary_pb2 import Summary  # slow to import, as the next
            from torch.utils.tensorboard import SummaryWriter

            self._summary = Summary
            self._writer = SummaryWriter(folder, purge_step=purge_after + 1)

    def scalars(self, row: dict[str, Any]) -> None:
        """Every number of a row, in one event, which costs a tenth of one for each."""
        if self._writer is not None:
            numbers = {k: value for k, value in row.items() if k != "step" and isinstance(value, int | float)}
            values = [self._summary.Value(tag=key, simple_value=value) for key, value in numbers.items()]
            self._writer.file_writer.add_summary(self._summary(value=values), row["step"])

    def image(self, name: str, picture: Any, step: int) -> None:
        """A uint8 CHW picture."""
        if self._writer is not None:
            self._writer.add_image(name, picture, step)

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()


class Reporter:
    """Everything that the main rank writes about a run; on other ranks it does nothing."""

    def __init__(self, config: Config, first_step: int, *, evaluated: bool, enabled: bool) -> None:
        """Open the files for going on after `first_step`: later lines of an earlier start are dropped.

        So are that step's losses and scores if they are not all there (`evaluated`) and will be taken again.
        """
        self.enabled = enabled
        self._failed: dict[str, int] = {}
        if not enabled:
            return
        self.folder = Path(config.run.folder)
        self._metrics = JsonLines(self.folder / "metrics.jsonl", keep_through=first_step)
        self._scores = JsonLines(self.folder / "scores.jsonl", keep_through=first_step - (not evaluated))
        self._board = TensorBoard(self.folder / "tensorboard", enabled=config.run.tensorboard, purge_after=first_step)
        self._progress = Progress(self.folder.name, first_step, config.train.steps, config.run.log_every)

    def step(self, row: dict[str, Any]) -> None:
        """A finished step, into metrics.jsonl, TensorBoard and onto the terminal."""
        if self.enabled:
            with self._spared("metrics.jsonl"):
                self._metrics.write(row)
            with self._spared("tensorboard/"):
                self._board.scalars(row)
            with self._spared("the terminal"):
                self._progress.step(row)

    def evaluation(self, row: dict[str, Any], text: str) -> None:
        """A held-out loss or a score, into scores.jsonl, TensorBoard and onto the terminal."""
        if self.enabled:
            with self._spared("scores.jsonl"):
                self._scores.write(row)
            with self._spared("tensorboard/"):
                self._board.scalars(row)
            self.say(text)

    def picture(self, picture: Tensor, step: int) -> None:
        """A sample grid, uint8 [C, H, W], into samples/ and TensorBoard."""
        if self.enabled:
            path = self.folder / "samples" / f"step_{step:07d}.png"
            with self._spared("samples/"):
                save_picture(picture, path)
                self.say(f"samples in {path}")
            with self._spared("tensorboard/"):
                self._board.image("samples", picture, step)

    @contextmanager
    def _spared(self, what: str) -> Iterator[None]:
        """A disk that is full costs what cannot be written, not the run; said at the 1st, 2nd, 4th, 8th time."""
        try:
            yield
        except OSError as error:
            self._failed[what] = count = self._failed.get(what, 0) + 1
            if isinstance(error, BrokenPipeError) and what == "the terminal":
                raise
            if count.bit_count() == 1:
                with suppress(OSError):  # the log itself may lie on that disk
                    console.err(f"{what} could not be written ({error}); the run goes on")

    def countdown(self, what: str) -> Callable[[int, int], None]:
        """See `countdown`."""
        return countdown(what, self.say)

    def say(self, text: str) -> None:
        """A line for a person."""
        if self.enabled:
            with self._spared("the terminal"):
                self._progress.say(text)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        if self.enabled:
            self._progress.close()
            self._metrics.close()
            self._scores.close()
            with self._spared("tensorboard/"):
                self._board.close()
