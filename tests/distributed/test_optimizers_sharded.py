"""Optimizers on 2, 3 and 4 gloo ranks. Every ``case_…`` runs on all ranks of one start."""

import copy
import functools
import math
import tempfile
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from optimizers import AdamW, BlockMuon, Muon, MuonBP, PeriodicRowMuon, census, param_groups
from optimizers.sharding.layout import chunk_rows
from tests.distributed.ranks import RankError, run, run_case
from tests.optimizers.test_spans import divided

FP32 = {"ns_dtype": torch.float32, "wire_dtype": torch.float32}
# uneven, square, tall, fewer rows than ranks, one row, one column, equal shapes, a convolution, a stack
SHAPES = [(10, 6), (8, 8), (24, 5), (2, 7), (1, 9), (6, 1), (10, 6), (5, 3, 2, 2), (3, 4, 6)]
GRID_SHAPES = [(24, 8), (24, 3), (12, 16)]  # 2-row blocks of 24 or 12 rows lie inside the shards of 1, 2, 3, 4 ranks


def values(seed, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights(shapes, placement=None, dtype=torch.float32):
    mesh = None if placement is None else init_device_mesh("cpu", (dist.get_world_size(),))
    full = [values(i, shape).to(dtype) for i, shape in enumerate(shapes)]
    return [
        nn.Parameter(w if mesh is None else distribute_tensor(w, mesh, [placement], src_data_rank=None)) for w in full
    ]


def set_gradients(params, step):
    for i, p in enumerate(params):
        g = values(1000 * (step + 1) + i, p.shape).to(p.dtype)
        if hasattr(p, "device_mesh"):
            g = distribute_tensor(g, p.device_mesh, p.placements, src_data_rank=None)
        p.grad = g


def train(cls, shapes, placement, steps=5, dtype=torch.float32, **options):
    params = weights(shapes, placement, dtype)
    optimizer = cls(params, lr=0.02, **options)
    for step in range(steps):
        set_gradients(params, step)
        optimizer.step()
    return [p.full_tensor() if placement is not None else p.detach() for p in params], optimizer


def largest_difference(first, second):
    return max((a - b).abs().max().item() for a, b in zip(first, second, strict=True))


def same_everywhere(cls, shapes, placement=None, limit=0.0, **options):
    alone, _ = train(cls, shapes, None, **options)
    shared, _ = train(cls, shapes, placement or Shard(0), **options)
    found = largest_difference(alone, shared)
    assert found <= limit, f"{cls.__name__} {options}: {found}"


def case_sharded_equals_unsharded():
    same_everywhere(AdamW, [*SHAPES, (7,)], limit=1e-6)
    for nesterov in (True, False):
        same_everywhere(Muon, SHAPES, nesterov=nesterov, limit=1e-6, **FP32)
        same_everywhere(PeriodicRowMuon, SHAPES, nesterov=nesterov, limit=1e-6, **FP32)
    same_everywhere(PeriodicRowMuon, SHAPES, period=math.inf)
    same_everywhere(MuonBP, SHAPES, period=1, limit=1e-6, **FP32)
    for grid in (12, (12, 2)):
        same_everywhere(BlockMuon, GRID_SHAPES[:2], block_grid=grid, limit=1e-6, **FP32)
        same_everywhere(MuonBP, GRID_SHAPES[:2], block_grid=grid, limit=1e-6, **FP32)
    same_everywhere(MuonBP, GRID_SHAPES[2:], block_grid=12, limit=1e-6, **FP32)


def case_bf16_on_the_wire_changes_nothing_but_precision():
    for ns_dtype in (torch.float32, torch.bfloat16):
        same_everywhere(Muon, SHAPES, limit=1e-6, ns_dtype=ns_dtype)
    same_everywhere(Muon, SHAPES, dtype=torch.bfloat16)
    same_everywhere(Muon, SHAPES, dtype=torch.float64, limit=1e-12)


def case_replicas_of_a_mesh_train_like_one_process():
    same_everywhere(MuonBP, SHAPES, Replicate(), **FP32)


def case_without_a_grid_blocks_are_the_shards():
    for cls in (BlockMuon, MuonBP):
        alone, _ = train(cls, [(24, 8)], None, **FP32)
        shared, _ = train(cls, [(24, 8)], Shard(0), **FP32)
        assert largest_difference(alone, shared) > 1e-3
    ranks = dist.get_world_size()
    declared, _ = train(BlockMuon, [(24, 8)], None, block_grid=ranks, **FP32)
    shared, _ = train(BlockMuon, [(24, 8)], Shard(0), **FP32)
    assert largest_difference(declared, shared) <= 1e-6


def case_orthogonalising_shards_is_not_muon():
    whole, _ = train(Muon, [(24, 8)], Shard(0), steps=1, weight_decay=0.0, nesterov=False, **FP32)
    update = (values(0, (24, 8)) - whole[0]) / (0.02 * 0.2 * math.sqrt(24))
    assert torch.linalg.svdvals(update).sub(0.9).abs().max() < 0.32


def case_one_rank_without_a_gradient_does_not_hang_and_counts_as_zeros():
    for cls in (Muon, MuonBP, PeriodicRowMuon, BlockMuon, AdamW):
        results = []
        for zeros in (True, False):
            params = weights([(8, 6), (10, 6)], Shard(0))
            optimizer = cls(params, lr=0.1)
            for step in range(3):
                set_gradients(params, step)
                if dist.get_rank() == 1:
                    params[0].grad = params[0].grad * 0 if zeros else None
                optimizer.step()
            assert zeros or dist.get_rank() != 1 or params[0].grad is None
            results.append([p.full_tensor() for p in params])
        assert largest_difference(*results) == 0, cls


def case_missing_gradient_everywhere_equals_zeros():
    results = []
    for zeros in (True, False):
        params = weights([(8, 6), (10, 6)], Shard(0))
        optimizer = Muon(params, **FP32)
        for step in range(3):
            set_gradients(params, step)
            if step == 1:
                params[0].grad = params[0].grad * 0 if zeros else None
            optimizer.step()
        results.append([p.full_tensor() for p in params])
    assert largest_difference(*results) == 0


def case_cheap_steps_are_silent_and_refreshes_cost_what_the_plan_says():
    ranks, shapes = dist.get_world_size(), [(24, 8)] * 12
    elements = sum(math.prod(s) for s in shapes)
    for cls, refreshes in (
        (AdamW, []), (BlockMuon, []), (Muon, range(7)), (MuonBP, [0, 5]), (PeriodicRowMuon, [0, 3, 6])
    ):  # fmt: skip
        params = weights(shapes, Shard(0))
        with census() as seen:
            optimizer = cls(params)
        # one exchange at construction makes the communicator, on the device of the weights
        assert seen.calls["alltoall_base_"] == (len(refreshes) > 0)
        for step in range(7):
            set_gradients(params, step)
            with census() as seen:
                optimizer.step()
            assert seen.bytes_sent == optimizer.wire_bytes == optimizer.wire_bytes_max
            if step in refreshes:
                assert seen.calls == Counter({"alltoall_base_": 2})
                assert seen.bytes_sent * ranks**2 == 2 * 2 * elements * (ranks - 1)
            else:
                assert seen.collectives == 0


def case_wire_bytes_are_exact_for_uneven_shards():
    for wire, size in ((None, 2), (torch.float32, 4)):
        params = weights([(10, 6)], Shard(0))
        optimizer = Muon(params, wire_dtype=wire)
        set_gradients(params, 0)
        with census() as seen:
            optimizer.step()
        rows, rank = chunk_rows(10, dist.get_world_size()), dist.get_rank()
        expected = (10 - rows[0] if rank == 0 else rows[rank]) * 6 * size  # rank 0 owns the only matrix
        assert seen.bytes_sent == optimizer.wire_bytes == expected
        sent: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(sent, optimizer.wire_bytes)
        assert optimizer.wire_bytes_max == max(sent)


def case_buckets_and_flights_change_nothing():
    results, calls = [], []
    for bucket_bytes in (1, 400, 2**26):
        for max_in_flight in (1, 2, 3):
            found, optimizer = train(
                Muon, SHAPES, Shard(0), bucket_bytes=bucket_bytes, max_in_flight=max_in_flight, **FP32
            )
            with census() as seen:
                optimizer.step()
            results.append(found)
            calls.append(seen.collectives)
    # The stack of three matrices never travels, the matrix of a single row need not travel to an owner.
    assert calls[0] == 2 * 8 - 1 > calls[3] > calls[6] == 2
    assert all(largest_difference(results[0], other) == 0 for other in results[1:])


def case_a_plan_that_differs_is_an_error_that_names_the_entry():
    odd = dist.get_rank() == 1
    with pytest.raises(ValueError, match="rank 0 has group 0: period 5, rank 1 has group 0: period 4;"):
        MuonBP(weights([(8, 6)], Shard(0)), period=4 if odd else 5)
    with pytest.raises(ValueError, match=r"rank 0 has .*number 1 of shape \(8, 4\).*rank 1 has .*shape \(8, 6\)"):
        Muon(weights([(8, 6), (8, 6) if odd else (8, 4)], Shard(0)))
    with pytest.raises(ValueError, match="rank 1 has nothing"):
        Muon(weights([(8, 6)] if odd else [(8, 6), (8, 4)], Shard(0)))


def on_one_rank(message):
    """Every rank has to raise what happened on rank 1, soon."""
    return pytest.raises(ValueError, match=message if dist.get_rank() == 1 else f"rank 1: .*{message}")


def case_an_error_of_one_rank_is_an_error_of_all():
    odd = dist.get_rank() == 1
    matrix, vector = (8, 6), (6,)
    with on_one_rank("a 1-D parameter is no matrix"):
        Muon(weights([matrix, vector if odd else matrix], Shard(0)))
    with on_one_rank("lr is -1.0"):
        Muon(weights([matrix], Shard(0)), lr=-1.0 if odd else 1.0)
    with on_one_rank("unknown key 'perod'"):  # before the second group, which the others compare as well
        first, second = weights([matrix, matrix], Shard(0))
        Muon([{"params": [first], **({"perod": 3} if odd else {})}, {"params": iter([second])}])
    params = weights([matrix, matrix], Shard(0))
    optimizer = Muon(params[:1])
    with on_one_rank("lr is nan"):
        optimizer.add_param_group({"params": params[1:], "lr": math.nan if odd else 1.0})
    assert len(optimizer.param_groups) == 1 and set(optimizer.state) == {params[0]}
    set_gradients(params, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    if odd:
        saved["state"] = {}
    before = optimizer.state[params[0]]["momentum_buffer"].to_local().clone()
    saved["param_groups"][0]["lr"] = 7.0
    with on_one_rank("has no state 'momentum_buffer'"):
        optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[params[0]]["momentum_buffer"].to_local(), before)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    if odd:
        optimizer.param_groups[0]["params"][0] = params[1]
    else:
        optimizer.param_groups[0]["params"][0].requires_grad_(False)
    with on_one_rank("replaced in the groups after the first step"):
        optimizer.step()


def case_errors_reach_ranks_that_share_no_mesh_axis_with_the_one_that_has_them():
    if dist.get_world_size() != 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    p = nn.Parameter(distribute_tensor(values(0, (8, 8)), mesh, [Replicate(), Shard(0)], src_data_rank=None))
    with on_one_rank("lr is -1.0"):
        AdamW([p], lr=-1.0 if dist.get_rank() == 1 else 1.0)
    with pytest.raises(ValueError, match=r"rank \d has group 0: eps 1e-0[68], rank \d has group 0: eps 1e-0[68]"):
        AdamW([p], eps=1e-6 if dist.get_rank() == 1 else 1e-8)


def case_ranks_whose_hardware_iterates_in_another_dtype_are_told():
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr("optimizers.engine.jobs.iteration_dtype", lambda *args: torch.float16)
        with pytest.raises(ValueError, match=r"rank 1 has .*set ns_dtype if hardware differs: .* iterates in .*16"):
            Muon(weights([(8, 6)], Shard(0)))


def case_bad_placements_and_grids_are_named():
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    kernel = nn.Parameter(distribute_tensor(values(0, (4, 4, 12, 2)), mesh, [Shard(2)], src_data_rank=None))
    with pytest.raises(ValueError, match=r"'a.weight' of shape \(4, 4, 12, 2\).*Shard\(dim=2\).*Shard of rows"):
        Muon([("a.weight", kernel)])
    AdamW([kernel])
    if ranks == 2:
        with pytest.raises(ValueError, match=r"block_grid 3 cuts 16 rows every 6.*every 8 rows.*fit: 2, 4, 8, 16"):
            BlockMuon(weights([(16, 4)], Shard(0)), block_grid=3)
    line = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("replicate", "shard"))
    thin = nn.Parameter(distribute_tensor(values(0, (8, 8)), line, [Replicate(), Shard(0)], src_data_rank=None))
    Muon([thin])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6)) for _ in range(3))
        self.head = nn.Linear(6, 5)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) + 0.0


def small_net(sharded):
    torch.manual_seed(0)
    net = Net()
    if sharded:
        for block in net.blocks:
            fully_shard(block)
        fully_shard(net)
    return net


def one_step(net, optimizer, seed):
    tokens = torch.randint(0, 11, (4, 7), generator=torch.Generator().manual_seed(seed))
    net(tokens).square().mean().backward()  # every rank sees the same batch: the mean over ranks is the gradient
    optimizer.step()
    optimizer.zero_grad()


def full(net):
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for p in net.parameters()]


def case_fsdp2_trains_like_one_process():
    for cls in (AdamW, Muon, PeriodicRowMuon):
        nets = [small_net(sharded) for sharded in (False, True)]
        options = {} if cls is AdamW else FP32
        for net in nets:
            optimizer = cls(param_groups(net, adamw_options={"lr": 1e-3}), lr=0.01, **options)
            for seed in range(4):
                one_step(net, optimizer, seed)
        assert largest_difference(full(nets[0]), full(nets[1])) <= 2e-5, cls


def case_reading_the_state_does_not_advance_the_step():
    net = small_net(True)
    optimizer = MuonBP(param_groups(net), lr=0.01)
    before = full(net)
    state = get_optimizer_state_dict(net, optimizer)
    assert [group["step"] for group in optimizer.param_groups] == [0] * len(optimizer.param_groups)
    assert {type(v).__name__ for s in state["state"].values() for v in s.values()} == {"DTensor"}
    assert largest_difference(before, full(net)) == 0
    for seed in range(7):
        one_step(net, optimizer, seed)
    saved = copy.deepcopy(get_optimizer_state_dict(net, optimizer))
    twin = small_net(True)
    twin.load_state_dict(net.state_dict())
    other = MuonBP(param_groups(twin), lr=0.5)
    set_optimizer_state_dict(twin, other, saved)
    assert [group["step"] for group in other.param_groups] == [7] * len(other.param_groups)
    for seed in range(7, 12):
        for model, opt in ((net, optimizer), (twin, other)):
            one_step(model, opt, seed)
        assert other.wire_bytes == optimizer.wire_bytes
        assert (optimizer.wire_bytes > 0) == (seed == 10)
    assert largest_difference(full(net), full(twin)) == 0


def case_state_or_gradients_placed_otherwise_are_refused():
    params = weights([(8, 6)], Shard(0))
    optimizer = Muon(params)
    with pytest.raises(ValueError, match=r"not sharded as its parameter is; load with .*set_optimizer_state_dict"):
        optimizer.load_state_dict(Muon(weights([(8, 6)])).state_dict())
    saved = optimizer.state_dict()
    buffer = saved["state"][0]["momentum_buffer"]
    for wrong, message in (
        (buffer.redistribute(placements=[Replicate()]), r"has placements \(Replicate\(\),\), its parameter \(Shard"),
        (
            distribute_tensor(
                values(0, (8, 6)),
                init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("other",)),
                [Shard(0)],
                src_data_rank=None,
            ),
            "lies on DeviceMesh.*other",
        ),
    ):
        with pytest.raises(ValueError, match="group 0, parameter number 0 of shape.*" + message):
            optimizer.load_state_dict({**saved, "state": {0: {"momentum_buffer": wrong}}})
    params[0].grad = params[0].detach().redistribute(placements=[Replicate()])
    with pytest.raises(ValueError, match=r"placements \(Shard\(dim=0\),\) is placed differently: \(Replicate"):
        optimizer.step()


def case_an_optimizer_made_before_a_meta_model_got_its_memory_follows_it():
    with torch.device("meta"):
        net = nn.Linear(6, 10, bias=False)
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = Muon(net.parameters())
    net.to_empty(device="cpu")
    nn.init.ones_(net.weight)
    before = net.weight.full_tensor()
    set_gradients([net.weight], 0)
    optimizer.step()
    assert optimizer.state[net.weight]["momentum_buffer"].device.type == "cpu"
    assert largest_difference([net.weight.full_tensor()], [before]) > 0
    net.double()
    set_gradients([net.weight], 1)
    optimizer.step()
    assert optimizer.state[net.weight]["momentum_buffer"].dtype == torch.float64


def case_frozen_parameters_pass_through_distributed_checkpoints():
    net = small_net(True)
    net.blocks[0].requires_grad_(False)
    optimizer = PeriodicRowMuon([{"params": list(net.parameters()), "algorithm": "adamw"}])
    for seed in range(2):
        one_step(net, optimizer, seed)
    saved = copy.deepcopy(get_optimizer_state_dict(net, optimizer))
    assert len(saved["state"]) == sum(p.requires_grad for p in net.parameters())
    other = PeriodicRowMuon([{"params": list(net.parameters()), "algorithm": "adamw"}])
    set_optimizer_state_dict(net, other, saved)
    assert other.param_groups[0]["step"] == 2
    net.blocks[0].requires_grad_(True)
    one_step(net, other, 2)
    assert len(other.state) == len(list(net.parameters()))


def case_the_census_sees_other_collectives():
    ranks, rank, x = dist.get_world_size(), dist.get_rank(), torch.ones(12)
    shard = distribute_tensor(torch.ones(ranks, 4), init_device_mesh("cpu", (ranks,)), [Shard(0)], src_data_rank=None)
    with census() as seen:
        dist.all_reduce(x)
        work = dist.all_gather([torch.empty(12) for _ in range(ranks)], x, async_op=True)
        work.wait()
        shard.full_tensor()
    assert seen.calls == Counter({"allreduce_": 1, "allgather_": 1, "all_gather_into_tensor": 1})
    assert seen.bytes_sent == 2 * 48 * (ranks - 1) // ranks + 48 * (ranks - 1) + 16 * (ranks - 1)
    root = ranks - 1
    for collective, at_root, elsewhere in (
        (lambda: dist.broadcast(x, root), 48, 0),
        (lambda: dist.reduce(x, root), 0, 48),
        (lambda: dist.gather(x, [torch.empty(12) for _ in range(ranks)] if rank == root else None, root), 0, 48),
        (lambda: dist.scatter(x, [x] * ranks if rank == root else None, root), 48 * (ranks - 1), 0),
    ):
        with census() as seen:
            collective()
        assert seen.collectives == 1 and seen.bytes_sent == (at_root if rank == root else elsewhere)


def case_the_time_of_a_step_is_divided_into_what_it_was_spent_on():
    everything = "momentum exchange orthogonalisation update"
    for options in ({}, {"exchange": "gather"}, {"bucket_bytes": 200}, {"bucket_bytes": 200, "max_in_flight": 1}):
        params = weights(SHAPES, Shard(0))
        set_gradients(params, 0)
        optimizer = MuonBP(params, period=2, **options)
        divided(optimizer, everything)
        divided(optimizer, "momentum orthogonalisation update")  # blocks
    params = weights([(8, 12), (12, 24)], Shard(1))
    set_gradients(params, 0)
    optimizer = PeriodicRowMuon(params, period=2)
    divided(optimizer, everything)
    divided(optimizer, "exchange update", momentum="update")  # sums over rows that ranks share


def case_two_copies_of_an_optimizer_step_alike():
    params = weights([(8, 6), (10, 6)], Shard(0))
    first = MuonBP(params, lr=0.1, period=2, max_in_flight=3)
    set_gradients(params, 0)
    first.step()
    twin = copy.deepcopy(first)
    copies = twin.param_groups[0]["params"]
    for step in (1, 2, 3):
        set_gradients(params, step)
        set_gradients(copies, step)
        first.step(), twin.step()
        assert first.wire_bytes == twin.wire_bytes and (first.wire_bytes > 0) == (step == 2)
        assert largest_difference([p.full_tensor() for p in params], [p.full_tensor() for p in copies]) == 0
    assert all(a is not b for a, b in zip(params, copies, strict=True))


def save_after_steps(folder):
    net = small_net(True)
    optimizer = PeriodicRowMuon(param_groups(net), lr=0.01, **FP32)
    for seed in range(4):
        one_step(net, optimizer, seed)
    dcp.save({"model": net.state_dict(), "optimizer": get_optimizer_state_dict(net, optimizer)}, checkpoint_id=folder)
    for seed in range(4, 7):
        one_step(net, optimizer, seed)
    return [p.clone() for p in full(net)]


def resume_on_other_ranks(folder):
    net = small_net(True)
    optimizer = PeriodicRowMuon(param_groups(net), lr=0.01, **FP32)
    state = {"model": net.state_dict(), "optimizer": get_optimizer_state_dict(net, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    net.load_state_dict(state["model"])
    set_optimizer_state_dict(net, optimizer, state["optimizer"])
    for seed in range(4, 7):
        one_step(net, optimizer, seed)
    return [p.clone() for p in full(net)]


CASES = [case for name, case in sorted(globals().items()) if name.startswith("case_")]
CHECKPOINT = tempfile.TemporaryDirectory()


def everything(folder):
    for case in CASES:
        run_case(case)
    ranks = dist.get_world_size()
    return save_after_steps(folder) if ranks == 2 else resume_on_other_ranks(folder) if ranks == 3 else None


@functools.cache
def outcome(ranks):
    """Results of one start of so many ranks; three ranks read what two wrote."""
    if ranks == 3:
        outcome(2)
    return run(everything, ranks, CHECKPOINT.name)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_case_on_gloo_ranks(ranks):
    outcome(ranks)


def test_a_checkpoint_of_two_ranks_resumes_on_three():
    assert largest_difference(outcome(2)[0], outcome(3)[0]) <= 1e-6


def one_rank_fails():
    if dist.get_rank() == 1:
        raise KeyError("the reason")
    dist.barrier()


def test_the_harness_brings_back_the_error_of_one_rank_while_others_wait():
    with pytest.raises(RankError, match=r"rank 1 of 2:(.|\n)*the reason"):
        run(one_rank_fails, 2)
