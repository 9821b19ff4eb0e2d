"""Which parameter goes to which group, by its owning module and its name, and a table that shows it."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from .sharding.matrices import SPLIT_FORMS, MatrixSplit, is_split

_ADAMW_NAMES = re.compile(
    r"embed|modulation|ada_?ln|adanorm|^norm(\d|_|$)|^time(_?step)?_(proj|mlp)|caption_projection", re.IGNORECASE
)
"""Parts of dotted names whose weights go to AdamW: embeddings of patches, positions, times, labels and captions, and
modulation. A Linear inside a norm modulates it (diffusers' ``norm1.linear``, ``norm1_context``, ``norm_out``)."""

_OUTPUT_NAMES = re.compile(r"^(final(_.*)?|.*_head|head|proj_out(_\d+)?|classifier|unpatchify)$", re.IGNORECASE)
"""Parts that name the output layer, unless they lie inside a numbered layer: Flux's blocks have a hidden
``single_transformer_blocks.0.proj_out`` beside the model's own ``proj_out``."""

_MATRIX_MODULES = (nn.Linear, nn.Conv2d, nn.Conv3d)
"""Owners of matrices. nn.Conv1d is not among them: its 3-D weight would be read as a stack of matrices."""


def param_groups(
    model: nn.Module,
    *,
    matrices: Sequence[str] | None = None,
    adamw: Sequence[str] = (),
    splits: Mapping[str, MatrixSplit] | None = None,
    matrix_options: Mapping[str, Any] | None = None,
    adamw_options: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Divide a model's trainable parameters into groups for any class of this package. Call after ``fully_shard``.

    Weights of Linear, Conv2d and Conv3d modules go to the matrix group, which names no algorithm: the class decides.
    To AdamW go embeddings, modulation (adaLN), the final layer or head (each by name), tied parameters, everything
    else; biases and other parameters of fewer than two dimensions without weight decay.

    Args:
        model: its parameters may be DTensors.
        matrices: patterns of names (``blocks.*.gate``; * also matches dots) that go to the matrix group as well.
        adamw: patterns of names that go to AdamW instead.
        splits: logical matrices by pattern of names, ``{"blocks.*.qkv.weight": (3,)}``: ``(k,)`` equal chunks,
            ``(64, 64, 32)`` parts of so many rows, or ``("interleaved", k)``, in rows of the whole parameter. A module
            may declare them itself, ``module.matrix_splits = {"weight": (6,)}``; a pattern goes before that.
        matrix_options: keys for the matrix group, for example ``{"lr": 2e-3}``.
        adamw_options: keys for the AdamW groups, for example ``{"lr": 3e-4, "betas": (0.9, 0.95)}``.

    Returns:
        Up to three groups with ``params`` and ``param_names``; empty ones are left out. The matrix group has a key
        ``matrix_splits``, a split or None for each of its parameters, if any is split.

    Raises:
        ValueError: for a pattern that matches nothing (with the nearest name), a name matched by both lists, or a
            parameter of fewer than two dimensions named as a matrix; for a split of something that is no parameter, and
            two patterns that split the same one differently.
    """
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    forced_matrix = _matching(matrices or (), names, "matrices")
    forced_adamw = _matching(adamw, names, "adamw")
    if both := sorted(forced_matrix & forced_adamw):
        raise ValueError(f"parameter {both[0]!r} matches patterns of both matrices and adamw; leave it in one of them")
    tied = _tied(model)
    parts: dict[str, list[tuple[str, Tensor]]] = {"matrix": [], "decayed": [], "plain": []}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if name in forced_matrix and p.ndim < 2:
            raise ValueError(
                f"parameter {name!r} of shape {tuple(p.shape)} is no matrix; take it out of matrices={list(matrices)!r}"
            )
        by_default = id(p) not in tied and _is_matrix(model, name, p)
        is_matrix = name in forced_matrix or (by_default and name not in forced_adamw)
        parts["matrix" if is_matrix else "decayed" if p.ndim >= 2 else "plain"].append((name, p))
    options = dict(adamw_options or {})
    groups = [
        {**dict(matrix_options or {}), **_members(parts["matrix"]), **_splits(model, splits or {}, parts["matrix"])},
        {"algorithm": "adamw", **options, **_members(parts["decayed"])},
        {"algorithm": "adamw", **options, "weight_decay": 0.0, **_members(parts["plain"])},
    ]
    return [group for group in groups if group["params"]]


def routing_table(groups: Iterable[Mapping[str, Any]] | torch.optim.Optimizer) -> str:
    """A text table of groups: algorithm, tensors, parameters, share, lr, weight decay and some names.

    Counts are of whole parameters, however they are sharded. ``-`` stands for what the optimizer's class will decide.
    """
    groups = groups.param_groups if isinstance(groups, torch.optim.Optimizer) else list(groups)
    counts = [sum(p.numel() for p in group["params"]) for group in groups]
    rows = [("group", "algorithm", "tensors", "parameters", "share", "lr", "weight decay", "names")]
    for i, (group, count) in enumerate(zip(groups, counts, strict=True)):
        rows.append(
            (
                str(i),
                group.get("algorithm", "-"),
                str(len(group["params"])),
                f"{count:,}",
                f"{100 * count / max(1, sum(counts)):.1f}%",
                f"{float(group['lr']):.3g}" if "lr" in group else "-",
                f"{group['weight_decay']:.3g}" if "weight_decay" in group else "-",
                _examples(group.get("param_names", [])),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _is_matrix(model: nn.Module, name: str, p: Tensor) -> bool:
    path, _, attribute = name.rpartition(".")
    return (
        p.ndim >= 2
        and attribute == "weight"
        and isinstance(model.get_submodule(path), _MATRIX_MODULES)
        and not _is_special(path.split("."))
    )


def _is_special(parts: Sequence[str]) -> bool:
    """Whether the path of a module is that of an embedding, a modulation or the output layer."""
    outside = takewhile(lambda part: not part.isdecimal(), parts)
    return any(map(_ADAMW_NAMES.search, parts)) or any(map(_OUTPUT_NAMES.search, outside))


def _tied(model: nn.Module) -> set[int]:
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return {key for key, count in uses.items() if count > 1}


def _members(pairs: list[tuple[str, Tensor]]) -> dict[str, Any]:
    return {"params": [p for _, p in pairs], "param_names": [name for name, _ in pairs]}


def _splits(
    model: nn.Module, patterns: Mapping[str, MatrixSplit], members: Sequence[tuple[str, Tensor]]
) -> dict[str, Any]:
    """``matrix_splits`` of the matrix group, nothing if no member is split."""
    declared: dict[str, MatrixSplit] = {}
    for path, module in model.named_modules():
        for attribute, split in getattr(module, "matrix_splits", {}).items():
            if not isinstance(getattr(module, attribute, None), Tensor):
                raise ValueError(
                    f"{path or 'the model'}: matrix_splits names {attribute!r}, which is no parameter of it"
                )
            declared[f"{path}.{attribute}" if path else attribute] = split
    names, asked = [name for name, _ in members], {}
    for pattern, split in patterns.items():
        for name in _matching([pattern], names, "splits"):
            if asked.setdefault(name, split) != split:
                raise ValueError(f"parameter {name!r} is split as {asked[name]} and as {split} by patterns of splits")
    found = tuple((declared | asked).get(name) for name in names)
    for name, split in zip(names, found, strict=True):
        if split is not None and not is_split(split):
            raise ValueError(f"parameter {name!r}: the split {split!r} has to be {SPLIT_FORMS}")
    return {"matrix_splits": tuple(s and tuple(s) for s in found)} if any(found) else {}


def _matching(patterns: Sequence[str], names: Sequence[str], argument: str) -> set[str]:
    if isinstance(patterns, str):
        patterns = [patterns]
    matched: set[str] = set()
    for pattern in patterns:
        hits = [name for name in names if fnmatchcase(name, pattern)]
        if not hits:
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
            kind = "matrix" if argument == "splits" else "trainable parameter"
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ValueError(f"pattern {pattern!r} in {argument} matches no {kind}{hint}")
        matched.update(hits)
    return matched


def _examples(names: Sequence[str], count: int = 3) -> str:
    """The first few kinds of names, layer numbers replaced by *."""
    kinds = list(dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", name) for name in names))
    return ", ".join(kinds[:count]) + (", …" if len(kinds) > count else "")
