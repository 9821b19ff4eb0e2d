"""``compile=True``: the same step as without, a bounded number of compilations, and no error that reaches training."""

import copy
import math
import os
import shutil
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch._dynamo.utils
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from optimizers import AdamW, BlockMuon, Muon, MuonBP, PeriodicRowMuon
from optimizers.engine import compiled, rows
from optimizers.engine.momentum import advance_in, ahead_of, update_momentum

SHAPES = [(6, 40), (24, 24), (3, 8, 24), (16, 3, 2, 2)]


@pytest.fixture(autouse=True)
def fresh_graphs(monkeypatch):
    monkeypatch.setattr(compiled, "LEAST_BYTES", 0)
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def graphs():
    """How many have been compiled since the start of the test."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def parameters(shapes=SHAPES, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_gradients(params, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


def rows_only(params, **options):
    return PeriodicRowMuon(params, **{"period": math.inf, "lr": 0.02, **options})


def train(compile, steps=3, shapes=SHAPES, dtype=torch.float32, state=None, **options):
    params = parameters(shapes, dtype)
    optimizer = rows_only(params, compile=compile, **options)
    if state is not None:
        for s in optimizer.state.values():
            s["momentum_buffer"] = s["momentum_buffer"].to(state)
    for step in range(steps):
        give_gradients(params, step + 1)
        optimizer.step()
    buffers = [optimizer.state[p]["momentum_buffer"] for p in params]
    return [p.detach() for p in params], buffers


def close(found, expected, limit):
    return all(
        a.dtype == b.dtype and (a - b).abs().max() <= limit * b.double().square().mean().sqrt()
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("form", ["ema", "heavy_ball"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("lr", [0.02, torch.tensor(0.02)], ids=["float", "tensor"])
def test_it_takes_the_eager_step(form, nesterov, lr):
    options = {"momentum_form": form, "nesterov": nesterov, "lr": lr}
    for found, expected in zip(train(True, **options), train(False, **options), strict=True):
        assert close(found, expected, 1e-6)
    assert graphs() > 0


@pytest.mark.parametrize(
    ("dtype", "state", "limit"),
    [
        (torch.float64, None, 1e-14),
        (torch.bfloat16, None, 2**-7),  # an ulp of a weight of the largest size
        (torch.bfloat16, torch.bfloat16, 2**-6),
        (torch.float32, torch.bfloat16, 2**-6),
    ],
)
def test_other_dtypes_take_the_eager_step(dtype, state, limit):
    found, expected = (train(compile, dtype=dtype, state=state) for compile in (True, False))
    assert close(found[0], expected[0], 4 * limit) and close(found[1], expected[1], 4 * limit)
    assert graphs() > 0


def test_16_bit_weights_are_rounded_once():
    w = nn.Parameter(torch.ones(8, 64, dtype=torch.bfloat16))
    w.grad = torch.ones_like(w)
    optimizer = rows_only([w], lr=0.01, weight_decay=0.15, adjust_lr_fn="original", row_lr_ratio=1.2, compile=True)
    optimizer.step()
    # decay and step are 0.0015 each, less than half an ulp below 1, 0.00195; together they are more
    assert torch.equal(w, torch.full_like(w, 1 - 2**-8))


def test_rows_of_any_magnitude_are_unit_rows_and_zero_rows_stay():
    scales = torch.tensor([1.0, 1e20, 1e-25, 0.0, 1e-15, 1e18, 1.0]).unsqueeze(1)
    params = parameters([(7, 1024)])
    params[0].data.zero_()
    give_gradients(params, 1, scales)
    rows_only(params, compile=True, lr=1.0).step()
    norms = params[0].detach().norm(dim=1) / (0.2 * 32)
    assert torch.allclose(norms, (scales[:, 0] > 0).float(), atol=1e-6)


def test_slices_change_no_bit(monkeypatch):
    whole, _ = train(True)
    monkeypatch.setattr(compiled, "CACHE_BYTES", 200)
    assert all(map(torch.equal, whole, train(True)[0]))


def test_slices_of_any_base_share_their_kernels(monkeypatch):
    monkeypatch.setattr(compiled, "CACHE_BYTES", 4 * 4 * 40)
    params = parameters([(8, 40), (16, 40), (2, 6, 40), (4, 40, 1, 1)])
    give_gradients(params, 1)
    rows_only(params, compile=True).step()
    assert graphs() == 2


def test_autograd_notices_the_update():
    (w,) = parameters([(6, 8)])
    loss = (w * w).sum()
    give_gradients([w], 1)
    rows_only([w], compile=True).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_schedules_compile_nothing_anew_and_shapes_only_a_few_times():
    params = parameters([(6, 40)])
    optimizer = rows_only(params, compile=True)
    group = optimizer.param_groups[0]
    give_gradients(params, 1)
    optimizer.step()
    before = graphs()
    assert before == 2
    for step in range(1, 6):
        group.update(lr=0.02 / step, weight_decay=0.1 / step, momentum=1 - 0.1 / step)
        optimizer.step()
    group["lr"] = torch.tensor(0.01)
    optimizer.step()
    assert graphs() == before
    for i, shape in enumerate([(9, 40), (9, 11), (12, 31), (50, 3), (8, 8), (16, 16), (1, 30), (1, 31), (3, 4, 5)]):
        (more,) = parameters([shape])
        give_gradients([more], i)
        optimizer.add_param_group({"params": [more]})
        optimizer.step()
    assert graphs() <= 2 * 2  # for any sizes, and for a single row


def test_a_failing_compiler_leaves_a_refresh_as_it_is(monkeypatch):
    def backend(graph, inputs):
        raise RuntimeError("no C++ compiler found")

    monkeypatch.setattr(compiled, "BACKEND", backend)
    found = []
    for chosen in (True, False):
        params = parameters()
        give_gradients(params, 1)
        optimizer = Muon(params, compile=chosen)
        with pytest.warns(RuntimeWarning, match="no C\\+\\+ compiler found") if chosen else nullcontext():
            optimizer.step()
        found.append([p.detach() for p in params])
    assert all(map(torch.equal, *found))


def test_a_counter_around_one_step_does_not_turn_it_off():
    params = parameters([(6, 8)])
    give_gradients(params, 1)
    optimizer = rows_only(params, compile=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="compile=True")
        with FlopCounterMode(display=False):
            optimizer.step()
        assert graphs() == 0
        optimizer.step()
    assert graphs() == 2


@pytest.mark.parametrize("failing", ["scales_of_rows", "update_rows"])
def test_a_failing_compiler_is_one_warning_and_the_eager_step(failing, monkeypatch):
    def backend(graph, inputs):
        writes = any(node.target in ("copy_", torch.ops.aten.copy_.default) for node in graph.graph.nodes)
        if writes == (failing == "update_rows"):
            raise RuntimeError("no C++ compiler found\nmore about it")
        return graph.forward

    monkeypatch.setattr(compiled, "BACKEND", backend)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = train(True)
    said = [str(w.message) for w in seen if "compile=True" in str(w.message)]
    assert len(said) == 1 and "no C++ compiler found" in said[0] and "more" not in said[0]
    for a, b in zip(found, train(False), strict=True):
        assert all(map(torch.equal, a, b))


def test_a_failure_at_a_later_slice_updates_nothing_twice(monkeypatch):
    calls, real = [], compiled._compile

    def compile_until_the_third_slice(function):
        inner = real(function)

        def call(*args):
            if function is compiled.update_rows:
                calls.append(1)
                if len(calls) == 3:
                    raise RuntimeError("out of registers")
            return inner(*args)

        return call

    monkeypatch.setattr(compiled, "_compile", compile_until_the_third_slice)
    monkeypatch.setattr(compiled, "CACHE_BYTES", 400)
    with pytest.warns(RuntimeWarning, match="out of registers"):
        found = train(True)
    assert len(calls) == 3
    for a, b in zip(found, train(False), strict=True):
        assert close(a, b, 1e-6)


def test_small_and_scattered_matrices_stay_with_the_eager_walk(monkeypatch):
    monkeypatch.setattr(compiled, "LEAST_BYTES", 4 * 24 * 24)
    taken, real = [], rows.walk

    def watched(kinds, form):
        taken.extend(m[0].shape for members in kinds.values() for m in members)
        return real(kinds, form)

    monkeypatch.setattr(rows, "walk", watched)
    params = [*parameters([(6, 40), (24, 24)]), nn.Parameter(torch.randn(40, 30).mT)]
    give_gradients(params, 1)
    rows_only(params, compile=True).step()
    assert sorted(taken) == [(6, 40), (30, 40)] and graphs() == 2


@pytest.mark.parametrize(("cls", "kernels"), [(AdamW, 0), (BlockMuon, 0), (Muon, 1), (MuonBP, 1), (PeriodicRowMuon, 3)])
def test_refreshes_advance_the_momentum_in_one_kernel(cls, kernels):
    options = {} if cls is AdamW else {"ns_dtype": torch.float32}
    found = []
    for chosen in (False, True):
        params = parameters()
        optimizer = cls(params, lr=0.1, compile=chosen, **options)
        for step in range(4):
            give_gradients(params, step)
            optimizer.step()
        state = [t for p in params for t in optimizer.state[p].values()]
        found.append(([p.detach() for p in params], state))
    assert close(found[1][1], found[0][1], 1e-6)
    assert close(found[1][0], found[0][0], 1e-3)  # where rounding to bf16 for the wire fell to the other side
    assert graphs() == kernels


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("form", ["ema", "heavy_ball"])
def test_what_travels_is_formed_as_it_is_eagerly(form, nesterov, monkeypatch):
    monkeypatch.setattr(compiled, "CACHE_BYTES", 300)
    found = []
    for kernels in (None, compiled.Kernels()):
        shapes = [(6, 40), (3, 8, 24), (24, 6)]
        buffers, gradients = ([p.detach().roll(k, -1) for p in parameters(shapes)] for k in (0, 1))
        options = {"momentum": 0.9, "nesterov": nesterov, "momentum_form": form}
        advance = partial(update_momentum, mu=0.9, ahead=ahead_of(options), form=form)
        take = None if kernels is None else partial(kernels.advance, group=options)
        inputs = [torch.empty(m.shape, dtype=torch.bfloat16) for m in buffers]
        advance_in(inputs, buffers, gradients, advance, take)
        found.append((buffers, inputs))
    (buffers, inputs), (expected_buffers, expected) = found[1], found[0]
    assert close(buffers, expected_buffers, 1e-6) and graphs() == 1
    assert all(
        torch.allclose(a.float(), b.float(), rtol=2**-7, atol=1e-6) for a, b in zip(inputs, expected, strict=True)
    )


def test_a_group_of_rows_in_another_optimizer_is_compiled():
    params = parameters([(6, 8)])
    give_gradients(params, 1)
    Muon([{"params": params, "algorithm": "periodic_row_muon", "period": math.inf}], compile=True).step()
    assert graphs() == 2


def test_it_is_a_bool_and_survives_a_copy():
    with pytest.raises(ValueError, match="compile is 'inductor' but has to be True or False"):
        Muon(parameters(), compile="inductor")
    params = parameters([(6, 8)])
    give_gradients(params, 1)
    twin = copy.deepcopy(rows_only(params, compile=True))
    give_gradients(twin.param_groups[0]["params"], 1)
    twin.step()
    assert graphs() == 2


@pytest.mark.long
@pytest.mark.skipif(
    not any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++")), reason="no C++ compiler"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductors_kernels_take_the_eager_step(dtype, monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    shapes, limit = [(6, 40), (24, 24), (3, 9, 33)], 1e-6 if dtype == torch.float32 else 2**-5
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="compile=True")
        found = train(True, shapes=shapes, dtype=dtype)
    for a, b in zip(found, train(False, shapes=shapes, dtype=dtype), strict=True):
        assert close(a, b, limit)
