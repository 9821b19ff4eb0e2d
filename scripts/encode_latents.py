"""Latents of an image folder by an autoencoder, for data.source latents; on any number of ranks.

    python scripts/encode_latents.py IMAGES --vae FOLDER --image-size 256 --out LATENTS
    torchrun --nproc-per-node N scripts/encode_latents.py ...      the same bytes, N parts at once

IMAGES has one folder of images a class, which are cropped to the centre as by ADM; FOLDER is what diffusers'
AutoencoderKL.save_pretrained writes. LATENTS gets mean and log-variance of each posterior, neither shifted nor scaled,
in parts that appear whole: the same command goes on where it was stopped, and does no more than write the new scale
where only scaling_factor or shift_factor has changed. --json FILE.json takes what LATENTS/manifest.json has:

    settings      vae, image_size, mirrored, dtype, batch, part, classes, names_sha256
    and beside    latent_shape, latent_mean, latent_std (of posterior samples, a number a channel, not scaled), parts

Exit codes: 0 done, 2 bad input, 85 asked to stop; torchrun turns each but 0 into 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dit_train import console, exits
from dit_train.command_line import Parser, new_file, positive, refuse
from dit_train.config import ConfigError, ParallelConfig
from dit_train.data import autoencoder, folder
from dit_train.data.autoencoder import Autoencoder
from dit_train.data.latents import LABELS, MANIFEST
from dit_train.parallel.mesh import World, joined
from dit_train.run import faults
from dit_train.run.stop import StopRequest
from dit_train.run.tracking import countdown
from eval.files import FolderLock, replacing
from eval.ranks import from_main, raise_together
from eval.threads import WORKERS

_DTYPES = {"fp16": np.float16, "fp32": np.float32}
_AHEAD = 3
"""Batches of images that are read while one is encoded."""


class Stopped(Exception):
    """A rank was asked to stop."""


@dataclass(frozen=True)
class Part:
    """A run of images whose latents are one file."""

    file: str
    first: int
    count: int
    mirrored: bool


@dataclass(frozen=True)
class Job:
    """All that is to be done."""

    images: list[str]
    labels: np.ndarray
    settings: dict[str, Any]
    parts: list[Part]
    latent_shape: tuple[int, int, int]
    """[C, h, w]"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        if options.json is not None and options.json.suffix != ".json":
            raise ConfigError(f"--json: {options.json} must end in .json")
        with StopRequest() as stop, joined(ParallelConfig(device=options.device)) as world:
            encode(options, world, stop)
    except Stopped:
        _say("stopped; the same command goes on")
        return exits.STOPPED
    except (ValueError, OSError) as error:
        return refuse(f"encode_latents.py: {error}")
    return exits.DONE


def encode(options: argparse.Namespace, world: World, stop: StopRequest) -> None:
    """Encode what is missing; all ranks return or raise together."""
    job = _job(options)
    told = from_main(lambda: job.settings)
    other = "" if told == job.settings else f"rank {world.rank} sees other images or another autoencoder than rank 0"
    raise_together(ConfigError(f"{other}; they must lie on a disk that all hosts share") if other else None)
    locked: list[FolderLock] = []
    try:
        left = from_main(lambda: _begin(options.out, job, locked))
        vae = autoencoder.load(options.vae, str(world.device)) if left else None
        made = 0
        report = _reporter(left, world)
        for first in range(0, len(left), world.size):
            mine = left[first + world.rank : first + world.rank + 1]
            error = None
            try:
                for part in mine:
                    _encode_part(job, part, vae, options.out, lambda done, before=made: report(before, done), stop)
            except Stopped:
                pass
            except (ValueError, OSError) as problem:
                error = problem if isinstance(problem, ValueError) else ValueError(f"{options.out}: {problem}")
            raise_together(error)
            if faults.any_asked(stop.asked):
                raise Stopped
            made += sum(part.count for part in left[first : first + world.size])
        manifest = from_main(lambda: _finished(options.out / MANIFEST, job)) if not left else None
        manifest = manifest or _finish(options.out, job, world)
    finally:
        for lock in locked:
            lock.release()
    if world.is_main:
        _tell(options, manifest, made)


def _job(options: argparse.Namespace) -> Job:
    info = autoencoder.inspect(options.vae)
    if options.image_size % info.factor:
        raise ConfigError(f"--image-size: {options.image_size} is no multiple of {info.factor}, as {info.name} needs")
    by_class = folder.listing(str(options.images), "IMAGES")
    images = [file for files in by_class.values() for file in files]
    settings = {
        "vae": {
            "name": info.name,
            "sha256": info.sha256,
            "encoder_sha256": info.encoder_sha256,
            "shift": list(info.shift),
            "scale": list(info.scale),
        },
        "image_size": options.image_size,
        "mirrored": options.flip,
        "dtype": options.dtype,
        "batch": options.batch,
        "part": options.part,
        "classes": list(by_class),
        "names_sha256": folder.names_sha256(by_class),
    }
    starts = range(0, len(images), options.part)
    parts = [
        Part(f"{kind}-{number:05d}.npy", first, min(options.part, len(images) - first), kind == "mirrored")
        for kind in ("part", *(["mirrored"] if options.flip else []))
        for number, first in enumerate(starts)
    ]
    side = options.image_size // info.factor
    return Job(images, folder.labels_of(by_class), settings, parts, (info.channels, side, side))


def _begin(out: Path, job: Job, locked: list[FolderLock]) -> list[Part]:
    """Make the folder ours and say which parts are missing. Rank 0 only.

    Raises:
        ConfigError: it holds something else, or latents of other settings; nothing is changed.
    """
    manifest = out / MANIFEST
    if manifest.is_file():
        _agree(manifest, job)
    elif out.exists() and (not out.is_dir() or any(not path.name.startswith(".") for path in out.iterdir())):
        raise ConfigError(f"--out: {out} holds other files; name a new or empty folder")
    out.mkdir(parents=True, exist_ok=True)
    locked.append(FolderLock(out, out))
    for leftover in out.glob(".*.tmp"):
        leftover.unlink(missing_ok=True)
    if not manifest.is_file():
        _write_json(manifest, {"settings": job.settings})
    _save(out / LABELS, job.labels)
    return [part for part in job.parts if not _is_there(out, part, job)]


def _agree(manifest: Path, job: Job) -> None:
    """Refuse to go on with other settings; the decoder's weights, shift and scale do not touch what is stored."""
    try:
        before = json.loads(manifest.read_text())["settings"]
        before["encoder"] = before.pop("vae")["encoder_sha256"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError(f"--out: {manifest} is no manifest of latents; name another folder") from None
    now: dict[str, Any] = {"encoder": job.settings["vae"]["encoder_sha256"], **job.settings}
    del now["vae"]
    for key, value in now.items():
        if before.get(key) != value:
            brief = f"{key} {before.get(key)}, now it is {value}" if isinstance(value, int | str) else f"other {key}"
            raise ConfigError(
                f"--out: {manifest.parent} was begun with {brief}; go on with the same settings, or name another folder"
            )


def _is_there(out: Path, part: Part, job: Job) -> bool:
    try:
        found = np.load(out / part.file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return False
    channels, *sides = job.latent_shape
    return found.shape == (part.count, 2 * channels, *sides) and found.dtype == _DTYPES[job.settings["dtype"]]


def _encode_part(
    job: Job, part: Part, vae: Autoencoder, out: Path, progress: Callable[[int], None], stop: StopRequest
) -> None:
    """Write one part. Raises `Stopped`, or `ConfigError` for an image that cannot be read."""
    channels, *sides = job.latent_shape
    made = np.empty((part.count, 2 * channels, *sides), _DTYPES[job.settings["dtype"]])
    done = 0
    for pixels in _batches(job, part):
        if stop.asked:
            raise Stopped
        moments = vae.moments(torch.from_numpy(pixels[..., ::-1].copy() if part.mirrored else pixels)).numpy()
        with np.errstate(over="ignore"):
            made[done : done + len(moments)] = moments
        if not np.isfinite(made[done : done + len(moments)]).all():
            name = job.images[part.first + done]
            raise ConfigError(f"--dtype: latents are not finite in {job.settings['dtype']}, near {name}; take fp32")
        done += len(moments)
        progress(done)
    _save(out / part.file, made)


def _batches(job: Job, part: Part) -> Iterator[np.ndarray]:
    """The part's images, uint8 [B, 3, H, W] in order, read ahead by threads."""
    size, batch = job.settings["image_size"], job.settings["batch"]
    names = job.images[part.first : part.first + part.count]
    chunks = deque(names[i : i + batch] for i in range(0, len(names), batch))
    with ThreadPoolExecutor(WORKERS) as pool:
        waiting: deque = deque()
        try:
            while chunks or waiting:
                while chunks and len(waiting) <= _AHEAD:
                    waiting.append([pool.submit(folder.decode, name, size) for name in chunks.popleft()])
                yield np.stack([image.result() for image in waiting.popleft()])
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _finish(out: Path, job: Job, world: World) -> dict[str, Any]:
    """Measure all parts, by as many ranks as there are and added up in their order, and complete the manifest."""
    mine, error = {}, None
    try:
        mine = {part.file: _measure(out / part.file) for part in job.parts[world.rank :: world.size]}
    except (ValueError, OSError) as problem:
        error = ConfigError(f"--out: {out}: {problem}; do all ranks see this disk?")
    raise_together(error)
    told: list[dict[str, Any]] = [mine] * world.size
    torch.distributed.all_gather_object(told, mine)
    sums = {file: found for one in told for file, found in one.items()}
    plain = [sums[part.file] for part in job.parts if not part.mirrored]
    count, first, second = (sum(np.asarray(found[i]) for found in plain) for i in range(3))
    mean = first / count
    manifest = {
        "settings": job.settings,
        "latent_shape": list(job.latent_shape),
        "latent_mean": mean.tolist(),
        "latent_std": np.sqrt(second / count - mean**2).tolist(),
        "parts": [
            {"file": part.file, "count": part.count, "mirrored": part.mirrored, "sha256": sums[part.file][3]}
            for part in job.parts
        ],
    }
    from_main(lambda: _write_json(out / MANIFEST, manifest))
    return manifest


def _finished(path: Path, job: Job) -> dict[str, Any] | None:
    """The manifest of finished latents, with the present settings. Rank 0 only."""
    found = json.loads(path.read_text())
    if "parts" not in found:
        return None
    if found["settings"] != job.settings:
        found["settings"] = job.settings
        _write_json(path, found)
    return found


def _measure(path: Path) -> tuple[int, np.ndarray, np.ndarray, str]:
    """(values a channel, their sum [C], the expected sum of squares [C] of posterior samples, SHA-256 of the file)."""
    moments = np.load(path, mmap_mode="r", allow_pickle=False)
    channels = moments.shape[1] // 2
    first, second = np.zeros(channels), np.zeros(channels)
    for start in range(0, len(moments), 1024):
        mean, log_variance = np.split(moments[start : start + 1024].astype(np.float64), 2, axis=1)
        first += mean.sum((0, 2, 3))
        second += (mean**2 + np.exp(log_variance)).sum((0, 2, 3))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return moments.size // (2 * channels), first, second, digest


def _save(path: Path, array: np.ndarray) -> None:
    with replacing(path) as file:
        np.save(file, array, allow_pickle=False)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with replacing(path) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())


def _reporter(left: list[Part], world: World) -> Callable[[int, int], None]:
    """Says now and then how far all ranks are, of whom this one tells its own pace; on rank 0."""
    total, left_to_say = sum(part.count for part in left), countdown("images", _say)

    def report(before: int, done: int) -> None:
        if world.is_main:
            left_to_say(min(before + done * world.size, total), total)

    return report


def _tell(options: argparse.Namespace, manifest: dict[str, Any], made: int) -> None:
    if options.json is not None:
        _write_json(options.json, manifest)
    count = sum(part["count"] for part in manifest["parts"])
    vae = manifest["settings"]["vae"]
    stds = [std * scale for std, scale in zip(manifest["latent_std"], vae["scale"], strict=True)]
    _say(f"{count:,} latents of {manifest['latent_shape']} in {options.out}, {made:,} made now")
    _say(f"standard deviation a channel, scaled: {', '.join(f'{std:.2f}' for std in stds)} (about 1 is right)")


def _say(text: str) -> None:
    if int(os.environ.get("RANK", 0)) == 0:
        console.out(text)


def _parser() -> Parser:
    parser = Parser(prog="encode_latents.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("images", type=Path, metavar="IMAGES")
    parser.add_argument("--vae", required=True, metavar="FOLDER", help="of an AutoencoderKL")
    parser.add_argument("--image-size", type=positive, required=True, metavar="PIXELS")
    parser.add_argument("--out", type=Path, required=True, metavar="LATENTS")
    parser.add_argument("--flip", action="store_true", help="encode mirrored images too; training then takes either")
    parser.add_argument("--dtype", choices=tuple(_DTYPES), default="fp16", help="of what is stored (fp16)")
    parser.add_argument("--batch", type=positive, default=64, help="images at once on a rank (64)")
    parser.add_argument("--part", type=positive, default=16384, help="images a file (16384)")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--json", type=new_file, metavar="FILE.json", help="write the manifest there too")
    return parser


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.exit(code)
