"""Equilibration before Newton–Schulz: rows, columns or both to norm 1 (MuonEq, arXiv 2603.28254).

    X ← D_r^(−1/2) U D_c^(−1/2),  D_r = diag of the rows' sums of squares, D_c of the columns', both of U

    R: D_r alone        C: D_c alone        RC: both

The paper adds ε to the sums; here a zero row or column stays zero, whatever the scale of the others.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from ..orthogonal.pieces import Pieces, largest_entry, norm_dtype

Equilibration = Literal["r", "c", "rc"]
EQUILIBRATIONS: tuple[str, ...] = get_args(Equilibration)


def equilibrated(matrix: Pieces, how: Equilibration) -> Pieces:
    """The matrix in one new piece, in fp32 (fp64 if its parts are), with the same parts to be written."""
    example, (m, n) = matrix.example, matrix.shape
    x = matrix.source(torch.empty(m, n, dtype=example.dtype, device=example.device)).to(norm_dtype(example.dtype))
    if x.numel() == 0:
        return matrix
    tiny = torch.finfo(x.dtype).tiny
    x = x / largest_entry(x, (0, 1)).clamp_min(tiny)  # squares then neither overflow nor vanish
    norms = {"r": torch.linalg.vector_norm(x, dim=1, keepdim=True), "c": torch.linalg.vector_norm(x, dim=0)}
    for side in how:
        x.div_(norms[side].clamp_min(tiny))
    return Pieces(matrix.shape, [(0, 0, x)], matrix.write)
