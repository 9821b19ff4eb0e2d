"""Times our training step beside the same model written plainly, and our loop beside a bare one, in turns.

usage: python scripts/bench_training.py step --json FILE
       torchrun --nproc-per-node 2 scripts/bench_training.py loop [CONFIG...] --json FILE [--section.key VALUE ...]

step: forward, backward and AdamW of DiT-B/2 in one process, without FSDP2: our model and optimizer against a model laid
out as DiT's authors have it (training_bench/plain.py; with the same weights) and torch's fused AdamW.

loop: a run by CONFIG (default configs/quickstart/base.yaml) as users start it, with all that it does at every step:
data, average, clipping, judging, metrics, TensorBoard, watchdog; against forward, backward, clipping and torch's fused
AdamW of the same model under a plain fully_shard, on one batch for ever. Checkpoints, scores and held-out losses are
left out. Ten steps of ours, ten bare ones, ten bare ones that average the weights as well, and again.

A throughput is that of ours over the other's, of neighbours in time: above 1 ours is faster.

FILE holds
  torch, device, processor, ranks, threads, rounds, dtype, batch, parameters: what ran, batch over all ranks;
  of step:
    ours, plain: medians of step, gradients (forward and backward) and update (the optimizer), in milliseconds;
    throughput_step, throughput_gradients, throughput_update: median, low and high (quartiles);
  of loop:
    ours_ms, bare_ms, bare_averaging_ms: medians of a step;
    throughput, throughput_averaging: against either: median, low and high (quartiles).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from dit_train.command_line import Parser, new_file, positive, refuse
from dit_train.config import Config, ConfigError, ModelConfig

QUICKSTART = "configs/quickstart/base.yaml"


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The command line, and its --section.key arguments."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("what", choices=("step", "loop"))
    parser.add_argument("configs", nargs="*", metavar="CONFIG", help="loop: YAML files")
    parser.add_argument("--json", type=new_file, required=True, metavar="FILE", help="where all numbers go")
    parser.add_argument("--rounds", type=positive, default=20, help="turns of each (default 20)")
    parser.add_argument("--batch", type=positive, default=4, help="step: images (default 4)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="step: bf16 is autocast of both")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="step: default cuda if there is one")
    parser.add_argument("--smoke", action="store_true", help="step: a tiny model: whether it runs, not how fast")
    chosen, words = parser.parse_known_args(arguments)
    if chosen.rounds < 2:
        parser.error(f"--rounds is {chosen.rounds} but has to be at least 2")
    if chosen.what == "step" and (words or chosen.configs):
        parser.error(f"step takes no {[*chosen.configs, *words][0]}")
    return chosen, words


def measure_step(chosen: argparse.Namespace) -> dict[str, Any]:
    """What FILE holds of a step."""
    import torch
    from training_bench import step

    from dit_train.model.sizes import sized
    from dit_train.parallel.precision import DTYPES

    device = torch.device(chosen.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    size, side = (ModelConfig(width=32, depth=2, heads=2), 8) if chosen.smoke else (sized("B"), 32)
    found = step.measure(size, side, chosen.batch, chosen.rounds, DTYPES[chosen.dtype], device)
    return {**machine(device), "rounds": chosen.rounds, "dtype": chosen.dtype, "batch": chosen.batch, **found}


def measure_loop(chosen: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    """What FILE holds of a loop.

    Raises:
        ConfigError: for settings that do not fit together or that a bare loop does not have.
    """
    from training_bench import loop

    folder = chosen.json.absolute().with_suffix(".run")
    if folder.exists():
        raise ConfigError(f"{folder} is left of an earlier benchmark; remove it")
    config: Config = loop.settings(chosen.configs or [QUICKSTART], words, chosen.rounds, folder)
    found, device = loop.measure(config)
    if int(os.environ.get("RANK", 0)) == 0:
        shutil.rmtree(folder)
    train = config.train
    return {**machine(device), "rounds": chosen.rounds, "dtype": train.compute_dtype, "batch": train.batch, **found}


def machine(device: Any) -> dict[str, Any]:
    """Where it was measured: kinds of things, no names."""
    import torch
    from optimizer_bench.worker import processor

    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "processor": processor(),
        "ranks": int(os.environ.get("WORLD_SIZE", 1)),
        "threads": torch.get_num_threads(),
    }


def text(result: dict[str, Any]) -> str:
    """One line for each throughput."""
    names = [key for key in result if key.startswith("throughput")]
    return "\n".join(
        f"{name:22} {result[name]['median']:.3f}  ({result[name]['low']:.3f} to {result[name]['high']:.3f})"
        for name in names
    )


def main() -> int:
    """Measure, print the throughputs, write the file."""
    chosen, words = parse()
    try:
        result = measure_loop(chosen, words) if chosen.what == "loop" else measure_step(chosen)
    except ConfigError as error:
        return refuse(f"bench_training.py: {error}")
    if int(os.environ.get("RANK", 0)) == 0:
        chosen.json.write_text(json.dumps(result, indent=1) + "\n")
        print(text(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
