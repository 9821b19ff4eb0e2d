"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from dit_train.config import ScheduleConfig


def factor(config: ScheduleConfig, step: int, steps: int) -> float:
    """What the peak learning rate is multiplied by in step `step` (0-based) of `steps`.

    Linear from 1/warmup to 1 over the warm-up, then constant or a half cosine to `final_fraction` at the last step.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.kind == "constant":
        return 1.0
    progress = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.final_fraction + (1 - config.final_fraction) * cosine
