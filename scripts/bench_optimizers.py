"""Times our optimizers beside torch's and others on FSDP2-sharded matrices, all in one run.

usage: python scripts/bench_optimizers.py --ranks 2 --json FILE

Starts its own ranks: on CUDA if there are enough devices, else on CPU. Prints a table and writes all numbers to FILE.
Peers are measured if they are installed: pip install muon-fsdp2 heavyball dtensor-muon.

FILE holds config, machine, optimizers (a row each), skipped (contenders, with the reason), row_step, overlap, peak
(probes of one thing each) and figures (those that the table ends with).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dit_train.command_line import Parser, new_file, refuse

LONGEST_PERIOD = 5


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True, help="how many processes share the weights, at least 2")
    parser.add_argument("--json", type=new_file, required=True, metavar="FILE", help="where all numbers go")
    parser.add_argument("--steps", type=int, default=20, help="steps of each optimizer (default 20)")
    parser.add_argument("--blocks", type=int, default=12, help="blocks of the model (default 12)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--compile", action="store_true", help="measure compiled forms too")
    parser.add_argument("--no-peers", action="store_true", help="leave other packages out, for one that hangs")
    parser.add_argument("--smoke", action="store_true", help="tiny matrices, few steps: whether it runs, not how fast")
    chosen = parser.parse_args(arguments)
    if chosen.ranks < 2:
        parser.error(f"--ranks is {chosen.ranks} but has to be at least 2")
    if chosen.steps < LONGEST_PERIOD:
        parser.error(f"--steps is {chosen.steps} but has to be at least {LONGEST_PERIOD}, the longest period")
    if chosen.blocks < 1:
        parser.error(f"--blocks is {chosen.blocks} but has to be at least 1")
    return chosen


def settings_of(chosen: argparse.Namespace) -> Any:
    """What is measured where.

    Raises:
        ValueError: for a device or an option that is not to be had here.
    """
    import torch
    from optimizer_bench.contenders import can_compile
    from optimizer_bench.problem import Settings

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if chosen.device == "cuda" and devices < chosen.ranks:
        raise ValueError(f"--device cuda needs one device a rank, {chosen.ranks}, but there are {devices}")
    if chosen.compile and not can_compile():
        raise ValueError("--compile: these optimizers have no compiled form")
    device = "cuda" if chosen.device != "cpu" and devices >= chosen.ranks else "cpu"
    steps, blocks, width = (chosen.steps, chosen.blocks, 512) if not chosen.smoke else (LONGEST_PERIOD, 4, 32)
    return Settings(chosen.ranks, steps, blocks, width, device, chosen.compile, not chosen.no_peers, chosen.smoke)


def run(settings: Any) -> dict[str, Any]:
    """Start the ranks and wait for their results."""
    import torch.multiprocessing as processes
    from optimizer_bench import worker

    os.environ["OMP_NUM_THREADS"] = str(settings.threads)  # read when a rank imports torch
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler, which counts memory, would talk between the lines
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        processes.spawn(worker.main, (settings, str(Path(folder) / "store"), str(out)), nprocs=settings.ranks)
        return json.loads(out.read_text())


def main() -> int:
    """Measure, print the table, write the file."""
    chosen = parse()
    try:
        settings = settings_of(chosen)
    except ValueError as error:
        return refuse(f"bench_optimizers.py: {error}")
    result = run(settings)
    from optimizer_bench import report

    chosen.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{report.text(result)}\n\n{chosen.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
