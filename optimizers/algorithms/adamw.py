"""AdamW: Adam with decoupled weight decay.

Kingma and Ba, arXiv 1412.6980; Loshchilov and Hutter, arXiv 1711.05101.

    w, g: weight and gradient of any shape      state: m, v, as w, fp32 (fp64 for fp64 weights)
    t: this step, from 1, kept in the group

    m ← β₁·m + (1−β₁)·g
    v ← β₂·v + (1−β₂)·g²
    w ← (1 − η·λ)·w − η · [m/(1−β₁ᵗ)] / [√(v/(1−β₂ᵗ)) + ε]

Elementwise: right under any sharding, without communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.adamw import adamw as fused_adamw

from ..engine.algorithm import MAX_IN_FLIGHT, Algorithm, register
from ..engine.driver import Driver
from ..engine.forms import ELEMENTS
from ..sharding.plan import BucketBytes


def adamw_(
    weights: list[Tensor], state: dict[str, list[Tensor]], grads: list[Tensor], group: Mapping[str, Any]
) -> None:
    """One step in place, of tensors of one dtype and device."""
    (beta1, beta2), t = group["betas"], group["step"] + 1
    m, v = state["exp_avg"], state["exp_avg_sq"]
    grads = [g.to(x.dtype) for g, x in zip(grads, m, strict=True)]
    lr, decay, eps = group["lr"], group["weight_decay"], group["eps"]
    if weights[0].dtype.itemsize < m[0].dtype.itemsize:
        # Rounded once, at the end: in 16 bit, decay and a small update would each be lost.
        wide = [w.to(m[0].dtype) for w in weights]
        adamw_(wide, state, grads, group)
        torch._foreach_copy_(weights, wide)
        return
    if weights[0].device.type in ("cpu", "cuda") and _fit_kernel(weights, m, v, grads):
        # torch's kernel does all that follows in one pass; it counts the steps itself, one tensor a weight.
        steps = list(torch.full((len(weights),), float(t - 1), device=weights[0].device).unbind())
        fused_adamw(
            weights, grads, m, v, [], steps, fused=True, amsgrad=False, maximize=False,
            beta1=beta1, beta2=beta2, lr=lr, weight_decay=decay, eps=eps,
        )  # fmt: skip
        return
    torch._foreach_lerp_(m, grads, 1 - beta1)
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, grads, grads, value=1 - beta2)
    denominators = torch._foreach_sqrt(v)
    torch._foreach_div_(denominators, (1 - beta2**t) ** 0.5)
    torch._foreach_add_(denominators, eps)
    updates = list(torch._foreach_div(m, denominators))
    torch._foreach_mul_(updates, lr / (1 - beta1**t))
    torch._foreach_mul_(weights, 1 - lr * decay)
    torch._foreach_sub_(weights, updates)


def _fit_kernel(*lists: list[Tensor]) -> bool:
    """Whether torch's kernel may be used: it walks over memory in one order for all, whatever their strides."""
    dtype = lists[0][0].dtype
    return all(x.dtype == dtype and x.is_contiguous() for tensors in lists for x in tensors)


ADAMW = register(
    Algorithm(
        name="adamw",
        options={"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8},
        elementwise=adamw_,
        state={"exp_avg": ELEMENTS, "exp_avg_sq": ELEMENTS},
    )
)


class AdamW(Driver):
    """AdamW (arXiv 1711.05101) for parameters of any shape.

    Args:
        params: parameters of any shape and sharding, or groups of them.
        lr: η ≥ 0, a float or a 0-d tensor.
        betas: (β₁, β₂), each in [0, 1).
        eps: ε ≥ 0, added to the square root.
        weight_decay: λ ≥ 0, decoupled.
        bucket_bytes: how much is updated at a time, shards of all ranks together; ``auto`` is 64 MiB of this rank's.
        max_in_flight: buckets in flight on a refresh, for groups of another algorithm.
        process_group: accepted as by the other classes, for groups of another algorithm.
        compile: for groups of another algorithm; AdamW is a kernel of torch's.

    Raises:
        ValueError: for options out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        bucket_bytes: BucketBytes = "auto",
        max_in_flight: int = MAX_IN_FLIGHT,
        process_group: ProcessGroup | None = None,
        compile: bool = False,
    ) -> None:
        options = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        super().__init__(params, ADAMW, options, bucket_bytes, max_in_flight, process_group, compile)
