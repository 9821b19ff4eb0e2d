"""Logical matrices of a parameter, and which rectangle of one lies inside the region that a rank holds.

A parameter of 2 dimensions is a matrix [m, n]; of 4 or more a convolution [out, in, …] seen as [out, in·…]; of 3 a
stack of matrices [e, m, n]. ``MatrixSplit`` says that the rows of each of them are several matrices:

    (k,)                    k equal chunks, one below the other
    (64, 64, 32)            parts of so many rows
    ("interleaved", k)      row i belongs to matrix i mod k

always in rows of the whole parameter, however it is sharded.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

MatrixSplit = tuple[int, ...] | tuple[Literal["interleaved"], int]
Span = tuple[int, int]
"""First index and count."""

INTERLEAVED = "interleaved"
SPLIT_FORMS = "(k,) for equal chunks, rows of two parts or more as (64, 64, 32), or ('interleaved', k)"


class Region(NamedTuple):
    """What one rank holds of a parameter [e, m, n] (e = 1 for a matrix): a box."""

    index: Span
    rows: Span
    columns: Span


class Rect(NamedTuple):
    """A part of one matrix."""

    row: int
    rows: int
    column: int
    columns: int


class Matrix(NamedTuple):
    """The rows ``start + step·i`` of the ``index``-th m×n matrix of a parameter, in whole rows: one logical matrix."""

    index: int
    start: int
    step: int
    rows: int
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n)."""
        return self.rows, self.columns

    def within(self, region: Region) -> tuple[Rect, int]:
        """The part of this matrix that lies in a region, and the row of the region where it begins."""
        top, height = region.rows
        first = min(self.rows, max(0, -((self.start - top) // self.step)))
        last = min(self.rows, max(first, -((self.start - top - height) // self.step)))
        begin, count = region.index
        if not begin <= self.index < begin + count:
            last = first
        return Rect(first, last - first, *region.columns), self.start + self.step * first - top


def matrices(shape: tuple[int, int, int], split: MatrixSplit | None, label: str) -> tuple[Matrix, ...]:
    """All logical matrices of a parameter [e, m, n], in the order of its rows.

    Raises:
        ValueError: if the split does not fit the rows; ``label`` names the parameter.
    """
    e, m, n = shape
    if split is None:
        cuts = [(0, 1, m)]
    elif split[0] == INTERLEAVED:
        k = split[1]
        cuts = [(i, k, _even(m, k, split, label)) for i in range(k)]
    elif len(split) == 1:
        height = _even(m, split[0], split, label)
        cuts = [(i * height, 1, height) for i in range(split[0])]
    else:
        if sum(split) != m:
            raise ValueError(f"{label}: matrix_splits {split} sum to {sum(split)} rows, but there are {m}")
        cuts = [(sum(split[:i]), 1, rows) for i, rows in enumerate(split)]
    return tuple(Matrix(index, *cut, n) for index in range(e) for cut in cuts)


def is_split(value: Any) -> bool:
    """Whether a value has the form of a ``MatrixSplit``."""
    if not isinstance(value, (tuple, list)) or not value:
        return False
    counts = value[1:] if value[0] == INTERLEAVED else value
    if value[0] == INTERLEAVED and len(counts) != 1:
        return False
    return all(isinstance(v, int) and not isinstance(v, bool) and v >= 1 for v in counts)


def _even(m: int, parts: int, split: MatrixSplit, label: str) -> int:
    if m % parts:
        raise ValueError(f"{label}: matrix_splits {split} asks for {parts} equal parts, but there are {m} rows")
    return m // parts
