"""``train.compute_dtype: auto`` where memory runs out in the middle of the trial, on all ranks or on one."""

import math
import threading

import pytest
import torch
import torch.distributed as dist

from dit_train.config import Config, ParallelConfig
from dit_train.parallel import precision
from dit_train.parallel.mesh import joined
from tests.distributed.ranks import RankError, run


def measured_where_fp32_does_not_fit(on: tuple[int, ...]) -> dict[str, float]:
    def trial_step(_config, _data, _world, dtype):
        def step():
            if dtype == torch.float32 and dist.get_rank() in on:
                raise torch.OutOfMemoryError
            if dtype == torch.float32:
                threading.Event().wait()  # in a collective, for the rank that has given up

        return step

    with pytest.MonkeyPatch.context() as patched, joined(ParallelConfig(device="cpu")) as world:
        patched.setattr(precision, "_trial_step", trial_step)
        patched.setattr(precision, "_SECONDS_TO_AGREE", 1.0)
        return precision.measure(Config(), None, world)


def test_a_dtype_that_fits_nowhere_is_not_taken():
    first, second = run(measured_where_fp32_does_not_fit, 2, (0, 1))
    assert first == second and 0 <= first["bf16"] < first["fp32"] == math.inf


def test_a_rank_that_alone_runs_out_of_memory_says_so_instead_of_waiting_for_ever():
    with pytest.raises(RankError, match=r"train\.compute_dtype: fp32 does not fit into the memory of rank 1, but"):
        run(measured_where_fp32_does_not_fit, 2, (1,), timeout=60)
