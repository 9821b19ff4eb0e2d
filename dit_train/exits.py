"""Exit codes of a run, and what a rank tells torchrun."""

from __future__ import annotations

import os

DONE = 0
FAILED = 1
BAD_INPUT = 2
STOPPED = 85
"""Asked to stop; the same command goes on."""

LAUNCHED = "DIT_TRAIN_LAUNCHED"
"""Environment variable of ranks under ``launch``, which reads the code from the run folder."""


def of_rank(code: int) -> int:
    """What a rank returns to torchrun: asked to stop is no failure to report where `launch` reads the file."""
    return DONE if code == STOPPED and LAUNCHED in os.environ else code
