"""Times the evaluation's arithmetic beside torchmetrics' on the same precomputed features, all in one run.

usage: python scripts/bench_eval.py --json FILE

Ours and theirs take turns on the same batches, so that whatever else the machine does hits both; a ratio is the median
of the ratios of neighbouring turns, theirs over ours: above 1 ours is faster. Extractors take no part.

FILE holds
  torch, torchmetrics, device, threads, batch, rounds, updates (in a turn);
  update.<d>: our_ms, their_ms (medians of one update), ratio, ratio_low, ratio_high (quartiles over the rounds);
  frechet.<d>: first, next (seconds of a Fréchet distance, and of another against the same reference, whose root is
  kept; also for d = 512, and on a CPU not for 2048, where it takes a minute).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance

from dit_train.command_line import Parser, new_file, positive
from eval.frechet import frechet
from eval.statistics import GaussianStats

SIZES = (1280, 2048)  # EfficientNet-Lite0, the FID network


class Given(nn.Module):
    """Passes features on as an extractor of torchmetrics, which brings them as [N, d, 1, 1]."""

    def __init__(self, num_features: int):
        super().__init__()
        self.num_features = num_features

    def forward(self, x: Tensor) -> Tensor:
        """[N, d, 1, 1] to [N, d]."""
        return x.flatten(1)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=new_file, required=True, metavar="FILE", help="where all numbers go")
    parser.add_argument("--device", default="cpu", help="where sums lie (default cpu)")
    parser.add_argument("--batch", type=positive, default=64, help="features in an update (default 64)")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each side (default 15)")
    parser.add_argument("--updates", type=positive, default=8, help="updates in a turn (default 8)")
    parser.add_argument("--smoke", action="store_true", help="few features and turns: whether it runs, not how fast")
    chosen = parser.parse_args(arguments)
    if chosen.rounds < 2:
        parser.error(f"--rounds is {chosen.rounds} but has to be at least 2")
    return chosen


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    """How long ``work`` takes, the device's share included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def time_update(d: int, batch: int, rounds: int, updates: int, device: torch.device) -> dict[str, float]:
    """Our ``GaussianStats.update`` and torchmetrics' ``update`` in turns on fp32 features [batch, d]."""
    features = torch.randn(batch, d, generator=torch.Generator().manual_seed(0)).relu().to(device)
    images = features[:, :, None, None]
    ours = GaussianStats(d, device)
    theirs = FrechetInceptionDistance(feature=Given(d)).set_dtype(torch.float64).to(device)
    sides: list[Callable[[], None]] = [lambda: ours.update(features), lambda: theirs.update(images, real=True)]
    for side in sides:
        side()
    times: list[list[float]] = [[], []]
    for turn in range(rounds):
        for which in (0, 1) if turn % 2 else (1, 0):  # neither is always the first
            work = sides[which]
            times[which].append(seconds(lambda work=work: [work() for _ in range(updates)], device) / updates)
    ratios = [their / our for our, their in zip(*times, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    our_ms, their_ms = (1000 * statistics.median(side) for side in times)
    return {
        "our_ms": our_ms,
        "their_ms": their_ms,
        "ratio": statistics.median(ratios),
        "ratio_low": low,
        "ratio_high": high,
    }


def time_frechet(d: int, device: torch.device) -> dict[str, float]:
    """Seconds of a distance between statistics of 2·d features, and of another to the same reference."""
    made = []
    for seed in range(3):
        made.append(GaussianStats.of(torch.randn(2 * d, d, generator=torch.Generator().manual_seed(seed)), device))
    return {
        name: seconds(lambda x=x: frechet(x, made[0]), device)
        for name, x in zip(("first", "next"), made[1:], strict=True)
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table and write FILE."""
    chosen = parse(arguments)
    device = torch.device(chosen.device)
    sizes, rounds, updates = ((16, 32), 2, 1) if chosen.smoke else (SIZES, chosen.rounds, chosen.updates)
    decomposed = sizes if chosen.smoke else [d for d in (512, *SIZES) if d < 2048 or device.type == "cuda"]
    result: dict[str, Any] = {
        "torch": str(torch.__version__),
        "torchmetrics": torchmetrics.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "batch": chosen.batch,
        "rounds": rounds,
        "updates": updates,
        "update": {str(d): time_update(d, chosen.batch, rounds, updates, device) for d in sizes},
        "frechet": {str(d): time_frechet(d, device) for d in decomposed},
    }
    chosen.json.write_text(json.dumps(result, indent=1) + "\n")
    print("| d | ours, ms an update | torchmetrics, ms | ratio (quartiles) |\n|---|---|---|---|")
    for d, row in result["update"].items():
        quartiles = f"{row['ratio_low']:.2f} … {row['ratio_high']:.2f}"
        print(f"| {d} | {row['our_ms']:.2f} | {row['their_ms']:.2f} | {row['ratio']:.2f} ({quartiles}) |")


if __name__ == "__main__":
    main()
