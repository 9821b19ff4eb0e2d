"""Muon and AdamW with state of 8 bits an element.

8-bit Muon: arXiv 2509.23106. 8-bit optimizers, block-wise: arXiv 2110.02861 (bitsandbytes).

    W, G: m×n weight and gradient         state: M (Muon), m and v (AdamW) as W, 8 bits; scales in fp32, [m, ⌈n/2048⌉]

    M ← decode(M)                         engine/quantized_state.py: x = s·value(q), s = max |x| of a block
    one step of muon.py or adamw.py
    M ← encode(M)

Blocks are at most 2048 elements of one row, so that the result does not depend on how rows are divided over ranks; the
sources take blocks of the flattened local shard. Vectors and tensors of fewer than 4096 elements keep fp32. A v above 0
is never kept as 0, by which AdamW would divide.
``momentum_dtype`` does the same for every other matrix algorithm of this package.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Unpack

from torch import Tensor

from ..engine.algorithm import MATRIX_OPTIONS, Algorithm, register
from ..engine.driver import Driver
from ..engine.forms import Form
from ..engine.keywords import DriverOptions, MatrixOptions
from .adamw import ADAMW, adamw_

MUON_8BIT = register(Algorithm(name="muon_8bit", options={**MATRIX_OPTIONS, "momentum_dtype": "int8"}, period=1))
ADAMW_8BIT = register(
    Algorithm(
        name="adamw_8bit",
        options=ADAMW.options,
        elementwise=adamw_,
        state={"exp_avg": Form(code="dynamic8"), "exp_avg_sq": Form(code="dynamic8_unsigned")},
    )
)


class Muon8bit(Driver):
    """8-bit Muon (arXiv 2509.23106): Muon whose momentum takes about one byte an element.

    Args:
        params: weights [m, n], stacks [e, m, n], convolutions [out, in, …]; or groups of them.
        lr: η ≥ 0, a float or a 0-d tensor.
        weight_decay: λ ≥ 0, decoupled.
        momentum: μ in [0, 1).
        nesterov: whether U looks one step ahead.
        momentum_dtype: ``int8``, linear, or ``dynamic8``, with finer values near zero.
        options: see ``engine/keywords.py``.

    Raises:
        ValueError: for options out of range, parameters of fewer than two dimensions, unsupported placements.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        *,
        momentum_dtype: Literal["int8", "dynamic8"] = "int8",
        **options: Unpack[MatrixOptions],
    ) -> None:
        own = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        super().__init__(params, MUON_8BIT, {**own, "momentum_dtype": momentum_dtype, **options})


class AdamW8bit(Driver):
    """AdamW with dynamic 8-bit moments (arXiv 2110.02861), two bytes an element.

    Args:
        params: parameters of any shape and sharding, or groups of them.
        lr: η ≥ 0, a float or a 0-d tensor.
        betas: (β₁, β₂), each in [0, 1).
        eps: ε ≥ 0, added to the square root.
        weight_decay: λ ≥ 0, decoupled.
        options: ``DriverOptions`` of ``engine/keywords.py``.

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
        **options: Unpack[DriverOptions],
    ) -> None:
        super().__init__(
            params, ADAMW_8BIT, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **options}
        )
