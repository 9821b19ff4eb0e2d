"""Work on many files at once, for decoders and encoders that release the interpreter's lock."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

WORKERS = min(8, os.cpu_count() or 1)


def in_threads(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """``[function(item) for item in items]`` by up to ``WORKERS`` threads, in the order of the items.

    ``function`` must not read ``.npy`` or ``.npz``: numpy parses their headers with ``ast``, which in CPython before
    3.11.8 and 3.12.2 fails now and then with a SystemError in two threads at once (python/cpython#106905).

    Raises:
        Exception: what the first item in that order raised, whichever thread was faster.
    """
    if min(WORKERS, len(items)) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(WORKERS, len(items))) as pool:
        return list(pool.map(function, items))
