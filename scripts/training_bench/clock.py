"""When a device has done what it was given."""

from __future__ import annotations

import time

import torch


def now(device: torch.device) -> float:
    """Seconds of a clock that runs on, once the device has finished what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
