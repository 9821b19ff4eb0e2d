"""``dit_train launch``: check everything, run torchrun in this process, return the run's own exit code.

torchrun turns every exit code of its ranks into 1 and prints a page about it; here the ranks leave their code in
RUN/exit.json and this process passes it on.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from dit_train import exits
from dit_train.config import Config

_SHUTDOWN_SECONDS = 300
"""How long ranks that were asked to stop may take to save."""


def launch(config: Config, ranks: int, arguments: Sequence[str]) -> int:
    """Train on `ranks` local ranks with these config arguments (already checked); signals reach every rank."""
    os.environ[exits.LAUNCHED] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    exits.forget(config.run.folder)
    failure = _torchrun(ranks, arguments)
    code = exits.recorded(config.run.folder)
    if code is not None:
        return code
    return failure or exits.FAILED


def _torchrun(ranks: int, arguments: Sequence[str]) -> int:
    """Run the ranks; 0, or a code for how torchrun itself ended."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    options = [
        "--standalone",
        f"--nproc-per-node={ranks}",
        f"--signals-to-handle={','.join(exits.STOP_SIGNALS)}",
        f"--shutdown-timeout={_SHUTDOWN_SECONDS}",
        "--module",
        "dit_train",
    ]
    try:
        run(parse_args([*options, *arguments]))
    except ChildFailedError:
        return exits.FAILED  # the rank has told its own story on stderr
    except SignalException as stopped:
        return 128 + signal.Signals(stopped.sigval).value
    return exits.DONE
