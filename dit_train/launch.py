"""``dit_train launch``: check everything, run torchrun in this process, return the run's own exit code.

torchrun turns every exit code of its ranks into 1 and prints a page about it; here the ranks leave their code in
RUN/exit.json and this process passes it on.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from dit_train import console, exits
from dit_train.preflight import Plan
from dit_train.run import folder
from dit_train.run.stop import StopRequest, heeded

_SHUTDOWN_SECONDS = 300
"""How long ranks that were asked to stop may take to save, at least."""


def launch(plan: Plan, ranks: int, arguments: Sequence[str], stop: StopRequest) -> int:
    """Train on `ranks` local ranks with these config arguments (already checked); signals reach every rank."""
    run_folder = plan.config.run.folder
    os.environ[exits.LAUNCHED] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(shutdown_seconds(plan)))
    folder.forget(run_folder)
    failure = _torchrun(ranks, arguments, stop)
    recorded = folder.recorded(run_folder)
    if recorded is not None:
        return recorded  # even if a rank crashed afterwards, on its way out
    return exits.FAILED if failure is None else failure


def shutdown_seconds(plan: Plan) -> int:
    """Time for ranks to stop: that of three saves, as long as the last one that this run has measured."""
    saved = plan.resume.state.save_seconds if plan.resume else 0.0
    return max(_SHUTDOWN_SECONDS, math.ceil(3 * saved))


def _torchrun(ranks: int, arguments: Sequence[str], stop: StopRequest) -> int | None:
    """Run the ranks; None if all ended well, else a code for how torchrun saw them end."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    options = [
        "--standalone",
        f"--nproc-per-node={ranks}",
        f"--signals-to-handle={','.join(heeded())}",
        "--module",
        "dit_train",
    ]
    try:
        if stop.asked:  # while all this was imported
            return exits.STOPPED
        with stop.handed_over():  # torchrun takes a while before it heeds signals itself
            run(parse_args([*options, *arguments]))
    except ChildFailedError as failed:  # the rank has told its own story on stderr
        codes = {failure.exitcode for failure in failed.failures.values()}
        for rank, killed in failed.failures.items():
            if killed.exitcode < 0:  # and that one has not
                console.err(f"dit_train: rank {rank} was killed by {killed.signal_name()}")
        return next((code for code in (exits.BAD_INPUT, exits.STOPPED) if code in codes), exits.FAILED)
    except SignalException:
        return exits.STOPPED  # if before the first step, ranks had nothing to save
    return None
