"""What the commands in scripts/ have in common: one line and exit code 2 for whatever they cannot work with."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

from dit_train import console, exits

_SECONDS_FOR_RANK_0 = 5
"""What all ranks meet, rank 0 tells: torchrun ends the others when it leaves. What one meets alone, it tells itself."""

_PICTURES = (".png", ".pdf", ".svg")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, also those of its commands."""

    def error(self, message: str) -> NoReturn:
        """End with code 2."""
        sys.exit(refuse(f"{self.prog}: {message.removeprefix('argument ')}; see --help"))


def refuse(text: str) -> int:
    """Tell on stderr, as one line, why nothing is done; returns the exit code."""
    if int(os.environ.get("RANK", 0)):
        time.sleep(_SECONDS_FOR_RANK_0)
    console.err(" ".join(text.split()))
    return exits.BAD_INPUT


def new_file(text: str) -> Path:
    """The type of an argument that names a file to be written: known to fit before any work is done.

    Nothing is opened or made to find out, since other ranks look at the same time.
    """
    path = Path(text)
    try:
        folder = path.resolve().parent  # of what a link names
        if path.is_dir() or not folder.is_dir():
            raise argparse.ArgumentTypeError(f"{path} cannot be written: name a file in a folder that exists")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise PermissionError(errno.EACCES, "no permission")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be written ({error.strerror}); name another") from None
    return path


def new_picture(text: str) -> Path:
    """The type of an argument that names a picture to be written, as ``new_file``."""
    if Path(text).suffix not in _PICTURES:
        raise argparse.ArgumentTypeError(f"{text} names no picture: end it with {', '.join(_PICTURES)}")
    return new_file(text)


def positive(text: str) -> int:
    """The type of an argument that counts something."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return value
