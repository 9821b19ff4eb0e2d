"""Gradients of a job, checked before any of them is used."""

from __future__ import annotations

from torch import Tensor, strided
from torch.distributed.tensor import DTensor

from .jobs import Job


def local_gradients(job: Job) -> list[Tensor | None]:
    """This rank's part of every gradient, None where there is none. Call under ``no_grad``.

    Raises:
        ValueError: for a sparse gradient, or one placed differently from its parameter.
    """
    return [_local_gradient(p, label) for p, label in zip(job.params, job.labels, strict=True)]


def _local_gradient(p: Tensor, label: str) -> Tensor | None:
    grad = p.grad
    if grad is None:
        return None
    if isinstance(p, DTensor):
        alike = isinstance(grad, DTensor) and grad.placements == p.placements and grad.device_mesh == p.device_mesh
        if not alike:
            raise ValueError(
                f"the gradient of {label} is placed differently: {tuple(getattr(grad, 'placements', ()))}; "
                "redistribute it to the parameter's placements"
            )
        grad = grad.to_local()
    if grad.layout != strided:
        raise ValueError(f"{label}: a sparse gradient of shape {tuple(p.shape)} is not supported; use a dense one")
    return grad
