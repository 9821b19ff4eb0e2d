"""Work on many files at once, for decoders and encoders that release the interpreter's lock."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

WORKERS = min(8, os.cpu_count() or 1)


def in_threads(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """``[function(item) for item in items]`` by up to ``WORKERS`` threads, in the order of the items.

    Raises:
        Exception: what the first item in that order raised, whichever thread was faster.
    """
    if min(WORKERS, len(items)) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(WORKERS, len(items))) as pool:
        return list(pool.map(function, items))
