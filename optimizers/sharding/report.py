"""What a plan costs, as a text table: owners, FLOPs and bytes a rank, and buckets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .plan import AnyBucket


@dataclass(frozen=True)
class Load:
    """What one group does together in one kind of step, by global rank; a rank that is missing does nothing.

    ``kind``: ``refresh`` or ``other``. ``offset``: the step of the period, for staggered refreshes.
    """

    group: int
    kind: str
    offset: int
    flops: Counter[int]
    bytes_sent: Counter[int]


@dataclass(frozen=True)
class Placed:
    """A bucket, the global ranks that it is exchanged between, and the names of its matrices."""

    group: int
    offset: int
    bucket: AnyBucket
    ranks: tuple[int, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """What an optimizer will do on every rank; ``summary()`` prints it.

    FLOPs are those of the products of Newton–Schulz, as ``census`` counts them: 2·(2s²l + s³) for each quintic
    iteration of an s×l matrix; those of the products of low-rank steps; and three for each element of a row step.
    Elementwise algorithms are not counted.
    ``ranks``: all that the plan names. ``groups``: a line on each that says what it is.
    """

    ranks: tuple[int, ...]
    loads: tuple[Load, ...]
    buckets: tuple[Placed, ...]
    groups: tuple[str, ...] = ()

    def flops(self, kind: str, offset: int = 0) -> Counter[int]:
        """FLOPs by global rank of a step of that kind, summed over groups."""
        return self._sum("flops", kind, offset)

    def bytes_sent(self, kind: str, offset: int = 0) -> Counter[int]:
        """Bytes by global rank of a step of that kind, summed over groups."""
        return self._sum("bytes_sent", kind, offset)

    def summary(self) -> str:
        """A line for each group, a table of steps, one of buckets, and the matrices of each owner."""
        lines = [*self.groups, ""] if self.groups else []
        lines += _table([("step", "GFLOP max", "mean", "max/mean", "MB sent max", "mean", "max/mean"), *self._steps()])
        rows = [("bucket", "group", "exchange", "matrices", "MB, all ranks", "a rank", "dtype", "ranks")]
        owned: dict[int, list[str]] = {rank: [] for rank in self.ranks}
        for number, placed in enumerate(self.buckets):
            bucket = placed.bucket
            owners = getattr(bucket, "owners", None)
            for i, name in enumerate(placed.names):
                for rank in placed.ranks if owners is None else [placed.ranks[owners[i]]]:
                    owned[rank].append(name)
            held = [sum(c.elements(r) for c in bucket.cargo) * bucket.dtype.itemsize for r in range(bucket.ranks)]
            everyone = sum(c.shape[0] * c.shape[1] for c in bucket.cargo) * bucket.dtype.itemsize
            exchange = "gather" if owners is None else "owner"
            dtype = str(bucket.dtype).removeprefix("torch.")
            rows.append(
                (str(number), str(placed.group), exchange, str(len(bucket.cargo)), f"{everyone / 1e6:.2f}",
                 f"{max(held) / 1e6:.2f}", dtype, str(bucket.ranks))
            )  # fmt: skip
        lines += ["", *_table(rows)] if self.buckets else ["", "no matrix travels"]
        lines += ["", *(f"rank {rank} owns {len(names)}: {_some(names)}" for rank, names in owned.items() if names)]
        return "\n".join(lines).rstrip()

    def _steps(self) -> list[tuple[str, ...]]:
        """Rows of the table. When matrices are staggered, those of the other offsets take their other kind of step."""
        offsets = sorted({load.offset for load in self.loads})
        kinds = [[("refresh", offset), *(("other", o) for o in offsets if o != offset)] for offset in offsets]
        if offsets == [0]:
            kinds = [[(kind, 0)] for kind in ("refresh", "other") if any(load.kind == kind for load in self.loads)]
        rows = []
        for parts in kinds:
            flops, sent = Counter(), Counter()
            for kind, offset in parts:
                flops.update(self.flops(kind, offset))
                sent.update(self.bytes_sent(kind, offset))
            name = parts[0][0] if offsets == [0] else f"offset {parts[0][1]}"
            rows.append((name, *_figures(flops, self.ranks, 1e9), *_figures(sent, self.ranks, 1e6)))
        return rows

    def _sum(self, what: str, kind: str, offset: int) -> Counter[int]:
        total: Counter[int] = Counter()
        for load in self.loads:
            if load.kind == kind and load.offset == offset:
                total.update(getattr(load, what))
        return total


def _figures(values: Counter[int], ranks: Sequence[int], unit: float) -> tuple[str, str, str]:
    most, mean = max(values[rank] for rank in ranks), sum(values[rank] for rank in ranks) / len(ranks)
    return f"{most / unit:.3f}", f"{mean / unit:.3f}", f"{most / mean:.2f}" if mean else "-"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _some(names: Sequence[str], count: int = 6) -> str:
    return ", ".join(names[:count]) + (", …" if len(names) > count else "")
