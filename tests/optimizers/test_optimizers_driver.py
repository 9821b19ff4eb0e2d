"""The driver in one process: state, groups, schedulers, bad input."""

import copy
import math
import pickle
import re

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from optimizers import AdamW, BlockMuon, Muon, MuonBP, PeriodicRowMuon
from optimizers.engine.schedule import is_refresh

ALL = [AdamW, Muon, BlockMuon, MuonBP, PeriodicRowMuon]
MATRIX = ALL[1:]


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


def test_frozen_parameters_are_left_alone_and_can_be_thawed():
    w, frozen = weight(4, 6), weight(4, 6).requires_grad_(False)
    before = frozen.detach().clone()
    optimizer = Muon([w, frozen], lr=0.1)
    w.grad = torch.ones_like(w)
    optimizer.step()
    assert torch.equal(frozen, before)
    frozen.requires_grad_(True)
    optimizer.step()
    assert not torch.equal(frozen, before)


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


def test_sparse_gradients_are_refused():
    w = weight(6, 4)
    w.grad = torch.ones(6, 4).to_sparse()
    with pytest.raises(ValueError, match=re.escape("sparse gradient of shape (6, 4)")):
        Muon([w]).step()
