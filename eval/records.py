"""Records side by side: which may stand in one table, and the table."""

import sys
from collections.abc import Mapping
from typing import Any

ALIKE = (
    "metric",
    "protocol",
    "n_gen",
    "n_ref",
    "n_kept",
    "extractor",
    "weights_sha256",
    "resize",
    "quantize",
    "image_shape",
    "reference_sha256",
    "labels",
    "classes_sha256",
    "weights",
    "sampler",
    "guidance",
    "sample_seed",
    "compute_dtype",
    "vae_sha256",
)
"""Fields of a record that must agree before two may be compared. A field that both lack agrees."""

_COLUMNS = (
    ("kid", "KID·10³", 1e3),
    ("sfid", "sFID", 1),
    ("inception_score", "IS", 1),
    ("precision", "precision", 1),
    ("recall", "recall", 1),
    ("density", "density", 1),
    ("coverage", "coverage", 1),
)


_NUMBERS = (
    *(key for key, _, _ in _COLUMNS),
    *("value", "value_low", "value_high", "kid_standard_error", "inception_score_std", "floor", "floor_kid"),
)
_NEEDED = {"metric", "value", "n_gen", "n_ref"}


class Incomparable(ValueError):
    """Records that cannot stand in one table; the message is one line that says why."""


def check(record: Any) -> None:
    """Raise ValueError, with what is wrong, where ``table`` would have nothing or no number to print.

    Args:
        record: what was read from a JSON file.
    """
    if not isinstance(record, Mapping) or not record.keys() >= _NEEDED:
        raise ValueError("no record of a score")
    count, reference = record["n_gen"], record["n_ref"]
    right = {key: _is_number(record.get(key, 0)) for key in _NUMBERS}
    right |= {"metric": isinstance(record["metric"], str), "n_gen": isinstance(count, int)}
    right["n_ref"] = reference is None or isinstance(reference, int)
    right["value_high"] &= ("value_low" in record) == ("value_high" in record)
    if wrong := [key for key, fits in right.items() if not fits]:
        raise ValueError(f"no record of a score: {wrong[0]} is {record.get(wrong[0])!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max  # NaN is not


def check_alike(records: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise `Incomparable`, naming the first field that differs, unless all records (by name) were taken alike."""
    (first, ours), *others = records.items()
    for name, record in others:
        for key in ALIKE:
            if record.get(key) != ours.get(key):
                raise Incomparable(f"{first} has {key} {ours.get(key)!r} but {name} has {record.get(key)!r}")


def table(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: a row a record, its floor last; a column only where some record has the number."""
    metrics = sorted({record["metric"] for record in records.values()})
    columns = [column for column in _COLUMNS if any(column[0] in record for record in records.values())]
    head = ["", " / ".join(metrics), *(title for _, title, _ in columns), "n"]
    lines = [head, ["---"] * len(head)]
    for name, record in records.items():
        lines.append([name, _value(record), *(_cell(record, key, scale) for key, _, scale in columns), _count(record)])
    floors = {(r["floor"], r["floor_kid"]) for r in records.values() if {"floor", "floor_kid"} <= r.keys()}
    for value, kid in sorted(floors):
        cells = [f"{kid * scale:.2f}" if key == "kid" else "" for key, _, scale in columns]
        lines.append(["floor: other real images", f"{value:.2f}", *cells, ""])
    if not floors:
        lines.append(["floor: not measured", *[""] * (len(head) - 1)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def notes(record: Mapping[str, Any]) -> list[str]:
    """What a record holds beside the numbers of ``table``, in lines for a person."""
    of = f"of {record['details_count']:,} images: " if "details_count" in record else ""
    said = []
    if "bias" in record:
        low, high = record["value_low"], record["value_high"]
        said.append(f"{of}with 95 % confidence {low:.2f} to {high:.2f} without the bias, which is {record['bias']:.2f}")
    if "infinity" in record:
        error = record["infinity_standard_error"]
        said.append(f"{of}{record['infinity']:.2f} ± {error:.2f} extrapolated to infinitely many images")
    if "share_near" in record:
        near, authentic = 100 * record["share_near"], record["auth_pct"]
        said.append(f"{of}{near:.1f} % lie as near to training images as 5 % of the reference do")
        said.append(f"{of}{authentic:.0f} % are authentic, of fresh real images about 50 %")
    scored = [row for row in record.get("classes", ()) if row["kid"] is not None]
    for row in sorted(scored, key=lambda row: -row["kid"])[:5]:
        counts = f"{row['n_gen']} images against {row['n_ref']}"
        error = 1e3 * row["kid_standard_error"]
        said.append(f"class {row['name']}: KID·10³ {1e3 * row['kid']:.2f} ± {error:.2f}, {counts}")
    if "cmmd" in record:
        said.append(f"CMMD {record['cmmd']:.3f}")
    return said


def _value(record: Mapping[str, Any]) -> str:
    interval = f" [{record['value_low']:.2f}, {record['value_high']:.2f}]" if "value_low" in record else ""
    return f"{record['value']:.2f}{interval}"


def _cell(record: Mapping[str, Any], key: str, scale: float) -> str:
    if key not in record:
        return ""
    spread = {"kid": "kid_standard_error", "inception_score": "inception_score_std"}.get(key)
    error = f" ± {record[spread] * scale:.2f}" if spread in record else ""
    return f"{record[key] * scale:.{2 if scale > 1 or key == 'inception_score' else 3}f}{error}"


def _count(record: Mapping[str, Any]) -> str:
    reference = record["n_ref"]
    return f"{record['n_gen']}" if reference in (None, record["n_gen"]) else f"{record['n_gen']} / {reference}"
