"""What orthogonalisation costs in memory and what it refuses."""

import math

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from optimizers import Muon
from optimizers.orthogonal import pieces
from optimizers.orthogonal.coefficients import NAMES, NS5, SETS, resolve
from optimizers.orthogonal.newton_schulz import orthogonalize, orthogonalize_all

REFUSED = ["cans", *(name for name in NAMES if name.startswith("gram_"))]  # in bf16


def matrix(seed, *shape, dtype):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# -- memory -------------------------------------------------------------------------------------------------------


def peak_bytes(function):
    """Largest sum of what was allocated, temporaries inside operators included; the inputs lie there before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # oneDNN's scratch grows with the threads, not with the stack
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            _result = function()
    finally:
        torch.set_num_threads(threads)
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


@pytest.mark.parametrize("shape", [(256, 256), (256, 512), (512, 256)])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["ns5", "cubic5", "turbo", "gram_ns5"])
def test_peak_memory(name, stored, shape, monkeypatch):
    monkeypatch.setattr(pieces, "CACHE_BYTES", 2**12)  # the slice that is normalised is small beside any real stack
    matrices = [matrix(i, *shape, dtype=stored) for i in range(3)]
    stack = 3 * shape[0] * shape[1] * torch.float32.itemsize
    ratio = min(shape) / max(shape)
    limit = 2 + 2 * ratio if name == "gram_ns5" and ratio <= 0.5 else 2 + ratio
    for dtype, factor in ((torch.float32, limit), (torch.bfloat16, limit / 2)):
        if dtype == torch.bfloat16 and name == "gram_ns5":
            continue
        peak = peak_bytes(lambda dtype=dtype: orthogonalize_all(matrices, name, dtype=dtype))
        assert factor <= peak / stack < factor + 0.2  # oneDNN reorders a matrix at a time, with AMX a whole one in bf16


# -- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"ns_coefficients": "polar_expres"},
            "group 0: .*'polar_expres', which is no known set; did you mean 'polar_ex",
        ),
        ({"ns_coefficients": "gram_turbo"}, "no known set; did you mean 'turbo'"),
        ({"ns_coefficients": "xyz"}, "known: ns5, quintic"),
        ({"ns_coefficients": (1.0, 2.0)}, "three numbers"),
        ({"ns_coefficients": ()}, "three numbers"),
        ({"ns_coefficients": [(1.0, 2.0, math.nan)]}, "three numbers"),
        ({"ns_coefficients": [NS5, NS5], "ns_steps": 3}, "ns_steps is 3 but ns_coefficients has only 2"),
        ({"ns_coefficients": 3.0}, "has to be a name"),
        ({"ns_steps": 100}, "ns_steps is 100"),
        ({"ns_coefficients": "gram_ns5", "ns_dtype": torch.bfloat16}, "diverges in bfloat16; set ns_dtype"),
        ({"ns_coefficients": "cans", "ns_dtype": torch.bfloat16}, "'cans' diverges in torch.bfloat16; set ns_dtype"),
    ],
)
def test_optimizer_refuses(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        Muon([nn.Parameter(torch.zeros(4, 6))], **options)
    assert "\n" not in str(caught.value)


def test_function_refuses():
    for dtype, message in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16 on CUDA only, not on cpu")):
        for call in (lambda d: orthogonalize(torch.ones(2, 3), "gram_ns5", dtype=d), gram_list):
            with pytest.raises(ValueError, match=message):
                call(dtype)
    for wrong in (torch.ones(3), torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.complex64)):
        with pytest.raises(ValueError, match=r"have to be real floats of shape \[..., m, n\]"):
            orthogonalize(wrong)
    for name in REFUSED:
        assert orthogonalize(torch.ones(2, 6, dtype=torch.bfloat16), name).dtype == torch.float32
    assert orthogonalize(torch.ones(2, 0, 3), dtype=torch.float32).shape == (2, 0, 3)
    assert not orthogonalize(torch.ones(2, 3, requires_grad=True)).requires_grad
    assert orthogonalize_all([]) == []


def gram_list(dtype):
    return orthogonalize_all([torch.ones(2, 6)], "gram_ns5", dtype=dtype)


def test_lengths():
    assert [len(resolve(name).rows) for name in SETS] == [5, 5, 5, 5, 5, 5, 5, 10, 4]
    assert resolve("cans", 3).rows == SETS["cans"].rows[:3]
    assert resolve("polar_express", 9).rows[7:] == ((1.875, -1.25, 0.375),) * 2
    assert resolve(NS5, 7).rows == (NS5,) * 7 and resolve([NS5, NS5]).rows == (NS5,) * 2
