"""Bugs that users of other Muon implementations reported, each kept out by a test in one process.

Those that need ranks are in ``tests/distributed/test_optimizers_users_bugs.py``.
"""

import gc
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from optimizers import AdamW, BlockMuon, Muon, MuonBP, PeriodicRowMuon
from optimizers.engine import directions
from optimizers.orthogonal import newton_schulz
from optimizers.orthogonal.newton_schulz import orthogonalize_all

ALL = [AdamW, Muon, BlockMuon, MuonBP, PeriodicRowMuon]
MATRIX = ALL[1:]
FP32 = {"ns_dtype": torch.float32, "wire_dtype": torch.float32}
MODES = ["original", "match_rms_adamw", "spectral_unclamped"]


def values(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameters(*shapes):
    return [nn.Parameter(values(i, *shape)) for i, shape in enumerate(shapes)]


def updates(optimizer, gradients):
    """What one step without decay at lr 1 subtracts from each weight."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in params]
    for p, g in zip(params, gradients, strict=True):
        p.grad = g
    optimizer.step()
    return [b - p.detach() for b, p in zip(before, params, strict=True)]


def rms(x):
    return x.square().mean().sqrt().item()


@pytest.fixture
def normalised(monkeypatch):
    """Shapes of the matrices of each call of Newton–Schulz."""
    calls = []

    def counting(name):
        real = getattr(directions, name)

        def count(matrices, *rest):
            calls.append([tuple(m.shape) for m in matrices])
            return real(matrices, *rest)

        monkeypatch.setattr(directions, name, count)

    counting("orthogonalize_all")
    counting("orthogonalize_pieces")
    return calls


@pytest.fixture
def fake_ranks():
    """Starts a process group of so many ranks, of which only this one exists."""
    yield lambda ranks: dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    dist.destroy_process_group()


# -- wrong mathematics ----------------------------------------------------------------------------------------------


def test_two_convolutions_of_one_shape_are_not_flattened_across_layers():
    for cls in MATRIX:
        grads = [values(5, 16, 8, 3, 3), values(6, 16, 8, 3, 3)]
        together = updates(cls(parameters(*[(16, 8, 3, 3)] * 2), lr=1.0, weight_decay=0.0, **FP32), grads)
        for i, g in enumerate(grads):
            weight = nn.Parameter(values(i, 16, 72))
            (alone,) = updates(cls([weight], lr=1.0, weight_decay=0.0, **FP32), [g.flatten(1)])
            assert torch.equal(together[i].flatten(1), alone)


@pytest.mark.parametrize("cls", MATRIX)
def test_clipping_of_large_gradients_leaves_the_size_of_a_step_alone(cls):
    found = []
    for scale in (1.0, 1e3):
        params = parameters((12, 8), (8, 16))
        optimizer = cls(params, lr=0.1, weight_decay=0.0, **FP32)
        for step in range(4):
            for i, p in enumerate(params):
                p.grad = values(10 * step + i, *p.shape) * scale
            assert nn.utils.clip_grad_norm_(params, 1.0) > 5 * scale
            optimizer.step()
        found.append([p.detach() for p in params])
    moved = [rms(p - values(i, *p.shape)) for i, p in enumerate(found[0])]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*found, strict=True)) and min(moved) > 0.03


@pytest.mark.parametrize("cls", MATRIX)
def test_micro_batches_are_summed_before_newton_schulz_which_runs_once_a_step(cls, normalised):
    x, y = values(0, 32, 6), values(1, 32, 5)
    found = []
    for parts in (1, 4):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 5, bias=False))
        optimizer = cls(net.parameters(), lr=0.1, **FP32)
        for step in range(2):
            for inputs, targets in zip(x.chunk(parts), y.chunk(parts), strict=True):
                ((net(inputs) - targets).square().mean() / parts).backward()
            assert len(normalised) == (step if cls is not PeriodicRowMuon else min(step, 1))
            optimizer.step()
            optimizer.zero_grad()
        spectral_steps = 1 if cls is PeriodicRowMuon else 2
        assert normalised == [[(8, 6), (5, 8)]] * spectral_steps
        normalised.clear()
        found.append([p.detach() for p in net.parameters()])
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*found, strict=True))


PATHS = {
    "plain": (Muon, (24, 10), {}),
    "plain, fp32": (Muon, (24, 10), FP32),
    "no Nesterov": (Muon, (24, 10), {"nesterov": False}),
    "heavy ball": (Muon, (10, 24), {"momentum_form": "heavy_ball"}),
    "stack": (Muon, (3, 24, 10), {}),
    "convolution": (Muon, (24, 5, 2, 1), {}),
    "refresh of row steps": (PeriodicRowMuon, (24, 10), {}),
    "refresh of block steps": (MuonBP, (24, 10), {}),
    "blocks": (BlockMuon, (24, 10), {}),
    "blocks, stack": (BlockMuon, (3, 24, 10), {}),
    "block step": (MuonBP, (24, 10), {"phase": 1}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", PATHS)
def test_no_path_forgets_to_orthogonalise(path, dtype):
    cls, shape, options = PATHS[path]
    weight = nn.Parameter(torch.zeros(shape, dtype=dtype))
    optimizer = cls([weight], lr=1.0, adjust_lr_fn="spectral_unclamped", **options)
    (update,) = updates(optimizer, [values(0, *shape).to(dtype)])
    stack = update.float() if len(shape) == 3 else update.float().flatten(1)[None]
    found = torch.linalg.svdvals(stack / math.sqrt(stack.shape[1] / stack.shape[2]))
    assert found.min() > 0.6 and found.max() < 1.2


@pytest.mark.parametrize("path", ["whole", "split", "stack"])
@pytest.mark.parametrize("mode", MODES)
def test_padding_rows_do_not_enter_the_scale(mode, path):
    """A weight of 100 rows stored in 128: its true size is declared as a logical matrix."""
    options = {"lr": 1.0, "weight_decay": 0.0, "adjust_lr_fn": mode, **FP32}
    gradient = torch.cat([values(3, 100, 64), torch.zeros(28, 64)])
    (alone,) = updates(Muon(parameters((100, 64)), **options), [gradient[:100]])
    shape = (2, 128, 64) if path == "stack" else (128, 64)
    splits = {} if path == "whole" else {"matrix_splits": [(100, 28)]}
    optimizer = Muon([{"params": parameters(shape), **splits}], **options)
    (padded,) = updates(optimizer, [gradient.expand(shape).clone()])
    padded = padded.view(-1, 128, 64)[0]
    assert padded[100:].abs().max() == 0
    same = torch.allclose(padded[:100], alone, atol=1e-5)
    assert same == (path != "whole")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(6, 6), (24, 6), (6, 24), (64, 16), (1, 9), (9, 1)])
def test_the_size_of_an_update_is_the_closed_form_of_its_mode(shape, mode):
    m, n = shape
    expected = {
        "original": math.sqrt(max(1, m / n)),
        "match_rms_adamw": 0.2 * math.sqrt(max(m, n)),
        "spectral_unclamped": math.sqrt(m / n),
    }[mode] / math.sqrt(max(m, n))  # the RMS of an orthogonal m×n matrix
    gradient = torch.linalg.qr(values(1, max(shape), max(shape)))[0][:m, :n] + 0.1 * values(2, m, n)
    options = {"weight_decay": 0.0, "adjust_lr_fn": mode, "ns_coefficients": "exact", **FP32}
    steps = {
        "whole": Muon(parameters(shape), lr=1.0, **options),
        "block": BlockMuon(parameters(shape), lr=1.0, **options),
        "row": PeriodicRowMuon(parameters(shape), lr=1.0, phase=1, **options),
        "refresh": PeriodicRowMuon(parameters(shape), lr=1.0, **options),
    }
    for name, optimizer in steps.items():
        (update,) = updates(optimizer, [gradient.clone()])
        assert rms(update) == pytest.approx(expected, rel=3e-3), name


@pytest.mark.parametrize("cls", ALL)
def test_a_weight_whose_gradient_was_zero_at_first_makes_no_jump_and_no_nan(cls):
    """As gates that begin at zero do: NorMuon divided zero by zero."""
    (weight,) = params = parameters((12, 8))
    optimizer = cls(params, lr=1.0, weight_decay=0.0)
    for _ in range(5):
        assert updates(optimizer, [torch.zeros_like(weight)])[0].abs().max() == 0
    for step in range(3):
        (update,) = updates(optimizer, [values(step, 12, 8) * 1e-12])
        assert update.isfinite().all() and 0 < rms(update) < 3
    for state in optimizer.state[weight].values():
        assert state.isfinite().all()


# -- crashes ----------------------------------------------------------------------------------------------------------


DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("state", DTYPES)
@pytest.mark.parametrize("gradient", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("cls", ALL)
def test_any_dtypes_of_weight_gradient_and_state_go_together(cls, stored, gradient, state):
    def train(stored, gradient, state):
        weight = nn.Parameter(values(0, 12, 8).to(stored))
        if hasattr(weight, "grad_dtype"):  # torch 2.10
            weight.grad_dtype = None
        elif stored != gradient:
            pytest.skip("this torch has no gradients of another dtype")
        optimizer = cls([weight], lr=0.1)
        saved = optimizer.state_dict()
        saved["state"] = {0: {key: torch.zeros(12, 8, dtype=state) for key in saved["state"][0]}}
        optimizer.load_state_dict(saved)
        for step in range(4):
            weight.grad = values(step + 1, 12, 8).to(gradient)
            optimizer.step()
        assert weight.dtype == stored and {s.dtype for s in optimizer.state[weight].values()} == {state}
        return weight.detach().float()

    found, exact = train(stored, gradient, state), train(*[torch.float32] * 3)
    assert rms(found - exact) < 0.03 * rms(exact - values(0, 12, 8)) + 0.003 * rms(exact)


def test_no_stack_has_as_many_elements_as_a_32_bit_offset_can_count(monkeypatch):
    sizes = []

    def orthogonal(stack, schedule, eps, dtype):
        sizes.append(len(stack) * 4096 * 11008)
        return torch.empty(len(stack), 4096, 11008, device="meta", dtype=dtype)

    monkeypatch.setattr(newton_schulz, "_orthogonal", orthogonal)
    matrices = [torch.empty(4096, 11008, device="meta", dtype=torch.bfloat16) for _ in range(100)]
    for dtype in (torch.float32, torch.bfloat16):
        assert len(orthogonalize_all(matrices, dtype=dtype)) == 100
    assert sum(sizes) == 2 * 100 * 4096 * 11008 > 2**31 > max(sizes)


def test_seventy_two_rows_over_sixteen_ranks_make_an_optimizer(fake_ranks):
    fake_ranks(16)
    mesh = init_device_mesh("cpu", (16,))
    weight = nn.Parameter(distribute_tensor(torch.empty(72, 40, device="meta"), mesh, [Shard(0)], src_data_rank=None))
    (placed,) = Muon([weight]).plan.buckets
    rows = [share.rows for share in placed.bucket.cargo[0].shares]
    assert rows == [5] * 14 + [2, 0] and sum(map(sum, placed.bucket.traffic)) == 72 * 40


def test_every_group_that_a_step_meets_in_is_warmed_up_at_construction(fake_ranks, monkeypatch):
    """NCCL makes communicators lazily: the one of row norms, over a part of the mesh, had none before its step."""
    fake_ranks(4)
    warmed = []
    monkeypatch.setattr("optimizers.engine.driver.warm_up", lambda group, device: warmed.append(group))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    weight = distribute_tensor(values(0, 16, 8), mesh, [Shard(0), Shard(1)], src_data_rank=None)
    Muon([nn.Parameter(weight)])
    assert warmed == [dist.group.WORLD]
    warmed.clear()
    PeriodicRowMuon([nn.Parameter(weight)])
    assert warmed == [dist.group.WORLD, mesh.get_group("tensor")]


@pytest.mark.parametrize("cls", ALL)
def test_fifty_steps_leave_no_tensor_behind(cls):
    params = parameters((12, 8), (8, 16))
    optimizer = cls(params, lr=0.1)
    alive = []
    for step in range(50):
        updates(optimizer, [values(step, *p.shape) for p in params])
        if step in (5, 49):
            gc.collect()
            alive.append(sum(x.numel() for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter)))
    assert alive[0] == alive[1]


class NoReadBack(TorchFunctionMode):
    """Raises where a tensor is read by Python, which stalls a GPU; on a CPU nothing else shows it."""

    FORBIDDEN = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert getattr(func, "__name__", "") not in self.FORBIDDEN, func
        return func(*args, **(kwargs or {}))


class NoScalars(TorchDispatchMode):
    """The same for what C++ reads."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        assert func not in (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


def test_the_modes_that_forbid_reading_do_so():
    one = torch.ones(())
    for read in (one.item, one.cpu, one.tolist, one.numpy, lambda: float(one), lambda: bool(one), lambda: int(one)):
        with pytest.raises(AssertionError), NoReadBack():
            read()
    with pytest.raises(AssertionError), NoScalars():
        one.item()


@pytest.mark.parametrize("cls", ALL)
def test_a_step_never_reads_a_tensor_back(cls):
    params = parameters((12, 8), (8, 16), (3, 4, 6))
    optimizer = cls(params, lr=torch.tensor(0.1))
    for step in range(6):
        for i, p in enumerate(params):
            p.grad = values(10 * step + i, *p.shape) if i != step else None
        with NoReadBack(), NoScalars():
            optimizer.step()


# -- cost -------------------------------------------------------------------------------------------------------------


def test_matrices_of_one_shape_are_orthogonalised_in_one_stack(monkeypatch):
    stacks, orthogonal = [], newton_schulz._orthogonal

    def counted(matrices, *rest):
        (shape,) = {matrix.shape for matrix in matrices}
        stacks.append((len(matrices), *shape))
        return orthogonal(matrices, *rest)

    monkeypatch.setattr(newton_schulz, "_orthogonal", counted)
    shapes = [(8, 6)] * 5 + [(6, 8)] * 3
    together = updates(Muon(parameters(*shapes), lr=1.0), [values(i, *s) for i, s in enumerate(shapes)])
    assert stacks == [(5, 8, 6), (3, 6, 8)]
    for i, shape in enumerate(shapes):
        optimizer = Muon([nn.Parameter(values(i, *shape))], lr=1.0)
        assert (updates(optimizer, [values(i, *shape)])[0] - together[i]).abs().max() <= 1e-3


@pytest.mark.parametrize("cls", MATRIX)
@pytest.mark.parametrize(("shape", "matrices"), [((6, 4, 3), 6), ((6, 4, 3, 3), 1), ((6, 4, 2, 2, 2), 1), ((6, 4), 1)])
def test_deeper_weights_have_one_declared_meaning(cls, shape, matrices, normalised):
    updates(cls(parameters(shape)), [values(1, *shape)])
    flat = (4, 3) if len(shape) == 3 else (6, math.prod(shape[1:]))
    assert normalised == [[flat] * matrices]


def test_a_hybrid_mesh_splits_newton_schulz_over_replicas_and_shards(fake_ranks):
    fake_ranks(4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shapes = [(64, 32)] * 8
    alone = Muon(parameters(*shapes)).plan.flops("refresh")[0]
    weights = [distribute_tensor(w, mesh, [Replicate(), Shard(0)], src_data_rank=None) for w in parameters(*shapes)]
    shared = Muon(list(map(nn.Parameter, weights))).plan.flops("refresh")
    assert [shared[rank] / alone for rank in range(4)] == [0.25] * 4


@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
def test_no_rank_owns_more_than_its_share_and_one(fake_ranks, ranks):
    fake_ranks(ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    weights = [distribute_tensor(w, mesh, [Shard(0)], src_data_rank=None) for w in parameters(*[(20, 12)] * 37)]
    for bucket_bytes in ("auto", 1, 1500):
        plan = Muon(list(map(nn.Parameter, weights)), bucket_bytes=bucket_bytes).plan
        owners = [owner for placed in plan.buckets for owner in placed.bucket.owners]
        assert len(owners) == 37
        assert max(map(owners.count, range(ranks))) <= math.ceil(37 / ranks) + 1


def test_the_printed_plan_names_what_travels_in_which_dtype_and_how_often(fake_ranks):
    fake_ranks(4)
    mesh = init_device_mesh("cpu", (4,))
    weight = nn.Parameter(distribute_tensor(values(0, 64, 32), mesh, [Shard(0)], src_data_rank=None))
    for dtype, name, size in ((None, "bfloat16", 2), (torch.float32, "float32", 4)):
        plan = MuonBP([weight], wire_dtype=dtype, period=5).plan
        (group,) = (line for line in plan.summary().splitlines() if line.startswith("group 0"))
        assert f"wire dtype {name}" in group and "period 5" in group and "exchange owner" in group
        assert plan.bytes_sent("refresh").total() == 2 * size * 64 * 32 * 3 // 4
        assert plan.bytes_sent("other").total() == 0


@pytest.mark.parametrize(
    ("cls", "options", "said"),
    [
        (Muon, {}, "muon; period 1 (exact: whole matrices in every step); wire dtype bfloat16; exchange owner"),
        (
            MuonBP,
            {"block_grid": (2, 1), "phase": 3},
            "muon_bp; period 5 (whole matrices every 5 steps, block steps between), phase 3; wire dtype bfloat16; "
            "exchange owner; blocks 2 × 1 a matrix",
        ),
        (MuonBP, {"period": 1}, "period 1 (exact: whole matrices in every step), phase 0"),
        (
            PeriodicRowMuon,
            {"stagger": True, "exchange": "gather", "wire_dtype": torch.float32},
            "periodic_row_muon; period 3 (whole matrices every 3 steps, row steps between), phase 0, staggered over "
            "the period; wire dtype float32; exchange gather",
        ),
        (BlockMuon, {}, "block_muon; period inf (block steps only); blocks are the shards"),
        (PeriodicRowMuon, {"period": math.inf}, "periodic_row_muon; period inf (row steps only)"),
        (AdamW, {}, "adamw; elementwise"),
    ],
)
def test_the_printed_plan_names_the_mode_of_every_group(cls, options, said):
    plan = cls(parameters((8, 6)), **options).plan.summary()
    (line,) = (line for line in plan.splitlines() if line.startswith("group 0: "))
    assert said in line
