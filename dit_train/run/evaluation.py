"""What is looked at now and then: held-out losses, scores against held-out images, sample grids."""

from __future__ import annotations

import functools
from typing import Any

import torch

import eval.score
from dit_train import preflight
from dit_train.run import faults, references, sampling
from dit_train.run.setup import Run
from dit_train.run.stop import StopRequest
from dit_train.run.validation import HeldOut
from eval import extractors


class Stopped(Exception):
    """A rank was asked to stop in the middle of a score, which is left for the next start."""


class Evaluation:
    """Looks at a run at the steps that its config names; never touches the training stream."""

    def __init__(self, run: Run, stop: StopRequest) -> None:
        self._run, self._stop = run, stop
        self._heldout = HeldOut(run.config, run.data, run.world) if run.config.run.validate_every else None
        self._scorer = Scorer(run) if run.config.score.every else None

    def after_step(self) -> bool:
        """Do what is due after the present step; every rank calls it. False if a rank was asked to stop meanwhile."""
        run, config = self._run, self._run.config
        validates, scores, draws = self._what_is_due()
        if validates:
            self._report(self._losses(self._heldout), "held-out")
        if scores:
            try:
                self._report(self._scorer.score(self._stop), "score")
            except Stopped:
                return False
        if draws:
            with run.ema.applied():
                picture = sampling.grid(config, run.data, run.model, run.world)
            run.reporter.picture(picture, run.state.step)
        return True

    def is_due(self) -> bool:
        """Whether there is anything to do after the present step."""
        return any(self._what_is_due())

    def _what_is_due(self) -> tuple[bool, bool, bool]:
        """Whether held-out losses, a score and a grid are."""
        config = self._run.config
        scores = self._scorer is not None and self._due(config.score.every)
        validates = self._heldout is not None and (scores or self._due(config.run.validate_every))
        can_draw = bool(config.sample.grid) and sampling.can_decode(config.data)
        return validates, scores, can_draw and self._due(config.run.sample_every or config.train.steps)

    def _due(self, every: int) -> bool:
        return self._run.state.step % every == 0 or self._run.state.step == self._run.config.train.steps

    def _losses(self, heldout: HeldOut) -> dict[str, Any]:
        beat = functools.partial(self._run.beat, "a batch of the held-out loss")
        loss = heldout.loss(self._run.model, beat)
        with self._run.ema.applied():
            averaged = heldout.loss(self._run.model, beat)
        return {
            "heldout_loss": averaged.mean,
            "heldout_loss_raw": loss.mean,
            "heldout_count": heldout.count,
            **{f"heldout_loss/{times}": value for times, value in averaged.by_time.items()},
        }

    def _report(self, found: dict[str, Any], kind: str) -> None:
        state = self._run.state
        row = {"step": state.step, "kind": kind, "train_seconds": state.train_seconds, **found}
        if kind == "score":
            text = f"{row['metric']} {row['value']:.2f} (floor {row['floor']:.2f})  " + (
                f"KID {row['kid']:.3f} ± {row['kid_standard_error']:.3f} (floor {row['floor_kid']:.3f})"
            )
            if row["not_finite"]:
                text += f"  ({row['not_finite']} samples are not finite)"
        else:
            text = f"held-out loss {row['heldout_loss']:.4f} averaged weights, {row['heldout_loss_raw']:.4f} raw"
        self._run.reporter.evaluation(row, text)


class Scorer:
    """Scores the averaged weights' samples against held-out images, at equal n and with their classes."""

    def __init__(self, run: Run) -> None:
        self._run = run
        settings = run.config.score
        self._extractor = extractors.load(
            settings.extractor or preflight.default_extractor(run.data.name),
            settings.weights,
            device=str(run.world.device),
        )
        self._batch = run.config.sample.batch
        self._reference = references.held_out(run.data, self._extractor, self._batch, settings.count)
        if len(self._reference) <= self._extractor.num_features:
            run.reporter.say(
                f"{len(self._reference)} images in {self._extractor.num_features} features: "
                "compare scores with the floor only"
            )

    def score(self, stop: StopRequest) -> dict[str, Any]:
        """The record of `eval.score` for the present averaged weights, with how it was sampled.

        Raises:
            Stopped: a rank was asked to stop; raised on all.
        """
        run, count = self._run, len(self._reference)
        labels = self._reference.labels
        images = sampling.Sampler(run.config, run.data, run.model, run.world.device, lambda chosen: labels[chosen])
        run.reporter.say(f"sampling and scoring {count} images")
        countdown = run.reporter.countdown("sampling")

        def progress(done: int, total: int) -> None:
            run.beat("a batch of the score")
            countdown(done, total)
            if done < total and faults.any_asked(stop.asked):
                raise Stopped

        with run.ema.applied():
            record = eval.score.score(
                images,
                torch.arange(count),
                self._reference,
                self._extractor,
                self._batch,
                run.world.data_group,
                progress=progress,
            )
        return {
            **record,
            "not_finite": images.count_broken(),
            "ranks": run.world.size,
            **sampling.provenance(run.config, run.state.compute_dtype, "reference", labels),
        }
