"""Coefficients (a, b, c) of the odd quintics p(x) = a·x + b·x³ + c·x⁵ that are iterated on the singular values."""

from __future__ import annotations

Coefficients = tuple[float, float, float]

NS5: Coefficients = (3.4445, -4.7750, 2.0315)
"""Keller Jordan's Muon. Slope 485 at zero after five steps; singular values end in about [0.68, 1.13], not at 1."""
