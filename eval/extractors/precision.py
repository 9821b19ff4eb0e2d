"""Full fp32 for a while: the trainer's speed settings must not reach a network whose features are compared."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def exact(device: torch.device) -> Iterator[None]:
    """Autocast, gradients, TF32, bf16 kernels and cuDNN's autotuning off inside; all settings restored afterwards.

    Features under bf16 autocast shift a Fréchet distance by as much as a real difference between models.
    """
    backends = torch.backends
    # Read and written through `fp32_precision` alone: torch refuses to answer a mixture of it and `allow_tf32`.
    precision = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
    saved = [backend.fp32_precision for backend in precision]
    benchmark, deterministic = backends.cudnn.benchmark, backends.cudnn.deterministic
    try:
        for backend in precision:
            backend.fp32_precision = "ieee"
        backends.cudnn.benchmark, backends.cudnn.deterministic = False, True
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        for backend, value in zip(precision, saved, strict=True):
            backend.fp32_precision = value
        backends.cudnn.benchmark, backends.cudnn.deterministic = benchmark, deterministic
