"""The driver in one process: state, groups, schedulers, bad input."""

import copy
import inspect
import math
import pickle
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import optimizers
from optimizers import AdamW, AuON, BlockMuon, Muon, MuonBP, PeriodicRowMuon
from optimizers.engine import driver
from optimizers.engine.algorithm import ALGORITHMS
from optimizers.engine.schedule import is_refresh

ALL = [AdamW, Muon, BlockMuon, MuonBP, PeriodicRowMuon]
MATRIX = ALL[1:]
FAMILY = [getattr(optimizers, name) for name in optimizers.__all__ if name[0].isupper()]


def weight(*shape, seed=0, dtype=torch.float32):
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def train(optimizer, steps, start=0, scale=1.0):
    for t in range(start, start + steps):
        for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"]):
            generator = torch.Generator().manual_seed(100 * t + i)
            p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)
        optimizer.step()


# -- numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", ALL)
def test_zero_gradients_only_decay(cls):
    w = weight(4, 6)
    before = w.detach().clone()
    optimizer = cls([w], lr=0.1, weight_decay=0.5)
    for _ in range(2):
        w.grad = torch.zeros_like(w)
        optimizer.step()
    assert torch.allclose(w, before * 0.95**2, atol=1e-7)


@pytest.mark.parametrize("scale", [1e20, 1e-25])
@pytest.mark.parametrize("cls", MATRIX)
def test_the_size_of_the_gradient_does_not_matter(cls, scale):
    found = []
    for s in (1.0, scale):
        w = weight(8, 6)
        train(cls([w], lr=0.1, ns_dtype=torch.float32, wire_dtype=torch.float32), 4, scale=s)
        found.append(w.detach())
    assert torch.allclose(*found, atol=2e-4)


@pytest.mark.parametrize("cls", MATRIX)
def test_bf16_weights_without_nesterov_keep_their_momentum(cls):
    w = weight(6, 6, dtype=torch.bfloat16)
    optimizer = cls([w], nesterov=False, momentum_form="ema")
    w.grad = torch.full_like(w, 0.5)
    gradient = w.grad.clone()
    for _ in range(2):
        optimizer.step()
    m = optimizer.state[w]["momentum_buffer"]
    assert m.dtype == torch.float32
    assert torch.allclose(m, torch.full_like(m, (1 - 0.95**2) * 0.5), rtol=1e-6)
    assert torch.equal(w.grad, gradient)


@pytest.mark.parametrize("cls", ALL)
def test_a_lr_tensor_equals_a_lr_float_and_is_never_read_back(cls):
    class NoReadBack(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
            return func(*args, **(kwargs or {}))

    found = []
    for lr in (0.03, torch.tensor(0.03)):
        w = weight(8, 6)
        optimizer = cls([w], lr=lr)
        with NoReadBack():
            train(optimizer, 4)
        found.append(w.detach())
    assert torch.allclose(*found, atol=1e-6)


@pytest.mark.parametrize("cls", MATRIX)
def test_a_convolution_is_a_matrix_of_out_rows(cls):
    conv, flat = weight(6, 3, 2, 2), weight(6, 12)
    flat.data.copy_(conv.detach().flatten(1))
    two, other = cls([conv], lr=0.1), cls([flat], lr=0.1)
    for t in range(4):
        flat.grad = torch.randn(6, 12, generator=torch.Generator().manual_seed(t))
        conv.grad = flat.grad.view_as(conv)
        two.step(), other.step()
    assert torch.equal(conv.flatten(1), flat)
    with pytest.raises(ValueError, match="contiguous_format"):
        cls([nn.Parameter(torch.randn(6, 3, 2, 2).to(memory_format=torch.channels_last))])


@pytest.mark.parametrize("cls", MATRIX)
def test_a_stack_equals_its_matrices(cls):
    stack = weight(3, 4, 6)
    parts = [nn.Parameter(m.clone()) for m in stack.detach()]
    first, second = cls([stack], lr=0.1), cls(parts, lr=0.1)
    for t in range(4):
        stack.grad = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(t))
        for p, g in zip(parts, stack.grad, strict=True):
            p.grad = g.clone()
        first.step(), second.step()
    assert torch.equal(stack, torch.stack(parts))


@pytest.mark.parametrize("bucket_bytes", [1, 300])
@pytest.mark.parametrize("cls", ALL)
def test_bucket_size_does_not_change_the_result(cls, bucket_bytes):
    found = []
    for size in (bucket_bytes, 2**26):
        params = [weight(8, 6, seed=i) for i in range(4)]
        train(cls(params, lr=0.1, bucket_bytes=size), 3)
        found.append(torch.stack(params))
    assert torch.equal(*found)


@pytest.mark.parametrize("cls", ALL)
def test_frozen_parameters_are_left_alone_have_no_state_and_can_be_thawed(cls):
    w, frozen = weight(4, 6), weight(4, 6).requires_grad_(False)
    before = frozen.detach().clone()
    optimizer = cls([w, frozen], lr=0.1)
    w.grad = torch.ones_like(w)
    optimizer.step()
    assert torch.equal(frozen, before) and set(optimizer.state) == {w}
    frozen.requires_grad_(True)
    assert set(optimizer.state_dict()["state"]) == {0, 1}  # a checkpoint between thawing and the next step is whole
    optimizer.step()
    assert not torch.equal(frozen, before)


@pytest.mark.parametrize("cls", ALL)
def test_16_bit_weights_are_rounded_once_a_step(cls):
    """In bf16 1 − η·λ is 1 for η·λ < 0.002: decay alone and the update alone would both be lost."""
    w = weight(64, 48, dtype=torch.bfloat16)
    exact = nn.Parameter(w.detach().float())
    options = {"lr": 0.01, "weight_decay": 0.15} | ({} if cls is AdamW else {"ns_dtype": torch.float32})
    train(cls([w], **options), 1)
    other = cls([exact], **options)
    exact.grad = w.grad.float()
    other.step()
    assert torch.equal(w, exact.bfloat16())


@pytest.mark.parametrize("cls", MATRIX)
def test_autocast_around_a_step_reaches_the_closure_and_not_the_update(cls, monkeypatch):
    update, inside, found, seen = driver.update_momentum, [], [], []
    monkeypatch.setattr(
        driver,
        "update_momentum",
        lambda *args, **options: inside.append(torch.is_autocast_enabled("cpu")) or update(*args, **options),
    )
    for enabled in (False, True):
        w = weight(8, 6)
        optimizer = cls([w], lr=0.1, ns_dtype=torch.float32, wire_dtype=torch.float32)

        def closure(w=w):
            w.grad = weight(8, 6, seed=1).detach()
            seen.append((w @ w.mT).dtype)

        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            for _ in range(3):
                optimizer.step(closure)
        found.append(w.detach())
    assert torch.equal(*found) and inside == [False] * 6
    assert seen == [torch.float32] * 3 + [torch.bfloat16] * 3


@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("cls", ALL)
def test_a_model_cast_after_construction_takes_its_state_with_it(cls, when):
    net, twin = nn.Linear(6, 8, bias=False), nn.Linear(6, 8, bias=False)
    twin.load_state_dict(net.state_dict())
    optimizer = cls(net.parameters(), lr=0.1)
    train(optimizer, when)
    state = {key: value.clone() for key, value in optimizer.state[net.weight].items()}
    net.double()
    twin.load_state_dict(net.state_dict())
    train(optimizer, 2, start=when)
    assert {value.dtype for value in optimizer.state[net.weight].values()} == {torch.float64}
    other = cls(twin.double().parameters(), lr=0.1)
    for key, value in state.items():
        other.state[twin.weight][key].copy_(value)
    other.param_groups[0]["step"] = when
    train(other, 2, start=when)
    assert torch.equal(net.weight, twin.weight)


def test_an_empty_optimizer_of_frozen_parameters_steps():
    optimizer = Muon([weight(4, 6).requires_grad_(False)])
    optimizer.step()
    assert optimizer.wire_bytes == optimizer.wire_bytes_max == 0


# -- groups, state and schedule -----------------------------------------------------------------------------------


def test_one_optimizer_holds_several_algorithms():
    matrices, rest = weight(6, 4), weight(6)
    groups = [{"params": [matrices]}, {"params": [rest], "algorithm": "adamw", "weight_decay": 0.0}]
    optimizer = MuonBP(groups, lr=0.02, weight_decay=0.3, period=4)
    first, second = optimizer.param_groups
    assert (first["algorithm"], first["period"], first["lr"], first["weight_decay"]) == ("muon_bp", 4, 0.02, 0.3)
    assert (second["betas"], second["lr"], second["weight_decay"]) == ((0.9, 0.95), 0.02, 0.0)
    assert "momentum" not in second and "period" not in second
    optimizer.add_param_group({"params": [weight(3, 5)], "algorithm": "periodic_row_muon", "lr": 0.5})
    assert optimizer.param_groups[2]["period"] == 3 and optimizer.param_groups[2]["lr"] == 0.5
    twin, alone = weight(6), AdamW
    train(optimizer, 3)
    single = alone([twin], lr=0.02, weight_decay=0.0)
    for t in range(3):
        twin.grad = torch.randn(6, generator=torch.Generator().manual_seed(100 * t + 1))
        single.step()
    assert torch.equal(twin, rest)


def test_state_exists_before_the_first_step():
    for cls in ALL:
        w = weight(6, 4)
        keys = set(cls([w]).state_dict()["state"][0])
        assert keys == ({"exp_avg", "exp_avg_sq"} if cls is AdamW else {"momentum_buffer"})


@pytest.mark.parametrize("cls", ALL)
def test_resuming_keeps_the_phase_and_the_bits(cls):
    w = weight(8, 6)
    optimizer = cls([w], lr=0.1)
    train(optimizer, 7)
    saved, twin = pickle.loads(pickle.dumps(optimizer.state_dict())), nn.Parameter(w.detach().clone())
    other = cls([twin], lr=0.3)
    other.load_state_dict(state_dict=saved)
    assert other.param_groups[0]["step"] == 7 and other.param_groups[0]["lr"] == 0.1
    train(optimizer, 6, start=7)
    train(other, 6, start=7)
    assert torch.equal(w, twin)


def test_after_seven_steps_of_period_five_the_eleventh_is_the_refresh(monkeypatch):
    w = weight(8, 6)
    optimizer = MuonBP([w], period=5)
    train(optimizer, 7)
    other = MuonBP([weight(8, 6)], period=5)
    other.load_state_dict(optimizer.state_dict())
    refreshed = []
    monkeypatch.setattr(
        "optimizers.engine.driver.spectral",
        lambda *args: refreshed.append(other.param_groups[0]["step"]) or _spectral(*args),
    )
    from optimizers.engine.directions import spectral as _spectral

    train(other, 10, start=7)
    assert refreshed == [10, 15]


def test_phase_delays_the_first_refresh():
    assert [t for t in range(12) if is_refresh(t, 5, 2)] == [2, 7]
    assert [t for t in range(12) if is_refresh(t, 3, 4)] == [1, 4, 7, 10]
    assert not any(is_refresh(t, math.inf, 0) for t in range(12))


@pytest.mark.parametrize(("param", "state"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_loading_keeps_the_dtype_and_bits_of_the_state(param, state):
    optimizer = Muon([weight(6, 4, dtype=param)])
    saved = optimizer.state_dict()
    stored = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).to(state)
    saved["state"][0]["momentum_buffer"] = stored
    optimizer.load_state_dict(saved)
    found = optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"]
    assert found.dtype == state and torch.equal(found, stored) and found.data_ptr() != stored.data_ptr()


@pytest.mark.parametrize("cls", ALL)
def test_state_that_a_checkpoint_lacks_is_an_error_and_not_zeros(cls):
    w, other = weight(6, 4), weight(6, 4)
    optimizer = cls([("first", w), ("second", other)])
    train(optimizer, 2)
    saved = optimizer.state_dict()
    before = {key: value.clone() for key, value in optimizer.state[w].items()}
    for broken in ({}, {0: saved["state"][0]}, {**saved["state"], 1: {}}):
        name = "second" if broken else "first"
        with pytest.raises(ValueError, match=f"parameter '{name}'.*of step 2 but has no state"):
            optimizer.load_state_dict({**saved, "state": broken})
    assert all(torch.equal(value, before[key]) for key, value in optimizer.state[w].items())
    other.requires_grad_(False)
    optimizer.load_state_dict({**saved, "state": {0: saved["state"][0]}})
    fresh = cls([weight(6, 4)])
    fresh.load_state_dict({**fresh.state_dict(), "state": {}})  # nothing is lost before the first step
    train(fresh, 1)


@pytest.mark.parametrize(
    ("theirs", "ours", "options"),
    [(torch.optim.AdamW, AdamW, {"betas": (0.8, 0.99)}), (torch.optim.Muon, Muon, {"momentum": 0.9})],
    ids=["AdamW", "Muon"],
)
def test_a_run_of_torchs_optimizer_goes_on_here(theirs, ours, options):
    w = weight(8, 6)
    first = theirs([w], lr=0.02, weight_decay=0.3, **options)
    train(first, 3)
    twin = nn.Parameter(w.detach().clone())
    second = ours([twin], lr=1.0)
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    group = second.param_groups[0]
    assert group["lr"] == 0.02 and "amsgrad" not in group and group["step"] == (3 if ours is AdamW else 1)
    train(first, 3, start=3)
    train(second, 3, start=3)
    assert torch.allclose(w, twin, atol=1e-6 if ours is AdamW else 2e-3)  # torch iterates in bf16, in another order


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda w: torch.optim.SGD([w], momentum=0.9), r"is of another optimizer \(no 'algorithm' among its keys lr"),
        (lambda w: torch.optim.AdamW([w], amsgrad=True), "amsgrad=True, which this AdamW does not do"),
        (lambda w: torch.optim.Adam([w]), "decoupled_weight_decay=False"),
        (lambda w: torch.optim.Muon([w]), "the checkpoint's algorithm is 'muon', the optimizer's is 'adamw'"),
    ],
)
def test_other_foreign_checkpoints_are_named(make, message):
    w = weight(8, 6)
    with pytest.raises(ValueError, match="group 0.*" + message):
        AdamW([w]).load_state_dict(make(w).state_dict())


def test_loading_mismatched_checkpoints_is_an_error_and_changes_nothing():
    w = weight(6, 4)
    optimizer = Muon([w])
    train(optimizer, 1)
    before = optimizer.state[w]["momentum_buffer"].clone()
    with pytest.raises(ValueError, match="group 0: the checkpoint's algorithm is 'adamw', the optimizer's is 'muon'"):
        optimizer.load_state_dict(AdamW([weight(6, 4)]).state_dict())
    with pytest.raises(ValueError, match=re.escape("state 'momentum_buffer' of shape (5, 4)")):
        optimizer.load_state_dict(Muon([weight(5, 4)]).state_dict())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    with pytest.raises(ValueError, match="group 0: the checkpoint's number of parameters is 2, the optimizer's is 1"):
        optimizer.load_state_dict(Muon([weight(6, 4), weight(6, 4)]).state_dict())
    assert torch.equal(optimizer.state[w]["momentum_buffer"], before) and optimizer.param_groups[0]["step"] == 1


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda saved: saved.pop("state"), "no state dict of an optimizer: it lacks 'state'"),
        (lambda saved: saved["state"][0].update(momentum_buffer=3), "state 'momentum_buffer' is 3 and no tensor"),
        *((lambda saved, step=step: saved["param_groups"][0].update(step=step), f"group 0: step is {step!r}")
          for step in (-1, 2.5, "2", None)),
    ],
)  # fmt: skip
def test_a_state_dict_that_is_none_is_named_and_changes_nothing(spoil, message):
    w = weight(6, 4)
    optimizer = Muon([w])
    train(optimizer, 1)
    before, saved = optimizer.state[w]["momentum_buffer"].clone(), copy.deepcopy(optimizer.state_dict())
    spoil(saved)
    with pytest.raises(ValueError, match=re.escape(message)):
        optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[w]["momentum_buffer"], before) and optimizer.param_groups[0]["step"] == 1


def test_schedulers_closures_hooks_and_copies_work():
    w = weight(6, 4)
    optimizer = PeriodicRowMuon([w], lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=10, cycle_momentum=False)
    calls = []
    optimizer.register_step_post_hook(lambda *args: calls.append(1))

    def closure():
        optimizer.zero_grad()
        loss = w.square().sum()
        loss.backward()
        return loss

    before = w.square().sum().item()
    assert optimizer.step(closure).item() == pytest.approx(before)
    assert isinstance(optimizer.param_groups[0]["lr"], float)
    scheduler.step()
    assert calls == [1] and w.grad is not None
    optimizer.load_state_dict(optimizer.state_dict())  # with the keys that the scheduler left in the group
    optimizer.add_param_group({"params": [weight(3, 3)]})
    twin = copy.deepcopy(optimizer)
    train(optimizer, 3)
    train(twin, 3)
    assert torch.equal(w, twin.param_groups[0]["params"][0])


def test_schedulers_that_cycle_the_momentum_take_these_optimizers():
    for cls in ALL:
        groups = [{"params": [weight(6, 4)]}, {"params": [weight(6)], "algorithm": "adamw"}]
        optimizer = cls(groups)
        assert "momentum" not in optimizer.param_groups[1]
        if cls is AdamW:
            optimizer.add_param_group({"params": [weight(3, 3)], "algorithm": "muon"})
            assert optimizer.param_groups[2]["momentum"] == 0.95 and "betas" not in optimizer.param_groups[2]
            optimizer = cls([weight(6, 4)])
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=10)
        for t in range(3):
            train(optimizer, 1, start=t)
            scheduler.step()
        found = optimizer.param_groups[0]
        assert 0.85 < (found["betas"][0] if cls is AdamW else found["momentum"]) < 0.95
        optimizer.load_state_dict(optimizer.state_dict())


def test_numbers_of_numpy_and_lists_become_plain_options():
    optimizer = MuonBP(
        [weight(8, 6)], lr=np.float32(0.5), momentum=np.float64(0.5), period=np.int64(3), block_grid=[np.int32(2), 1]
    )
    group = optimizer.param_groups[0]
    assert [(type(group[k]), group[k]) for k in ("lr", "momentum", "period")] == [(float, 0.5), (float, 0.5), (int, 3)]
    assert group["block_grid"] == (2, 1)
    train(optimizer, 2)
    assert AdamW([weight(3)], betas=[0.9, np.float32(0.5)]).param_groups[0]["betas"] == (0.9, 0.5)


@pytest.mark.parametrize("cls", FAMILY)
def test_defaults_of_the_class_and_of_a_group_that_names_its_algorithm_are_the_same(cls):
    found = {
        key: parameter.default
        for key, parameter in inspect.signature(cls).parameters.items()
        if key not in ("params", "bucket_bytes", "max_in_flight", "process_group", "compile", "form", "ball")
        and parameter.kind is not parameter.VAR_KEYWORD
    }
    (group,) = cls([weight(4, 4)]).param_groups
    algorithm = ALGORITHMS[group["algorithm"]]
    assert found.items() <= {**algorithm.options, **({"lr": found["lr"]} if cls is AuON else {})}.items()
    assert {key: group[key] for key in algorithm.options} == dict(algorithm.options)


# -- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Muon([("norm.weight", weight(6))]), "group 0, parameter 'norm.weight' of shape (6,): a 1-D parameter"),
        (
            lambda: Muon([{"params": [weight(6, 4)], "algorithm": "muonbp"}]),
            "group 0: unknown algorithm 'muonbp'; did you mean 'muon_bp'?",
        ),
        (
            lambda: Muon([{"params": [weight(6, 4)], "momentun": 0.9}]),
            "group 0: unknown key 'momentun' for algorithm 'muon'; did you mean 'momentum'?",
        ),
        (lambda: Muon([{"params": [weight(6, 4)], "period": 3}]), "group 0: unknown key 'period' for algorithm 'muon'"),
        (lambda: Muon([weight(6, 4)], lr=-1.0), "group 0: lr is -1.0 but has to be a float or 0-d tensor >= 0"),
        (lambda: Muon([weight(6, 4)], lr=math.nan), "lr is nan"),
        (lambda: Muon([weight(6, 4)], lr=torch.tensor([0.1])), "lr is tensor([0.1"),
        (lambda: Muon([weight(6, 4)], momentum=1.0), "momentum is 1.0 but has to be a float in [0, 1)"),
        (lambda: Muon([weight(6, 4)], ns_steps=0), "ns_steps is 0"),
        (lambda: Muon([weight(6, 4)], adjust_lr_fn=None), "adjust_lr_fn is None but has to be one of original"),
        (lambda: Muon([weight(6, 4)], wire_dtype=torch.float16), "wire_dtype is torch.float16"),
        (lambda: Muon([weight(6, 4)], max_in_flight=0), "max_in_flight is 0"),
        (lambda: MuonBP([weight(6, 4)], period=0), "period is 0 but has to be an int >= 1 or math.inf"),
        (lambda: MuonBP([weight(6, 4)], period=2.5), "period is 2.5"),
        (lambda: MuonBP([weight(6, 4)], block_grid=(2, 0)), "block_grid is (2, 0)"),
        (lambda: AdamW([weight(6)], betas=(0.9, 1.0)), "betas is (0.9, 1.0)"),
        (lambda: AdamW([torch.zeros(2, dtype=torch.complex64)]), "dtype torch.complex64 is not supported"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_line_that_names_it(make, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        make()
    assert "\n" not in str(error.value)


def test_a_refused_group_leaves_no_trace():
    optimizer = Muon([weight(6, 4)])
    with pytest.raises(ValueError):
        optimizer.add_param_group({"params": [weight(6, 4), weight(6)]})
    assert len(optimizer.param_groups) == 1 and len(optimizer.state) == 1


def test_a_sparse_gradient_is_refused_before_anything_is_updated():
    first, last = weight(6, 4), weight(6, 4)
    optimizer = Muon([{"params": [("first", first)]}, {"params": [("last", last)], "algorithm": "adamw"}])
    before = first.detach().clone()
    first.grad = torch.ones(6, 4)
    last.grad = torch.ones(6, 4).to_sparse()
    with pytest.raises(ValueError, match=re.escape("parameter 'last' of shape (6, 4): a sparse gradient")):
        optimizer.step()
    assert torch.equal(first, before) and not optimizer.state[first]["momentum_buffer"].any()
    assert [group["step"] for group in optimizer.param_groups] == [0, 0]
