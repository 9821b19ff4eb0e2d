"""What is looked at now and then: held-out losses, scores against held-out images, sample grids."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import eval.score
from dit_train import preflight, rng
from dit_train.data.sources import Dataset, Source
from dit_train.run import faults, sampling
from dit_train.run.setup import Run
from dit_train.run.stop import StopRequest
from dit_train.run.validation import HeldOut
from eval import extractors
from eval.references import Reference

LARGEST_DEFAULT_COUNT = 10_000
"""Images scored where ``score.count`` is null and more are held out."""
FLOOR_DRAWS = 5
"""Draws of training images that the floor is the mean of, where they are few."""


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
        scoring = self._scorer is not None and self._due(config.score.every)
        if self._heldout is not None and (scoring or self._due(config.run.validate_every)):
            self._report(self._losses(self._heldout), "held-out")
        if scoring:
            try:
                self._report(self._scorer.score(self._stop), "score")
            except Stopped:
                return False
        if config.sample.grid and self._due(config.run.sample_every or config.train.steps):
            with run.ema.applied():
                picture = sampling.grid(config, run.data, run.model, run.world.device)
            run.reporter.picture(picture, run.state.step)
        return True

    def _due(self, every: int) -> bool:
        return self._run.state.step % every == 0 or self._run.state.step == self._run.config.train.steps

    def _losses(self, heldout: HeldOut) -> dict[str, Any]:
        loss = heldout.loss(self._run.model)
        with self._run.ema.applied():
            averaged = heldout.loss(self._run.model)
        return {"heldout_loss": averaged, "heldout_loss_raw": loss, "heldout_count": heldout.count}

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
    """Fréchet distance and KID of the averaged weights' samples against held-out images, at equal n."""

    def __init__(self, run: Run) -> None:
        self._run = run
        data, device = run.data, run.world.device
        settings = run.config.score
        self._extractor = extractors.load(
            settings.extractor or preflight.default_extractor(data.name), settings.weights, device=str(device)
        )
        self._batch = run.config.sample.batch
        self._count = settings.count or min(len(data.heldout), len(data.train), LARGEST_DEFAULT_COUNT)
        real = _draw(data.heldout, self._count, "score-heldout")
        self._reference = Reference.of(data.heldout.images(real), self._extractor, self._batch, f"{data.name} held out")
        self._labels = data.heldout.labels(real)
        if self._count <= self._extractor.num_features:
            run.reporter.say(
                f"{self._count} images in {self._extractor.num_features} features: compare scores with the floor only"
            )
        self._floor = self._floor_of(data)

    def score(self, stop: StopRequest) -> dict[str, Any]:
        """The record of `eval.score` for the present averaged weights, with the floor and how it was sampled.

        Raises:
            Stopped: a rank was asked to stop; raised on all.
        """
        run, settings = self._run, self._run.config.sample
        images = sampling.Sampler(
            run.config, run.data, run.model, run.world.device, lambda indices: self._labels[indices]
        )
        run.reporter.say(f"sampling and scoring {self._count} images")
        countdown = run.reporter.countdown("sampling")

        def progress(done: int, total: int) -> None:
            countdown(done, total)
            if done < total and faults.any_asked(stop.asked):
                raise Stopped

        with run.ema.applied():
            record = eval.score.score(
                images, torch.arange(self._count), self._reference, self._extractor, self._batch, progress=progress
            )
        broken = [images.broken] * run.world.size
        dist.all_gather_object(broken, images.broken)
        return {
            **record,
            **self._floor,
            "not_finite": len(set().union(*broken)),
            "ranks": run.world.size,
            "sampler": f"{settings.sampler}-{settings.steps}",
            "guidance": settings.guidance,
            "sample_seed": settings.seed,
            "labels": "of the reference images",
            "weights": f"ema {run.config.train.ema_decay}{' ramped' * run.config.train.ema_ramp}",
            "compute_dtype": run.state.compute_dtype,
        }

    def _floor_of(self, data: Dataset) -> dict[str, float]:
        """The mean score of several draws of training images: one draw of few hundred is off by a third.

        Their classes are those of the reference, as the samples' are: else class counts alone would set them apart.
        """
        draws = FLOOR_DRAWS if self._count <= 1000 else 1
        records = []
        for draw in range(draws):
            images = data.train.images(draw_like(self._labels, data.train, f"score-floor-{draw}"))
            records.append(eval.score.floor(images, self._reference, self._extractor, self._batch))
        return {
            "floor": statistics.fmean(record["value"] for record in records),
            "floor_kid": statistics.fmean(record["kid"] for record in records),
            "floor_draws": draws,
        }


def _draw(source: Source, count: int, purpose: str) -> np.ndarray:
    """`count` indices of a source, always the same, in rising order."""
    return np.sort(rng.stream(0, purpose).permutation(len(source))[:count])


def draw_like(labels: torch.Tensor, source: Source, purpose: str) -> np.ndarray:
    """As many indices of a source, with the same classes as far as it has them, always the same, in rising order.

    Args:
        labels: int64 [n], the classes to meet.
        source: at least n images.
        purpose: names the draw.
    """
    order = rng.stream(0, purpose).permutation(len(source))
    classes = source.labels(order).numpy()
    wanted = np.bincount(labels.numpy(), minlength=classes.max() + 1)
    chosen = [order[classes == label][:count] for label, count in enumerate(wanted)]
    picked = np.concatenate(chosen)
    spare = order[~np.isin(order, picked)]  # for classes of which there are too few
    return np.sort(np.concatenate([picked, spare[: len(labels) - len(picked)]]))
