"""FID and its relatives from a checkpoint, a folder, a zip or an npz, on any number of ranks.

    python scripts/fid.py reference IMAGES --out REFERENCE.npz         statistics of real images
    torchrun --nproc-per-node N scripts/fid.py generate RUN --out OUT  images of a trained model; again, it goes on
    python scripts/fid.py score IMAGES --reference REFERENCE.npz       the record of a score, on the terminal and --json
    python scripts/fid.py compare RECORD.json ...                      records in one table, if they were taken alike

IMAGES is a folder, .zip or .npz (``arr_0`` uint8 NHWC), or the folder of a run: of its held-out images for
`reference`, of images sampled on the way, which touch no disk, for `score`. REFERENCE may as well come from the ADM,
EDM or clean-fid tools. All commands run under torchrun as well, where ranks share the work, and take --json FILE.json:

    reference   n, n_kept, name, images_sha256, image_shape, extractor, weights_sha256, resize, extractor_device,
                batch_size, first_index, last_index, torch; path, images, classes, conversions (of files); floor,
                floor_kid, floor_draws (of a run, or with --floor)
    generate    out, count, made (by this call), made_not_finite (of those); step, checkpoint_sha256, sampler, guidance,
                sample_seed, labels, classes_sha256, quantize, weights, compute_dtype (which decide the images,
                as vae_sha256 does those of latents)
    score       the record of eval.score.compare and, as for generate, how the images were made
    compare     the records by file name

Exit codes: 0 done, 2 bad input, 85 asked to stop (`generate` goes on when it is called again); torchrun turns each
but 0 into 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import eval.score
from dit_train import console, exits, rng
from dit_train.command_line import Parser, new_file, positive, refuse
from dit_train.config import ConfigError, ParallelConfig
from dit_train.data import sources
from dit_train.parallel.mesh import World, joined
from dit_train.preflight import default_extractor
from dit_train.run import faults, references, restore, sampling
from dit_train.run.folder import is_run
from dit_train.run.stop import StopRequest
from dit_train.run.tracking import countdown
from eval import extractors, records
from eval.details import check_training, details
from eval.extractors import FeatureExtractor
from eval.extrapolate import POINTS
from eval.features import Features, extract
from eval.files import replacing
from eval.images import ImageSet, open_images
from eval.protocols import INCEPTION, PROTOCOLS, Protocol, protocol
from eval.ranks import from_main
from eval.statistics import fp64_device
from eval.statistics_file import OnlyImagesError
from eval.writing import MANIFEST, read_settings, write_images


class Stopped(Exception):
    """A rank was asked to stop; raised on all."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        _check_results(options)
        with StopRequest() as stop:
            options.stop = stop
            options.command(options)
    except Stopped:
        _say("stopped" + ("; the same command goes on" if options.command is generate else ""))
        return exits.STOPPED
    except (ConfigError, ValueError, TypeError, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "on rank 0: " not in str(error):
            raise
        return refuse(f"fid.py: {error}")
    return exits.DONE


# -- commands -----------------------------------------------------------------------------------------------------


def reference(options: argparse.Namespace) -> None:
    """Statistics of real images into --out."""
    if options.out.suffix != ".npz":
        raise ConfigError(f"--out: {options.out} must end in .npz")
    wanted = protocol(options.protocol)
    with joined(ParallelConfig(device=options.device)) as world:
        if is_run(options.images):
            made = _reference_of_run(options, wanted, world)
        else:
            made = _reference_of_files(options, wanted, world)
        if not world.is_main:
            return
        made.save(options.out)
    count = "statistics of another tool" if made.stats.n is None else f"{made.stats.n:,} images"
    said = [f"{count} and features of {len(made.kept):,} images in {options.out}"]
    if "floor" in made.meta:
        floor, kid = made.meta["floor"], 1e3 * made.meta["floor_kid"]
        said.append(f"floor {floor:.2f}, KID·10³ {kid:.2f}: what other real images score")
    _tell(options, {"n": made.stats.n, "n_kept": len(made.kept), **made.meta}, said)


def _reference_of_run(options: argparse.Namespace, wanted: Protocol, world: World) -> Features:
    _refuse_idle(options, ("name", "floor", *_IMAGES), "is a run, whose data decide it")
    data = restore.reopen(options.images, vae=options.vae).config.data
    extractor = _extractor(options, wanted, default_extractor(data.source), world)
    return references.held_out(sources.load(data, str(world.device)), extractor, options.batch, options.count)


def _reference_of_files(options: argparse.Namespace, wanted: Protocol, world: World) -> Features:
    _refuse_idle(options, ("vae",), "is no run, whose latents it would decode")
    known = _statistics(options.images)
    if known is not None and not _holds_images(options.images):
        _refuse_idle(options, ("name", "floor", "count", *_IMAGES), "holds statistics and no images")
        return known
    extractor = _extractor(options, wanted, None, world)
    if known is not None and extractor.name != INCEPTION:
        raise ConfigError(f"{options.images}: its mu and sigma are of {INCEPTION}, not of {extractor.name}")
    if known is not None and options.floor is not None:
        raise ConfigError(f"--floor: {options.images} does not say of how many images its mu and sigma are")
    real = _open(options, options.images, lossy=True)
    about = {
        "name": options.name or options.images.name,
        "images_sha256": from_main(lambda: real.sha256),
        **real.describe(),
    }
    made = extract(
        real, torch.arange(len(real))[: options.count], extractor, options.batch, keep=wanted.keep, meta=about,
        labels=None if real.labels is None else lambda chosen: real.labels[chosen],
        progress=_progress(options),
    )  # fmt: skip
    if known is not None:  # ADM's file: sums over all training images, beside 10,000 images for precision and recall
        made.stats, made.spatial = known.stats, known.spatial
        made.meta |= {"file_sha256": known.meta["file_sha256"], "conversions": ["mu and sigma are those of the file"]}
        _say("mu and sigma of the file are taken; its images serve KID, precision and recall alone")
    if options.floor is not None:
        others = _open(options, options.floor, lossy=True)
        if len(others) < len(made):
            raise ConfigError(f"--floor: {len(others)} images, but the reference has {len(made)}")
        draw = torch.randperm(len(others), generator=torch.Generator().manual_seed(0))[: len(made)].sort().values
        found = eval.score.score(others, draw, made, extractor, options.batch, protocol=wanted)
        made.meta |= {"floor": found["value"], "floor_kid": found["kid"], "floor_draws": 1}
    return made


def _statistics(path: Path) -> Features | None:
    """Sums that a file holds already, None where it holds none."""
    if path.suffix == ".pkl":
        return Features.load(path)
    if path.suffix != ".npz" or not path.is_file():
        return None
    try:
        return Features.load(path)
    except OnlyImagesError:
        return None


def _holds_images(path: Path) -> bool:
    if path.suffix != ".npz":
        return False
    with np.load(path, allow_pickle=False) as file:
        return "arr_0" in file.files


def generate(options: argparse.Namespace) -> None:
    """Images of a trained model into --out; what was interrupted goes on where it was."""
    wanted = protocol(options.protocol)
    with joined(ParallelConfig(device=options.device)) as world:
        real = Features.load(options.reference) if options.reference else None
        images, indices, about = _sampled(options, wanted, real, world)
        labels = images.labels(indices) if options.out.suffix == ".npz" else None
        made = write_images(
            images,
            options.out,
            indices,
            options.batch,
            about,
            labels=labels,
            rgb=options.rgb,
            progress=_progress(options),
        )
        broken = images.count_broken()
        if not world.is_main:
            return
    said = [f"{made:,} images made, {len(indices):,} in {options.out}"]
    if broken:
        said.append(f"{broken} of those made now are black, since their values are not finite")
    found = {"out": str(options.out), "count": len(indices), "made": made, "made_not_finite": broken, **about}
    _tell(options, found, said)


def score(options: argparse.Namespace) -> None:
    """The record of images, or of what a run samples, against --reference."""
    wanted = protocol(options.protocol)
    with joined(ParallelConfig(device=options.device)) as world:
        real = Features.load(options.reference, fp64_device(world.device))
        training = Features.load(options.training) if options.training else None
        if training is not None:
            check_training(training, real)
        extractor = _extractor(options, wanted, real.meta.get("extractor"), world)
        if is_run(options.images):
            _refuse_idle(options, (*_IMAGES, "lossy"), "is a run, whose samples need none")
            images, indices, about = _sampled(options, wanted, real, world)
            labels = images.labels
        else:
            images = _open(options, options.images, lossy=options.lossy)
            _refuse_idle(options, ("labels", "step", "use", "vae", *_SAMPLED), "holds images, which are made already")
            indices, about = torch.arange(len(images))[: options.count], _made(options.images, images)
            labels = None if images.labels is None else lambda chosen: images.labels[chosen]
        if options.classes and (labels is None or real.labels is None):
            raise ConfigError("--classes: needs classes on both sides; see --class-folders")
        keep = max(wanted.keep, len(real.kept))
        if options.infinity and min(len(indices), keep) < extractor.num_features + POINTS:
            fewest = extractor.num_features + POINTS
            raise ConfigError(f"--infinity: {len(indices)} images, but {extractor.name} needs {fewest} or more")
        if about.get("quantize", wanted.quantize) != wanted.quantize:
            rule = about["quantize"]
            raise ConfigError(
                f"{options.images}: quantised by {rule!r}, but protocol {wanted.name} has {wanted.quantize!r}"
            )
        eval.score.check_comparable(len(indices), extractor, real, wanted)
        generated = extract(
            images, indices, extractor, options.batch, keep=keep, splits=wanted.splits,
            meta=about, labels=labels, progress=_progress(options), shape=real.meta.get("image_shape"),
        )  # fmt: skip
        record = eval.score.compare(generated, real, wanted)
        asked = {key: getattr(options, key) for key in ("intervals", "infinity", "classes")}
        record |= from_main(lambda: details(generated, real, training=training, **asked))
        if isinstance(images, sampling.Sampler):
            record["not_finite"] = images.count_broken()
        if not world.is_main:
            return
    said = [records.table({str(options.images): record}), *records.notes(record)]
    said.append(f"protocol {wanted.name}: meant against {wanted.reference}, here against {record['reference']}")
    if record["rank_deficient"]:
        read = "compare with the floor only" if "floor" in record else "without a floor it says little"
        said.append(f"{len(generated)} images in {record['num_features']} features: {read}")
    _tell(options, record, said)


def compare(options: argparse.Namespace) -> None:
    """Records in one table; those of other protocols only with --force."""
    found = {str(path): _record(path) for path in options.records}
    try:
        records.check_alike(found)
    except records.Incomparable as error:
        if not options.force:
            raise ConfigError(f"{error}; --force prints them all the same") from None
        _say(f"not alike: {error}")
    _tell(options, found, [records.table(found)])


def _tell(options: argparse.Namespace, found: dict[str, Any], said: Sequence[str]) -> None:
    """Write --json and say the rest, in this order: a terminal that is gone must not cost what took hours."""
    if int(os.environ.get("RANK", 0)):
        return
    if options.json is not None:
        text = json.dumps(found, indent=1, allow_nan=False) + "\n"
        try:
            with replacing(options.json) as file:
                file.write(text.encode())
        except OSError:
            _say(text)
            raise
    for line in said:
        _say(line)


# -- parts --------------------------------------------------------------------------------------------------------


def _check_results(options: argparse.Namespace) -> None:
    """Refuse results that would take the place of something else, before any work."""
    given = [value for key, value in vars(options).items() if isinstance(value, Path) and key not in ("json", "out")]
    given += getattr(options, "records", [])
    out = getattr(options, "out", None)
    if options.json is not None:
        if options.json.suffix != ".json":
            raise ConfigError(f"--json: {options.json} must end in .json")
        whole = [*given, *([] if out is None else [out])]
        packed = [path for path in whole if path.suffix.lower() in (".npz", ".zip")]
        parts = [*(path.with_name(path.name + ".json") for path in packed), *(path / MANIFEST for path in whole)]
        if options.json.resolve() in {path.resolve() for path in (*whole, *parts)}:
            raise ConfigError(f"--json: {options.json} is read or written already; name another file")
    fits = out is None or (out.resolve() not in {path.resolve() for path in given} and _is_reference(out))
    if options.command is reference and out.exists() and not fits:
        raise ConfigError(f"--out: {out} is there and no reference of ours; take it away or name another file")


def _is_reference(path: Path) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as file:
        return {"mu.npy", "sigma.npy", "features.npy"} <= set(file.namelist())


def _refuse_idle(options: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Refuse arguments that would do nothing for these IMAGES."""
    for name in names:
        if (given := getattr(options, name)) is not None and given is not False:
            raise ConfigError(f"--{name.replace('_', '-')}: {options.images} {why}; leave it out")


def _progress(options: argparse.Namespace) -> Callable[[int, int], None]:
    """Says how far it is, and raises `Stopped` on all ranks once one was asked to stop."""
    left = countdown("images", _say)

    def progress(done: int, total: int) -> None:
        left(done, total)
        if done < total and faults.any_asked(options.stop.asked):
            raise Stopped

    return progress


def _sampled(
    options: argparse.Namespace, wanted: Protocol, real: Features | None, world: World
) -> tuple[sampling.Sampler, Tensor, dict[str, Any]]:
    """(images by index, the indices, what they depend on) of a run's samples."""
    # one rank looks for the newest: a run that still trains may save another meanwhile
    step = from_main(lambda: restore.reopen(options.images, options.step, options.vae).checkpoint.state.step)
    trained = restore.reopen(options.images, step, options.vae)
    if not sampling.can_decode(trained.config.data):
        raise ConfigError(f"--vae: {options.images} makes latents; name the folder of their autoencoder")
    changed = {key: getattr(options, key) for key in (*_SAMPLED, "batch") if getattr(options, key) is not None}
    config = dataclasses.replace(trained.config, sample=dataclasses.replace(trained.config.sample, **changed))
    law, use = options.labels or wanted.labels, options.use or "ema"
    count = options.count or wanted.count or (real.stats.n if real else None)
    if count is None:
        raise ConfigError(f"--count: protocol {wanted.name} leaves open how many images; name a number")
    labels = _labels(law, count, trained.images.num_classes, config.sample.seed, real)
    about = {
        "step": trained.checkpoint.state.step,
        "checkpoint_sha256": trained.checkpoint.sha256,
        **sampling.provenance(
            config,
            trained.checkpoint.state.compute_dtype,
            law,
            labels(torch.arange(count)),
            use,
            wanted.quantize,
        ),
    }
    model = trained.model(world, use)
    sampler = sampling.Sampler(config, trained.images, model, world.device, labels, wanted.quantize)
    return sampler, torch.arange(count), about


def _labels(law: str, count: int, classes: int, seed: int, real: Features | None) -> Callable[[Tensor], Tensor]:
    """Classes of samples by index, by the named law."""
    if law == "random":
        return lambda chosen: torch.tensor([_draw_class(classes, seed, index) for index in chosen.tolist()])
    if law == "balanced":
        return lambda chosen: chosen % classes
    if real is None or real.labels is None:
        raise ConfigError("--labels reference: needs a --reference that holds classes; use random or balanced")
    held = real.labels
    if int(held.max()) >= classes:
        raise ConfigError(f"--labels reference: it holds class {int(held.max())}, but the model has {classes} classes")
    if count < len(held):  # of all classes, also where the reference is sorted by them
        held = held[torch.arange(count) * len(held) // count]
    return lambda chosen: held[chosen % len(held)]


def _draw_class(classes: int, seed: int, index: int) -> int:
    return int(rng.stream(seed, "sample-label", index).integers(classes))


def _extractor(options: argparse.Namespace, wanted: Protocol, usual: str | None, world: World) -> FeatureExtractor:
    """The one asked for, the protocol's, or the usual one."""
    name = options.extractor or wanted.extractor or usual
    if name is None:
        raise ConfigError(
            f"--extractor: nothing tells which network to take; name one of {', '.join(extractors.NAMES)}"
        )
    try:
        extractor = extractors.load(name, options.weights, str(world.device))
    except (ValueError, OSError) as error:
        raise ConfigError(str(error).replace("weights=", "--weights ")) from None
    wanted.check(extractor)
    return extractor


def _open(options: argparse.Namespace, path: Path, *, lossy: bool) -> ImageSet:
    try:
        images = open_images(
            path,
            value_range=options.value_range,
            background=options.background,
            center_crop_adm=options.center_crop_adm,
            lossy=lossy,
            class_folders=options.class_folders,
        )
    except ValueError as error:
        raise ConfigError(_KEYWORD.sub(_as_flag, str(error))) from None
    if options.count is not None and options.count > len(images):
        raise ConfigError(f"--count: {options.count}, but {path} holds {len(images)} images")
    _say("; ".join([f"{path}: {len(images):,} images of {list(images.shape)}", *images.conversions]))
    return images


def _made(path: Path, images: ImageSet) -> dict[str, Any]:
    """How images on disk were made: what `generate` left beside them, and what they are."""
    return {"name": str(path), "conversions": list(images.conversions), **(read_settings(path) or {})}


_KEYWORD = re.compile(r"\b(value_range|background|center_crop_adm|lossy|class_folders)=(\((\S+), (\S+)\)|'?#?\w*'?)")


def _as_flag(found: re.Match) -> str:
    """What `open_images` calls ``value_range=(0, 1)`` is ``--value-range=0..1`` here."""
    name, value, low, high = found.groups()
    value = f"{float(low):g}..{float(high):g}" if low else value.strip("'").replace("True", "")
    return f"--{name.replace('_', '-')}" + (f"={value}" if value else "")


def _record(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise ConfigError(f"{path}: a folder, no record of a score; scripts/compare.py compares runs")
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError):
        found = None
    try:
        records.check(found)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; write it with fid.py score --json") from None
    return found


def _say(text: str) -> None:
    if int(os.environ.get("RANK", 0)) == 0:
        console.out(text)


# -- arguments ----------------------------------------------------------------------------------------------------

_SAMPLED = ("sampler", "steps", "guidance", "seed")
"""Settings of ``sample`` that a command may change, beside its batch."""
_IMAGES = ("value_range", "background", "center_crop_adm", "class_folders")
"""How images on disk are read."""


def _parser() -> Parser:
    parser = Parser(prog="fid.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    shared = Parser(add_help=False)
    shared.add_argument("--json", type=new_file, metavar="FILE.json", help="write what was found")
    computing = Parser(add_help=False)
    computing.add_argument("--protocol", default="small", metavar="NAME", help=f"{', '.join(PROTOCOLS)} (small)")
    computing.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    computing.add_argument("--batch", type=positive, default=128, help="images at once on a rank (128)")
    computing.add_argument("--vae", metavar="FOLDER", help="decodes a run's latents; data.vae without it")
    computing.add_argument("--count", type=positive, help="images; the protocol's number without it")
    seeing = Parser(add_help=False)
    seeing.add_argument("--extractor", metavar="NAME", help=", ".join(extractors.NAMES))
    seeing.add_argument("--weights", type=Path, metavar="FILE", help="weights of an extractor that comes without")
    seeing.add_argument(
        "--value-range", type=_range, metavar="LOW..HIGH", help="of an array of floats: 0..1, or =-1..1"
    )
    seeing.add_argument("--background", metavar="COLOUR", help="on which transparent images are seen")
    seeing.add_argument("--center-crop-adm", type=positive, metavar="PIXELS", help="ADM's crop of photographs")
    seeing.add_argument("--class-folders", action="store_true", help="the first folder of a path is its class")
    sampled = Parser(add_help=False)
    sampled.add_argument("--labels", choices=("random", "balanced", "reference"), help="classes; the protocol's law")
    sampled.add_argument("--step", type=int, help="of the checkpoint; the newest without it")
    sampled.add_argument("--use", choices=("ema", "model"), help="averaged or trained weights (ema)")
    sampled.add_argument("--sampler", choices=("euler", "heun"), help="instead of the run's, as the next three")
    sampled.add_argument("--steps", type=positive)
    sampled.add_argument("--guidance", type=_finite, help="1 is none")
    sampled.add_argument("--seed", type=int)

    def command(function: Callable[..., Any], *parents: Parser) -> Parser:
        one = commands.add_parser(function.__name__, parents=[shared, *parents], help=function.__doc__)
        one.set_defaults(command=function)
        return one

    one = command(reference, computing, seeing)
    one.add_argument("images", type=Path, metavar="IMAGES")
    one.add_argument("--out", type=new_file, required=True, metavar="FILE.npz")
    one.add_argument("--name", help="which images they are; the name of the file without it")
    one.add_argument("--floor", type=Path, metavar="IMAGES", help="other real images, whose score is the floor")
    one = command(generate, computing, sampled)
    one.add_argument("images", type=Path, metavar="RUN")
    one.add_argument("--out", type=Path, required=True, metavar="FOLDER|FILE.npz|FILE.zip")
    one.add_argument("--rgb", action="store_true", help="store grey images with three channels, as ADM's tool wants")
    one.add_argument("--reference", type=Path, metavar="FILE", help="whose classes --labels reference takes")
    one = command(score, computing, seeing, sampled)
    one.add_argument("images", type=Path, metavar="IMAGES")
    one.add_argument("--reference", type=Path, required=True, metavar="FILE")
    one.add_argument("--intervals", action="store_true", help="95 %% interval and standard error of the distance")
    one.add_argument("--infinity", action="store_true", help="the distance at infinitely many images (FID-infinity)")
    one.add_argument("--classes", action="store_true", help="scores class by class, into the record")
    one.add_argument("--training", type=Path, metavar="FILE", help="reference of training images: are any repeated?")
    one.add_argument("--lossy", action="store_true", help="score JPEG files, which are not what a model made")
    one = command(compare)
    one.add_argument("records", type=Path, nargs="+", metavar="RECORD.json")
    one.add_argument("--force", action="store_true", help="also records that were not taken alike")
    return parser


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no number such as 1.5")
    return value


def _range(text: str) -> tuple[float, float]:
    try:
        low, high = map(float, text.split(".."))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no LOW..HIGH such as 0..1 or =-1..1") from None
    return low, high


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # names of files and KID·10³, whatever the terminal knows
    code = main()
    sys.stdout.flush()
    sys.exit(code)
