"""Named schedules of odd polynomials p(x) = a·x + b·x³ + c·x⁵ that are iterated on the singular values.

| name                 | iterations, then | slope at 0 | σ ≥ 1e-2       | σ ≥ 1e-3       |
|----------------------|------------------|------------|----------------|----------------|
| ``ns5``              | 5, itself        | 485        | [0.682, 1.134] | [0.470, 1.202] |
| ``quintic``          | 5, tail          | 493        | [0.978, 1.032] | [0.475, 1.145] |
| ``polar_express``    | 5, two more, tail| 976        | [0.870, 1.124] | [0.846, 1.124] |
| ``polar_express_1.05``| the same        | 804        | [0.846, 1.124] | [0.729, 1.124] |
| ``polar_express_kj`` | 5, tail          | 970        | [0.859, 1.141] | [0.847, 1.141] |
| ``cans``             | 5, tail          | 1049       | [0.884, 1.120] | [0.884, 1.120] |
| ``cubic5``           | 5, cubic tail    | 116        | [0.791, 1.300] | [0.116, 1.300] |
| ``exact``            | 10, its last     | 8e4        | [1.000, 1.001] | [1.000, 1.001] |
| ``turbo``            | 4, tail          | 147        | [0.941, 1.050] | [0.147, 1.050] |

σ is a singular value over the Frobenius norm (``turbo``: after AOL scaling), the range that of the output. The tail
(15/8, −5/4, 3/8) and the cubic one (3/2, −1/2) converge to 1 from all these ranges. ``gram_`` before a name iterates on
the small Gram matrix (gram.py); AOL scaling has no such form.
"""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Coefficients = tuple[float, float, float]
AnyCoefficients = str | Coefficients | Sequence[Coefficients]
"""A name of ``SETS``, with or without ``gram_``; one triple for every iteration; or one triple for each."""

NS5: Coefficients = (3.4445, -4.7750, 2.0315)
"""Keller Jordan's Muon. Slope 485 at zero after five steps; singular values end in about [0.68, 1.13], not at 1."""

TAIL: Coefficients = (1.875, -1.25, 0.375)
CUBIC_TAIL: Coefficients = (1.5, -0.5, 0.0)
GRAM = "gram_"


@dataclass(frozen=True)
class CoefficientSet:
    """``steps`` iterations by default: those of ``rows``, then ``tail`` as often as needed.

    ``aol``: the rows of the matrix are scaled by AOL first. ``full_precision``: 16 bits are refused.
    """

    rows: tuple[Coefficients, ...]
    tail: Coefficients
    steps: int
    aol: bool = False
    full_precision: bool = False


@dataclass(frozen=True)
class Schedule:
    """What one call iterates: a triple for each iteration, after AOL scaling or not, on the Gram matrix or not."""

    rows: tuple[Coefficients, ...]
    aol: bool = False
    gram: bool = False


def _stretched(rows: Sequence[Coefficients], safety: float) -> tuple[Coefficients, ...]:
    """p(x/safety): rounding may push a singular value above 1, where the optimal polynomials of [0, 1] explode."""
    return tuple((a / safety, b / safety**3, c / safety**5) for a, b, c in rows)


_QUINTIC = (  # "YOU", Jiacheng You; leloykun.github.io/ponder/muon-opt-coeffs
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
_POLAR_EXPRESS = (  # arXiv 2505.16932, designed for singular values in [1e-3, 1]; the eighth is TAIL
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
_POLAR_EXPRESS_KJ = (  # microsoft/dion and modded-nanogpt, which multiply the norm by 1.02: here the first row does
    *_stretched([(8.156554524902461, -22.48329292557795, 15.878769915207462)], 1.02),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
_CANS = (  # arXiv 2506.10935, the table of NVIDIA's Emerging-Optimizers; 0.008 at σ = 0.82: bf16 loses the sign there
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
)
_CUBIC5 = (  # arXiv 2606.00371; without the fifth power an iteration is two matrix products
    (3.3656576, -3.3420992, 0.0),
    (2.5744352, -1.4957376, 0.0),
    (2.5368962, -1.4312570, 0.0),
    (2.4418906, -1.2764040, 0.0),
    (2.2230472, -0.9630650, 0.0),
)
_TURBO = (  # Turbo-Muon, arXiv 2512.04632
    (4.6051, -9.6552, 5.6769),
    (4.7505, -6.0861, 2.1790),
    (2.7763, -2.3190, 0.5523),
    (2.4231, -2.2861, 0.8193),
)

SETS: dict[str, CoefficientSet] = {
    "ns5": CoefficientSet((), NS5, 5),
    "quintic": CoefficientSet(_QUINTIC, TAIL, 5),
    "polar_express": CoefficientSet(_stretched(_POLAR_EXPRESS, 1.01), TAIL, 5),
    "polar_express_1.05": CoefficientSet(_stretched(_POLAR_EXPRESS, 1.05), TAIL, 5),
    "polar_express_kj": CoefficientSet(_POLAR_EXPRESS_KJ, TAIL, 5),
    "cans": CoefficientSet(_CANS, TAIL, 5, full_precision=True),
    "cubic5": CoefficientSet(_stretched(_CUBIC5, 1.005), CUBIC_TAIL, 5),  # as published, negative for σ > 1.0035
    "exact": CoefficientSet((NS5,) * 8, (2.0, -1.5, 0.5), 10),  # DeepSeek-V4
    "turbo": CoefficientSet(_TURBO, TAIL, 4, aol=True),
}
NAMES = (*SETS, *(GRAM + name for name, chosen in SETS.items() if not chosen.aol))


def resolve(coefficients: AnyCoefficients, steps: int | None = None) -> Schedule:
    """The iterations of a set.

    Args:
        coefficients: a name of ``NAMES``, a triple that is repeated, or a sequence of triples.
        steps: number of iterations; None is the set's own length, 5 for a triple. Fewer are the first ones; a named
            set goes on with its tail.

    Raises:
        ValueError: for an unknown name (with the nearest one), numbers that are not finite triples, steps outside
            1…99, or more steps than the sequence has triples.
    """
    whole = isinstance(steps, numbers.Integral) and not isinstance(steps, bool)
    if steps is not None and not (whole and 1 <= steps < 100):
        raise ValueError(f"ns_steps is {steps!r} but has to be None or an int from 1 to 99")
    if isinstance(coefficients, str):
        chosen = _named(coefficients)
        count = chosen.steps if steps is None else steps
        rows = chosen.rows[:count]
        return Schedule(rows + (chosen.tail,) * (count - len(rows)), chosen.aol, is_gram(coefficients))
    if _is_triple(coefficients):
        return Schedule((tuple(coefficients),) * (5 if steps is None else steps))
    if not isinstance(coefficients, (tuple, list)) or not coefficients or not all(map(_is_triple, coefficients)):
        raise ValueError(
            f"ns_coefficients is {coefficients!r} but has to be a name, three numbers (a, b, c) or a sequence of such "
            f"triples; names: {', '.join(SETS)}, or with {GRAM!r} before them"
        )
    if steps is not None and steps > len(coefficients):
        raise ValueError(f"ns_steps is {steps} but ns_coefficients has only {len(coefficients)} triples; leave it None")
    return Schedule(tuple(tuple(row) for row in coefficients[:steps]))


def is_gram(coefficients: AnyCoefficients) -> bool:
    """Whether the set iterates on the Gram matrix, which narrows the choice of dtypes."""
    return isinstance(coefficients, str) and coefficients.startswith(GRAM)


def needs_full_precision(coefficients: AnyCoefficients) -> bool:
    """Whether the set fails in 16 bits."""
    return isinstance(coefficients, str) and _named(coefficients).full_precision


def _named(name: str) -> CoefficientSet:
    if name in NAMES:
        return SETS[name.removeprefix(GRAM)]
    if name == "aol":  # published beside turbo, see test_aol_reverses_large_singular_values
        raise ValueError("ns_coefficients 'aol' reverses singular values above 0.88, even AOL-scaled; take 'turbo'")
    close = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(SETS)}, or with {GRAM!r} before them"
    raise ValueError(f"ns_coefficients is {name!r}, which is no known set; {hint}")


def _is_triple(value: Any) -> bool:
    return (
        isinstance(value, (tuple, list))
        and len(value) == 3
        and all(isinstance(v, numbers.Real) and not isinstance(v, bool) and math.isfinite(v) for v in value)
    )
