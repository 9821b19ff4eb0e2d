"""Lines for a person, each by one write: ranks share a terminal, torchrun runs them unbuffered, print writes twice."""

from __future__ import annotations

import sys
from typing import TextIO


def out(text: str) -> None:
    """Write a line to stdout at once."""
    _write(f"{text}\n", sys.stdout)


def err(text: str) -> None:
    """Write a line to stderr at once."""
    _write(f"{text}\n", sys.stderr)


def _write(line: str, stream: TextIO) -> None:
    stream.write(line)
    stream.flush()
