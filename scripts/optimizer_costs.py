"""What a step of every optimizer costs, counted while it runs: the tables of optimizers/README.md.

usage: python scripts/optimizer_costs.py [--ranks N …]

Runs each class with its defaults on 12 × {512×512, 2048×512, 512×2048} under Shard(0), with fake tensors on rank 0 of
fake process groups, for a whole period, and prints a row of state bytes, and of products and bytes sent by kind of
step: refresh, other, mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import optimizers as o
from dit_train.command_line import Parser, positive

SHAPES = [(512, 512), (2048, 512), (512, 2048)] * 12

CONTENDERS: dict[str, Callable[..., Any]] = {
    "`AdamW`": o.AdamW,
    "`AdamW8bit`": o.AdamW8bit,
    "`MarsAdamW`": o.MarsAdamW,
    "`Lion`": o.Lion,
    "`SGD`": o.SGD,
    "`Muon`": o.Muon,
    '`Muon`, `exchange="gather"`': lambda p: o.Muon(p, exchange="gather"),
    "`Muon8bit`": o.Muon8bit,
    "`MarsMuon`": o.MarsMuon,
    "`MuonEq`": o.MuonEq,
    "`NorMuon`": o.NorMuon,
    "`AdaGO`": o.AdaGO,
    "`PeriodicRowMuon`, K = 3": o.PeriodicRowMuon,
    "`MuonBP`, P = 5": o.MuonBP,
    "`PeriodicSignMuon`, P = 2": o.PeriodicSignMuon,
    "`BlockMuon`": o.BlockMuon,
    "`RowMuon`": o.RowMuon,
    "`Dion`, a quarter of the rank": lambda p: o.Dion(p, rank_fraction=0.25),
    "`Dion2`, a quarter of the rows": o.Dion2,
    "`Scion`": o.Scion,
    '`Scion`, `ball="row"`': lambda p: o.Scion(p, ball="row"),
    '`Scion`, `ball="column"`': lambda p: o.Scion(p, ball="column"),
    '`Scion`, `ball="sign"`': lambda p: o.Scion(p, ball="sign"),
    "`AuON`": o.AuON,
    '`AuON`, `form="hybrid"`': lambda p: o.AuON(p, form="hybrid"),
}


@dataclass(frozen=True)
class Costs:
    """Of rank 0: state bytes an element of its shards; GFLOP of products and MB sent of each step of a period."""

    state: float
    gflop: list[float]
    megabytes: list[float]

    @property
    def cells(self) -> Iterator[str]:
        """FLOPs and bytes as ``refresh, other, mean``, a dash for a kind of step that there is not."""
        for values in (self.gflop, self.megabytes):
            first, rest, mean = values[0], values[1:], sum(values) / len(values)
            yield f"{first:.2f}, {rest[0]:.2f}, {mean:.2f}" if rest else f"{first:.2f}"


def costs_of(build: Callable[..., Any], ranks: int) -> Costs:
    """Counted by ``census`` in the steps of one period."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        params = nn.ParameterList(nn.Parameter(_sharded(shape, mesh)) for shape in SHAPES)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake:
            params.to_empty(device="cpu")
        optimizer = build(list(params))
        held = sum(p.to_local().numel() for p in params)
        state = sum(t.to_local().nbytes for values in optimizer.state.values() for t in values.values()) / held
        for p in params:
            p.grad = torch.zeros_like(p)
        gflop, megabytes = [], []
        for _ in range(int(optimizer.param_groups[0].get("period", 1))):
            with fake, o.census() as seen:
                optimizer.step()
            gflop.append(seen.flops / 1e9)
            megabytes.append(seen.bytes_sent / 1e6)
        return Costs(state, gflop, megabytes)
    finally:
        dist.destroy_process_group()


def _sharded(shape: tuple[int, int], mesh: Any) -> DTensor:
    rows = -(-shape[0] // mesh.size())
    local = torch.empty(rows, shape[1], device="meta")
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=(shape[1], 1))


def table(ranks: Sequence[int]) -> list[str]:
    """Markdown."""
    heads = ["algorithm", "state bytes an element"]
    heads += [f"{what}, N = {n}" for n in ranks for what in ("GFLOP", "MB sent")]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name, build in CONTENDERS.items():
        found = [costs_of(build, n) for n in ranks]
        cells = [cell for one in found for cell in one.cells]
        lines.append(f"| {' | '.join([name, f'{found[0].state:.3f}'.rstrip('0').rstrip('.'), *cells])} |")
    return lines


def main() -> int:
    """Print the table."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=positive, nargs="+", default=[2, 4], help="of the fake process groups")
    print("\n".join(table(parser.parse_args().ranks)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
