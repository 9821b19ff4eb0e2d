"""``python -m dit_train verify RUN...``: whether checkpoints are what was written, read whole. Imports no torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm import tqdm

from dit_train import console, exits
from dit_train.checkpoint import files, listing, metadata
from dit_train.checkpoint.listing import Checkpoint
from dit_train.checkpoint.manifest import damaged
from dit_train.config import ConfigError

USAGE = """\
usage: python -m dit_train verify RUN...

Reads every checkpoint of the run folders and compares each file with the SHA-256 of its save; a line a checkpoint.
Returns 0 if all are sound, 2 if one is damaged or a folder has none. Changes nothing.
"""


def main(words: Sequence[str]) -> int:
    """Check run folders; the exit code."""
    if not words or {"-h", "--help"} & set(words):
        console.out(USAGE)
        return exits.DONE if words else exits.BAD_INPUT
    return max(verify(word) for word in words)


def verify(run: str | Path) -> int:
    """Check a run folder's checkpoints and print what is found; `exits.DONE` or `exits.BAD_INPUT`."""
    folders = listing.committed(run)
    if not folders:
        console.err(f"dit_train: {run}: no checkpoint there; name a run folder")
        return exits.BAD_INPUT
    broken = 0
    for folder in folders:
        try:
            console.out(check(folder))
        except ConfigError as error:
            broken += 1
            console.err(f"dit_train: {error}")
    for path in listing.remains(run):
        console.out(f"{path}: left by a save that is running or was cut off; the next one removes it")
    if broken:
        console.out(f"{run}: {broken} of {len(folders)} checkpoints damaged")
    return exits.BAD_INPUT if broken else exits.DONE


def check(folder: Path) -> str:
    """A line about a sound checkpoint.

    Raises:
        ConfigError: it is damaged or doctored.
    """
    checkpoint = listing.read(folder)
    often = 0.2 if sys.stderr.isatty() else 10.0  # seconds
    with tqdm(total=checkpoint.bytes, unit="B", unit_scale=True, desc=folder.name, delay=2, mininterval=often) as bar:
        check_sums(checkpoint, list(checkpoint.manifest.files), bar.update)
    tensors = metadata.read(folder, checkpoint.manifest.files)
    numbers = sum(math.prod(tensor.size) for tensor in tensors.values())
    return (
        f"{folder}: sound, step {checkpoint.state.step}, {len(tensors)} tensors of {numbers:,} numbers, "
        f"{len(checkpoint.manifest.files)} files, {files.size(checkpoint.bytes)}"
    )


def check_sums(
    checkpoint: Checkpoint, names: Sequence[str], progress: Callable[[int], object] = lambda _: None
) -> None:
    """Compare files of a checkpoint with their SHA-256 in the manifest; `progress` is told the bytes of each piece.

    Raises:
        ConfigError: names the first that has changed since it was written, or cannot be read.
    """
    for name in names:
        try:
            digest = files.sha256(checkpoint.folder / name, progress)
        except OSError as error:
            raise damaged(checkpoint.folder, str(error)) from None
        if digest != checkpoint.manifest.files[name].sha256:
            raise damaged(checkpoint.folder, f"{name} is not as it was written: its SHA-256 differs")
