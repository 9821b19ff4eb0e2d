"""Checks these optimizers on a machine: torchrun --nproc-per-node N -m optimizers.selfcheck

On any number of ranks, also alone (python -m optimizers.selfcheck), on CUDA with NCCL or on CPU with gloo: sharded
weights must end as unsharded ones do; then bandwidth of the exchange, overlap of buckets, and Newton–Schulz throughput
are measured. Rank 0 prints a table. Exit code 0 if all that must hold holds, 1 if not, 2 for a bad argument.
"""

from __future__ import annotations

import argparse
import inspect
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from optimizers import (
    AdaGO,
    AdamW,
    AdamW8bit,
    AuON,
    BlockMuon,
    Dion2,
    MarsMuon,
    Muon,
    Muon8bit,
    MuonBP,
    MuonEq,
    NorMuon,
    PeriodicRowMuon,
    PeriodicSignMuon,
    RowMuon,
    Scion,
)
from optimizers.orthogonal.newton_schulz import compute_dtype, orthogonalize

ROWS = (1, 2, 7, 18, 63, 64)
STEPS = 4
"""Of each exactness check: enough for a refresh, the steps between, and another refresh."""


@dataclass(frozen=True)
class Row:
    """One line of the table; ``ok`` is None for a measurement."""

    what: str
    detail: str
    found: str
    required: str = ""
    ok: bool | None = None


@dataclass(frozen=True)
class Bench:
    """Where this rank works, and at which scale."""

    mesh: DeviceMesh
    quick: bool

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return torch.device(self.mesh.device_type)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.mesh.size()

    @property
    def big(self) -> bool:
        """Whether matrices may be as large as they are on an accelerator."""
        return self.device.type != "cpu" and not self.quick

    def largest(self, value: float) -> float:
        """The maximum over ranks; a NaN of any is infinity for all."""
        reduced = torch.tensor(math.inf if math.isnan(value) else value, dtype=torch.float64, device=self.device)
        dist.all_reduce(reduced, dist.ReduceOp.MAX)
        return reduced.item()

    def seconds(self, work: Callable[[], Any], repeats: int) -> float:
        """Median time of ``work`` on the slowest rank, after one call to warm up; all ranks begin together."""
        work()
        times = []
        for _ in range(repeats):
            dist.barrier()
            self.synchronize()
            begin = time.perf_counter()
            work()
            self.synchronize()
            times.append(time.perf_counter() - begin)
        return self.largest(statistics.median(times))

    def synchronize(self) -> None:
        """Wait for what was launched on the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


# -- sharded = unsharded -----------------------------------------------------------------------------------------------


def zoo(shape: tuple[int, int], draw: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Gradients that break careless code, by kind."""
    m, n = shape
    gauss = torch.randn(shape, generator=draw)
    yield "Gaussian", gauss
    yield "rank 1", torch.outer(torch.randn(m, generator=draw), torch.randn(n, generator=draw))
    yield "ill-conditioned", torch.randn(shape, generator=draw) * torch.logspace(0, -6, n)
    yield "zero", torch.zeros(shape)
    yield "1e20", gauss * 1e20
    yield "1e-25", gauss * 1e-25


@dataclass(frozen=True)
class Case:
    """One algorithm whose sharded run has to end within ``limit`` of its unsharded one, in units of the RMS change.

    ``replicas``: the ranks hold whole weights and share the work instead.
    """

    name: str
    cls: type[torch.optim.Optimizer]
    options: dict[str, Any]
    rows: Sequence[int]
    limit: float
    replicas: bool = False


def cases(bench: Bench) -> Iterator[Case]:
    """Every algorithm, and every exchange that there is.

    On CPU whole matrices are computed alike wherever they lie, so that nothing may differ. What runs on local parts may
    round differently at their edges, and on CUDA the kernel that is chosen depends on how many matrices are stacked.
    """
    exact, close = (0.0, 1e-6) if bench.device.type == "cpu" else (1e-4, 1e-4)
    full = {"ns_dtype": torch.float32, "wire_dtype": torch.float32}
    # As many row blocks as ranks, so that shards and blocks have the same edges.
    grid = {"block_grid": bench.ranks, **full}
    thick = [rows * bench.ranks for rows in (1, 4, 12)]
    known = inspect.signature(Muon).parameters
    exchanges = ("owner", "gather") if "exchange" in known else ("",)
    yield Case("AdamW", AdamW, {}, ROWS, close)
    for exchange in exchanges:
        how = {"exchange": exchange} if exchange else {}
        name = f" ({exchange})" if exchange else ""
        limit = close if exchange == "gather" else exact
        yield Case(f"Muon{name}", Muon, {**full, **how}, ROWS, limit)
        yield Case(f"Muon{name}, bf16 wire", Muon, {"ns_dtype": torch.float32, **how}, ROWS, limit)
        yield Case(f"PeriodicRowMuon K=3{name}", PeriodicRowMuon, {"period": 3, **full, **how}, ROWS, limit)
        yield Case(f"MuonBP P=3{name}", MuonBP, {"period": 3, **grid, **how}, thick, close)
    yield Case("Muon, replicas", Muon, full, ROWS, exact, replicas=True)
    yield Case("BlockMuon", BlockMuon, grid, thick, close)
    equilibrated = {"equilibrate": "rc", **full}
    for cls, options in (
        (AdaGO, full), (AuON, {}), (Dion2, full), (MarsMuon, full), (Muon8bit, full), (MuonEq, equilibrated),
        (NorMuon, full), (PeriodicSignMuon, full), (RowMuon, {}), (Scion, {"ball": "column"}), (AdamW8bit, {}),
    ):  # fmt: skip
        yield Case(cls.__name__, cls, options, ROWS, close)


def difference(case: Case, bench: Bench) -> float:
    """The largest difference between sharded and unsharded weights, over the RMS change of its matrix."""
    ends = [train(case, bench, sharded) for sharded in (True, False)]
    worst = 0.0
    for shared, alone, begin in zip(*ends, weights(case), strict=True):
        change = (alone - begin.to(alone.device)).square().mean().sqrt().item()
        apart = (shared - alone).abs().max().item() / (change or 1.0)
        worst = max(worst, math.inf if math.isnan(apart) else apart)
    return bench.largest(worst)


def train(case: Case, bench: Bench, sharded: bool) -> list[Tensor]:
    """Whole weights after some steps."""

    def place(tensor: Tensor) -> Tensor:
        tensor = tensor.to(bench.device)
        cut = sharded and not case.replicas
        return distribute_tensor(tensor, bench.mesh, [Shard(0)], src_data_rank=None) if cut else tensor

    params = [nn.Parameter(place(w)) for w in weights(case)]
    share = {"process_group": dist.group.WORLD} if sharded and case.replicas else {}
    optimizer = case.cls(params, lr=0.02, weight_decay=0.1, **case.options, **share)
    draw = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        gradients = [g for rows in case.rows for _, g in zoo((rows, 24), draw)]
        for p, g in zip(params, gradients, strict=True):
            p.grad = place(g)
        optimizer.step()
    return [p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for p in params]


def weights(case: Case) -> list[Tensor]:
    """The weights at the start: one for each number of rows and kind of gradient."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(g.shape, generator=draw) for rows in case.rows for _, g in zoo((rows, 24), draw)]


def check_exactness(bench: Bench) -> Iterator[Row]:
    """Rows of the first part. An error is a row as well; one that not all ranks meet ends the run by its timeout."""
    for case in cases(bench):
        required = "0" if case.limit == 0 else f"≤ {case.limit:.0e}"
        try:
            found = difference(case, bench)
        except Exception as error:
            yield Row("sharded = unsharded", case.name, f"{type(error).__name__}: {error}", required, False)
            continue
        yield Row("sharded = unsharded", case.name, f"{found:.3g}", required, found <= case.limit)


# -- measurements ------------------------------------------------------------------------------------------------------


def measure_bandwidth(bench: Bench) -> Iterator[Row]:
    """All-to-all in bf16: bytes that a rank sends to others, over the time of the slowest."""
    sizes = (2**16, 2**20) if bench.quick else (2**16, 2**20, 2**24) + ((2**28,) if bench.big else ())
    for size in sizes if bench.ranks > 1 else ():
        sent = torch.zeros(size // 2 // bench.ranks * bench.ranks, dtype=torch.bfloat16, device=bench.device)
        received = torch.empty_like(sent)

        def exchange(sent: Tensor = sent, received: Tensor = received) -> None:
            dist.all_to_all_single(received, sent)

        seconds = bench.seconds(exchange, 3 if bench.quick else 7)
        rate = sent.nbytes * (bench.ranks - 1) / bench.ranks / seconds
        yield Row("all-to-all", f"{size / 2**20:g} MiB a rank", f"{1e3 * seconds:.2f} ms, {rate / 1e9:.2f} GB/s sent")


def measure_overlap(bench: Bench) -> Iterator[Row]:
    """A refresh of Muon with one bucket in flight, where the exchange is waited for, and with more."""
    if bench.ranks == 1:
        return
    side, count = (2048, 32) if bench.big else (32 if bench.quick else 256, 16)
    params = []
    for _ in range(count):
        shards = [torch.randn(side, side, device=bench.device) for _ in range(2)]
        weight, gradient = (distribute_tensor(s, bench.mesh, [Shard(0)], src_data_rank=None) for s in shards)
        params.append(nn.Parameter(weight))
        params[-1].grad = gradient
    first = 0.0
    for flights in (1, 2, 3):
        optimizer = Muon(params, bucket_bytes=2 * side * side * bench.ranks, max_in_flight=flights)
        seconds = bench.seconds(optimizer.step, 3 if bench.quick else 7)
        first = first or seconds
        beside = "" if flights == 1 else f", {compared(seconds, first)} with 1"
        yield Row("overlap", f"{flights} in flight", f"{1e3 * seconds:.2f} ms{beside}")


def compared(seconds: float, base: float) -> str:
    """How a time stands to another: ``30 % less than``, ``5 % more than``, ``as long as``."""
    change = round(100 * (seconds / base - 1))
    return f"{abs(change)} % {'less' if change < 0 else 'more'} than" if change else "as long as"


def measure_newton_schulz(bench: Bench) -> Iterator[Row]:
    """Throughput of five iterations on stacks; the ranks work at the same time, as on a refresh."""
    shapes = [(4, 64, 256)] if bench.quick else [(4, 512, 512), (2, 512, 2048)]
    if bench.big:
        shapes = [(8, 1024, 1024), (8, 2048, 8192)]
    chosen = compute_dtype(None, torch.float32, bench.device)
    for count, short, long in shapes:
        stack = torch.randn(count, short, long, device=bench.device)
        flops = 5 * count * (4 * short**2 * long + 2 * short**3)
        for dtype in (torch.float32, torch.bfloat16):

            def work(stack: Tensor = stack, dtype: torch.dtype = dtype) -> None:
                orthogonalize(stack, dtype=dtype)

            seconds = bench.seconds(work, 3)
            name = f"{count} of {short}×{long}, {str(dtype).removeprefix('torch.')}"
            mark = " (the default here)" if dtype == chosen else ""
            yield Row("Newton–Schulz", name + mark, f"{flops / seconds / 1e12:.3g} TFLOP/s a rank")


# -- the command -------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Errors are one line."""

    def error(self, message: str) -> NoReturn:
        """End with code 2."""
        self.exit(2, f"selfcheck: {message}\n")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    what, _, more = __doc__.partition(": ")
    command, _, more = more.partition("\n\n")
    parser = Parser(
        prog="optimizers.selfcheck",
        usage=f"{command} [--device {{auto,cpu,cuda}}] [--quick]",
        description=f"{what}.\n\n{more}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--quick", action="store_true", help="all checks, measurements of small things only")
    chosen = parser.parse_args(arguments)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if chosen.device == "cuda" and devices < here:
        parser.error(f"--device cuda needs one device a rank, {here} on this machine, but there are {devices}")
    if chosen.device == "auto":
        chosen.device = "cuda" if devices >= here else "cpu"
    return chosen


def start(device: str, quick: bool) -> Bench:
    """Join the process group that torchrun describes, or make one of this process alone."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    alone = {} if "WORLD_SIZE" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, timeout=timedelta(minutes=2), **alone)
    return Bench(init_device_mesh(device, (dist.get_world_size(),)), quick)


def table(rows: Sequence[Row]) -> str:
    """The rows, aligned."""
    verdicts = {None: "", True: "ok", False: "FAILED"}
    lines = [("check", "of", "found", "required", "")]
    lines += [(r.what, r.detail, r.found, r.required, verdicts[r.ok]) for r in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(5)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def run(bench: Bench) -> list[Row]:
    """All rows, the same on every rank."""
    parts = (check_exactness, measure_bandwidth, measure_overlap, measure_newton_schulz)
    return [row for part in parts for row in part(bench)]


def main() -> int:
    """Check, measure, print."""
    chosen = parse()
    bench = start(chosen.device, chosen.quick)
    rows = run(bench)
    failed = bench.largest(float(sum(row.ok is False for row in rows)))
    if dist.get_rank() == 0:
        name = torch.cuda.get_device_name() if chosen.device == "cuda" else "cpu"
        print(f"{bench.ranks} ranks, {name}, torch {torch.__version__}\n\n{table(rows)}\n", flush=True)
        print("differences are the largest ones, over the RMS change of their matrix")
        print(f"{failed:.0f} checks failed" if failed else "all checks passed", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # gloo's threads now and then abort a process that takes its time to end
