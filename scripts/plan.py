"""Plans a training run on GPUs that are not here: memory, traffic, FLOPs and time, from the real code on fake ranks.

usage: python scripts/plan.py CONFIG... --ranks 256 --gpu h100 [--section.key VALUE ...] [--json FILE]
       python scripts/plan.py CONFIG... --ranks 256 --gpu h100 --compare FILE.png
                              [--size NAME ...] [--optimizer FILE ...]

Configs are laid over each other, then the --section.key arguments, as in training. The model sees --channels latents
of --image-size cells (those of 256 x 256 images) with --classes classes, or what the data of the config has if it names
a folder of latents, or with --own-data. Nothing is trained and no memory is taken: 15B parameters on 256 ranks take
half a minute. With ``period: auto`` it plans the period that it would take by its own, modelled times.

--compare plans every named size (1.3B to 15B) with every optimizer file (adamw, muon, muon_bp, periodic_row_muon), with
and without activation checkpointing, prints one table and draws one picture; published figures stand beside modelled
ones, those of the published form of the exchange too.

Times are modelled from stated peaks (dit_train/planning/machine.py has their sources), each of which is an option.

FILE holds machine (its settings), plans (a list) and published (of a comparison: what, published, and
modelled by exchange).

A plan holds size (of a comparison), ranks, mesh (ranks by dimension), parameters, images_a_rank, optimizer_name (in a
comparison of several of one name that of the file), period (null: no refresh), activation_checkpointing,
flops_an_image (per_token, per_image, attention, total), memory (bytes, max and mean over ranks, of parameters,
gradients, optimizer_states, average, gathered_weights, whole_gradients, activations and peak; peak_in says when; of one
plan also peak_without_checkpointing and peak_with_full_checkpointing, which are rows of a comparison), model_traffic
(forward, backward, rest: collectives and bytes_sent of a rank in a step), optimizer (refresh, between: flops,
bytes_sent, collectives, buckets, seconds; bytes_a_step, mean over a period), time (seconds: forward, backward,
second_pass, rest, waiting_for_links, optimizer, step; optimizer_share, against_adamw, tflops, mfu, images_a_second),
time_if_gathered (of a comparison: time of the published form), periods (1 to 16: period, step_seconds, against_adamw,
against_hidden), budget and smallest_period (of 1 to 64; null: none). The last three are there for optimizers with a
period alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dit_train import overlays
from dit_train.command_line import Parser, new_file, new_picture, positive, refuse
from dit_train.config import Config, ConfigError
from dit_train.data import sources
from dit_train.model.sizes import SIZES
from dit_train.optimizer_config import OptimizerConfig
from dit_train.planning.machine import MACHINES, Machine

LARGE = ("1.3B", "2.3B", "4B", "9B", "15B")
OPTIMIZERS = tuple(f"configs/optimizers/{name}.yaml" for name in ("adamw", "muon", "muon_bp", "periodic_row_muon"))
_SETTINGS = [field for field in dataclasses.fields(Machine) if field.name != "name"]


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The command line, and its --section.key arguments."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="YAML files")
    parser.add_argument("--ranks", type=positive, required=True, help="GPUs")
    parser.add_argument("--gpu", choices=tuple(MACHINES), required=True)
    parser.add_argument("--image-size", type=positive, default=32, help="side of what the model sees (default 32)")
    parser.add_argument("--channels", type=positive, default=4, help="its channels (default 4)")
    parser.add_argument("--classes", type=positive, default=1000, help="number of classes (default 1000)")
    parser.add_argument("--own-data", action="store_true", help="the shape of the data that the config names instead")
    parser.add_argument(
        "--budget", type=_share, help="overhead against AdamW to stay within (default: the optimizer's, 5%%)"
    )
    parser.add_argument("--size", action="append", choices=tuple(SIZES), help="model size; several to compare")
    parser.add_argument("--optimizer", action="append", metavar="FILE", help="optimizer config; several to compare")
    parser.add_argument("--compare", type=new_picture, metavar="FILE.png", help="all sizes and optimizers; the picture")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="where all numbers go")
    for field in _SETTINGS:
        kind = positive if field.name == "gpus_per_node" else _above_zero
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=kind, metavar="N", help="of the GPU, see machine.py"
        )
    chosen, overrides = parser.parse_known_args(arguments)
    for name in ("size", "optimizer"):
        if chosen.compare is None and len(getattr(chosen, name) or ()) > 1:
            parser.error(f"--{name}: several need --compare FILE.png")
    return chosen, overrides


def _above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def _share(text: str) -> float:
    """``5%`` or ``0.05``."""
    value = _above_zero(text.removesuffix("%"))
    return value / 100 if text.endswith("%") else value


def machine_of(chosen: argparse.Namespace) -> Machine:
    """The GPU, with what the command line says of it."""
    given = {field.name: getattr(chosen, field.name) for field in _SETTINGS}
    return dataclasses.replace(
        MACHINES[chosen.gpu], **{name: value for name, value in given.items() if value is not None}
    )


def images_of(chosen: argparse.Namespace, config: Config) -> sources.Summary:
    """What the model sees."""
    if chosen.own_data or (config.data.source == "latents" and config.data.path is not None):
        return sources.check(config.data)
    return sources.Summary(chosen.channels, chosen.image_size, chosen.classes, 0, 0)


def named(files: Sequence[str], optimizers: Sequence[OptimizerConfig]) -> dict[str, OptimizerConfig]:
    """The optimizers by what tells them apart in a comparison: their names, else those of their files, else paths."""
    for names in ([one.name for one in optimizers], [Path(file).stem for file in files]):
        if len(set(names)) == len(names):
            return dict(zip(names, optimizers, strict=True))
    return dict(zip(files, optimizers, strict=True))


def write(chosen: argparse.Namespace, numbers: dict[str, Any]) -> None:
    """The files that were asked for.

    Raises:
        OSError: one cannot be written.
    """
    if chosen.json:
        chosen.json.write_text(json.dumps(numbers, indent=1) + "\n")
        print(f"\n{chosen.json}")
    if chosen.compare:
        from dit_train.planning import compare

        compare.draw(numbers["plans"], machine_of(chosen), chosen.compare)
        print(f"\n{chosen.compare}")


def say(text: str) -> None:
    """Progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def run(chosen: argparse.Namespace, overrides: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The text and the numbers."""
    machine, sizes, files = machine_of(chosen), chosen.size or [], chosen.optimizer or []
    configs = [*chosen.configs, *([] if chosen.compare else files)]
    config = overlays.read(configs, overrides)
    images = images_of(chosen, config)
    if chosen.compare:
        from dit_train.planning import compare

        files = list(dict.fromkeys(files)) or OPTIMIZERS
        optimizers = named(files, [overlays.read([*configs, file], overrides).optimizer for file in files])
        sizes = list(dict.fromkeys(sizes)) or LARGE
        plans = compare.plans(config, images, chosen.ranks, sizes, optimizers, machine, chosen.budget, say)
        published = compare.published(plans)
        numbers = {"machine": dataclasses.asdict(machine), "plans": plans, "published": published}
        return compare.text(plans, published), numbers
    if sizes:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, **SIZES[sizes[0]]))
    from dit_train.planning import plan, report

    with plan.planned(config, images, chosen.ranks, say) as model:
        adamw = plan.plan_optimizer(plan.ADAMW, model, say)
        own = adamw if config.optimizer.name == "adamw" else plan.plan_optimizer(config.optimizer, model, say)
        budget = plan.budget_of(config.optimizer, chosen.budget)
        own = plan.settled(own, model, adamw, machine, budget)
        numbers = report.figures(model, own, adamw, machine, budget)
    memory = numbers["memory"]
    memory |= report.peaks(config, images, chosen.ranks, own, memory["peak"], say)
    return report.text(numbers, machine), {"machine": dataclasses.asdict(machine), "plans": [numbers]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan, print, write; returns the exit code."""
    chosen, overrides = parse(arguments)
    try:
        text, numbers = run(chosen, overrides)
    except ConfigError as error:
        return refuse(f"plan.py: {error}")
    print(text)
    try:
        write(chosen, numbers)
    except OSError as error:
        return refuse(
            f"plan.py: {error.filename or 'files'}: {error.strerror or error}; name another place or make room"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
