"""Regions, logical matrices, staggering and the printed plan, in one process."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from optimizers import AdamW, BlockMuon, Muon, MuonBP, PeriodicRowMuon, param_groups
from optimizers.engine.schedule import stagger_offsets
from optimizers.sharding.layout import chunk_rows, regions_of
from optimizers.sharding.matrices import Matrix, Rect, Region, matrices
from optimizers.sharding.plan import Bucket, Cargo, GatherBucket, Planner

FP32 = {"ns_dtype": torch.float32, "wire_dtype": torch.float32}
BENCHMARK = [(512, 512), (2048, 512), (512, 2048)] * 12


def values(seed, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def train(optimizer, steps, start=0):
    for step in range(start, start + steps):
        for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            p.grad = values(100 * (step + 1) + i, p.shape)
        optimizer.step()


def parameters(*shapes):
    return [nn.Parameter(values(i, shape)) for i, shape in enumerate(shapes)]


# -- regions --------------------------------------------------------------------------------------------------------


def rows(shape, placements, mesh):
    return [region.rows for region, _ in regions_of(shape, placements, mesh)]


def test_fully_shard_over_tensor_parallelism_cuts_the_rows_that_tensor_parallelism_left():
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    assert rows((10, 4), placements, (2, 2)) == [(0, 3), (5, 3), (3, 2), (8, 2)]
    assert rows((10, 4), (Shard(0), Shard(0)), (2, 2)) == [(0, 3), (3, 2), (5, 3), (8, 2)]


def test_a_strided_shard_that_is_no_box_is_refused():
    with pytest.raises(ValueError, match="do not give every rank a box"):
        regions_of((8, 4), (_StridedShard(0, split_factor=4), Shard(0)), (2, 2))


def test_replicas_are_told_apart_and_axes_of_size_one_do_not_count():
    held = regions_of((4, 4), (Replicate(), Shard(1), Shard(0)), (2, 1, 2))
    assert [replica for _, replica in held] == [0, 0, 1, 1]
    assert [region.rows for region, _ in held] == [(0, 2), (2, 2)] * 2


def test_every_row_of_every_matrix_lies_on_one_rank():
    for split in (None, (5,), (3, 7, 5), ("interleaved", 3)):
        for ranks in (1, 2, 4, 7, 20):
            found = matrices((2, 15, 4), split, "w")
            seen = {}
            for rank, count in enumerate(chunk_rows(15, ranks)):
                region = Region((0, 2), (sum(chunk_rows(15, ranks)[:rank]), count), (0, 4))
                for matrix in found:
                    rect, at = matrix.within(region)
                    for i in range(rect.rows):
                        place = (matrix.index, region.rows[0] + at + i * matrix.step)
                        assert place == (matrix.index, matrix.start + matrix.step * (rect.row + i))
                        assert seen.setdefault(place, rank) == rank
            assert len(seen) == 30
    assert Matrix(1, 0, 1, 5, 4).within(Region((0, 1), (0, 5), (0, 4)))[0] == Rect(0, 0, 0, 4)


# -- logical matrices -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Muon, BlockMuon, MuonBP, PeriodicRowMuon])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_gated_qkv_and_interleaved_swiglu_are_as_separate_parameters(cls, scale):
    fused = parameters((192, 16), (24, 16))
    q, gate, k, v = (nn.Parameter(part.detach().clone()) for part in fused[0].split((64, 64, 32, 32)))
    up, down = (nn.Parameter(fused[1].detach()[i::2].clone()) for i in range(2))
    together = cls(
        [{"params": fused, "matrix_splits": ((64, 64, 32, 32), ("interleaved", 2))}], adjust_lr_fn=scale, **FP32
    )
    apart = cls([q, gate, k, v, up, down], adjust_lr_fn=scale, **FP32)
    for step in range(4):
        grads = [values(10 * step + i, p.shape) for i, p in enumerate(fused)]
        for p, g in zip(fused, grads, strict=True):
            p.grad = g
        for p, g in zip((q, gate, k, v), grads[0].split((64, 64, 32, 32)), strict=True):
            p.grad = g.clone()
        up.grad, down.grad = grads[1][0::2].clone(), grads[1][1::2].clone()
        together.step(), apart.step()
    assert torch.equal(fused[0], torch.cat([q, gate, k, v]))
    assert torch.equal(fused[1][0::2], up) and torch.equal(fused[1][1::2], down)


def test_a_split_changes_the_update():
    whole, split = parameters((24, 8))[0], parameters((24, 8))[0]
    for group in ({"params": [whole]}, {"params": [split], "matrix_splits": [(3,)]}):
        train(Muon([group]), 1)
    assert (whole - split).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ([(5,)], r"parameter number 0 of shape \(24, 8\): matrix_splits \(5,\) asks for 5 equal parts, .* 24 rows"),
        ([(8, 8, 4)], r"matrix_splits \(8, 8, 4\) sum to 20 rows, but there are 24"),
        ([("interleaved", 7)], r"matrix_splits \('interleaved', 7\) asks for 7 equal parts"),
        ([("woven", 2)], r"group 0: \('woven', 2\) in matrix_splits has to be \(k,\) for equal chunks"),
        ([(2,), (2,)], "matrix_splits has to name a split or None for each of its 1 parameters"),
    ],
)
def test_splits_that_do_not_fit_are_named(splits, message):
    with pytest.raises(ValueError, match=message):
        Muon([{"params": parameters((24, 8)), "matrix_splits": splits}])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(values(1, (12, 4)))
        self.matrix_splits = {"weight": (3,)}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"qkv": Attention(), "mlp": nn.Linear(4, 6)}) for _ in range(2))


def test_modules_declare_splits_and_patterns_go_before_them():
    matrices_ = ["blocks.*.qkv.weight"]
    groups = param_groups(Model(), matrices=matrices_, splits={"blocks.1.*.weight": (2,)})
    assert groups[0]["param_names"][:2] == ["blocks.0.qkv.weight", "blocks.0.mlp.weight"]
    assert groups[0]["matrix_splits"] == ((3,), None, (2,), (2,))
    assert "matrix_splits" not in param_groups(Model())[0]  # the declaring module's weight goes to AdamW by default
    train(PeriodicRowMuon(groups), 2)


def test_splits_of_nothing_are_errors():
    model = Model()
    with pytest.raises(ValueError, match=r"pattern 'blocks\.\*\.kqv' in splits matches no matrix; the nearest"):
        param_groups(model, splits={"blocks.*.kqv": (3,)})
    with pytest.raises(ValueError, match=r"'blocks.0.mlp.weight' is split as \(2,\) and as \(3,\)"):
        param_groups(model, splits={"*.mlp.weight": (2,), "blocks.0.*": (3,)})
    model.blocks[0]["mlp"].matrix_splits = {"wieght": (3,)}
    with pytest.raises(ValueError, match=r"blocks\.0\.mlp: matrix_splits names 'wieght', which is no parameter"):
        param_groups(model)


def test_splits_pass_through_checkpoints_and_others_are_refused():
    make = lambda split: Muon([{"params": parameters((24, 8)), "matrix_splits": split}])  # noqa: E731
    optimizer = make([(3,)])
    train(optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    make([(3,)]).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"the checkpoint's matrix_splits is \(\(3,\),\), the optimizer's is \(\(2,\)"):
        make([(2,)]).load_state_dict(saved)


# -- the plan -------------------------------------------------------------------------------------------------------


def benchmark(ranks, **options):
    cargo = [Cargo(i, shape, chunk_rows(shape[0], ranks)) for i, shape in enumerate(BENCHMARK)]
    return Planner(ranks, "auto", **options).plan(cargo, torch.bfloat16)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_work_and_bytes_of_the_benchmark_are_balanced_over_at_least_four_buckets(ranks):
    buckets = benchmark(ranks)
    assert len(buckets) >= 4 and all(isinstance(bucket, Bucket) for bucket in buckets)
    for figures in ([bucket.work for bucket in buckets], [bucket.bytes_sent for bucket in buckets]):
        totals = list(map(sum, zip(*figures, strict=True)))
        assert max(totals) <= 1.1 * sum(totals) / ranks
    elements = sum(m * n for m, n in BENCHMARK)
    if ranks != 3:
        assert sum(sum(b.bytes_sent) for b in buckets) == 4 * elements * (ranks - 1) / ranks


def test_auto_buckets_are_of_64_mib_at_most_and_never_tiny():
    sizes = []
    for count, m in ((400, 1024), (12, 16)):
        cargo = [Cargo(i, (m, m), (m, 0)) for i in range(count)]
        buckets = Planner(2, "auto").plan(cargo, torch.bfloat16)
        sizes.append([2 * sum(c.elements(0) for c in b.cargo) for b in buckets])
    assert max(sizes[0]) == 2**26 and len(sizes[1]) == 1


def test_owners_are_dealt_over_all_groups_at_once_and_over_all_replicas():
    small = [Cargo(i, (16, 16), (8, 8) * 2) for i in range(8)]
    large = [Cargo(i, (96, 16), (48, 48) * 2) for i in range(3)]
    replicas = (0, 0, 1, 1)
    for cargo in (small, large):  # the share of each rank of each replica
        for item in cargo:
            half = item.shape[0] // 2
            shares = (Rect(0, half, 0, 16), Rect(half, half, 0, 16)) * 2
            object.__setattr__(item, "shares", shares)
    plans = Planner(4, 2**20, replicas).plan_all([(small, torch.float32), (large, torch.float32)])
    work = [sum(b.work[rank] for plan in plans for b in plan) for rank in range(4)]
    assert max(work) - min(work) <= small[0].flops * 3 < large[0].flops * 2
    (bucket,) = plans[1]
    for src in range(4):
        for owner in range(4):
            assert (bucket.traffic[src][owner] > 0) == (
                bucket.home[src][owner] > 0 and replicas[src] == replicas[owner]
            )
    assert sum(map(sum, bucket.home)) == 2 * sum(map(sum, bucket.traffic))


def test_gathering_repeats_the_work_on_every_rank():
    buckets = benchmark(4, exchange="gather")
    assert all(isinstance(bucket, GatherBucket) for bucket in buckets)
    elements = sum(m * n for m, n in BENCHMARK)
    assert sum(bucket.bytes_sent[0] for bucket in buckets) == 2 * elements * 3 / 4
    assert sum(bucket.work[0] for bucket in buckets) == sum(Cargo(0, s, ()).flops for s in BENCHMARK)


def test_seventy_two_rows_over_sixteen_ranks_are_planned_exactly():
    (bucket,) = Planner(16, "auto").plan([Cargo(0, (72, 5), chunk_rows(72, 16))], torch.float32)
    assert sum(map(sum, bucket.traffic)) == 72 * 5


# -- staggering -----------------------------------------------------------------------------------------------------


def test_staggered_steps_cost_the_same():
    costs = [Cargo(0, shape, ()).flops for shape in BENCHMARK]
    for period in (2, 3, 4, 6):
        offsets = stagger_offsets(costs, period)
        loads = [sum(c for c, o in zip(costs, offsets, strict=True) if o == step) for step in range(period)]
        assert max(loads) <= 1.1 * sum(loads) / period
    assert stagger_offsets(costs, math.inf) == [0] * len(costs)


def test_each_staggered_matrix_refreshes_in_its_step_and_goes_on_there_after_a_resume(monkeypatch):
    from optimizers.engine.directions import spectral

    optimizer = MuonBP(parameters((8, 6), (8, 6), (8, 6)), period=3, phase=1, stagger=True)
    seen = []
    monkeypatch.setattr(
        "optimizers.engine.driver.spectral",
        lambda weights, *rest: seen.append([w.data_ptr() for w in weights]) or spectral(weights, *rest),
    )
    train(optimizer, 4)
    first, second, third = ([p.data_ptr()] for p in optimizer.param_groups[0]["params"])
    assert seen == [third, first, second, third]  # offset 2 is due at t = 1 + 2 − 3
    other = MuonBP(parameters((8, 6), (8, 6), (8, 6)), period=3)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    seen.clear()
    train(other, 1, start=4)
    assert seen == [[other.param_groups[0]["params"][0].data_ptr()]]


def test_the_summary_of_a_plan_names_steps_and_costs():
    plan = MuonBP([("a.weight", nn.Parameter(torch.zeros(64, 32)))], block_grid=2).plan
    assert plan.flops("refresh")[0] == 5 * 2 * (2 * 32 * 32 * 64 + 32**3)
    assert plan.flops("other")[0] == 5 * 2 * 2 * (2 * 32 * 32 * 32 + 32**3)
    assert "no matrix travels" in plan.summary() and "\nstep " in plan.summary()
    staggered = PeriodicRowMuon(parameters(*[(8, 6)] * 6), stagger=True).plan.summary()
    assert [line.split("  ")[0] for line in staggered.splitlines()[3:6]] == ["offset 0", "offset 1", "offset 2"]
    AdamW(parameters((4, 4))).plan.summary()


def test_blocks_of_muon_bp_save_the_published_share_of_flops():
    def saved(grid):
        weight = nn.Parameter(torch.empty(16384, 53248, device="meta"))
        plan = MuonBP([weight], block_grid=grid).plan
        return plan.flops("refresh")[0] / plan.flops("other")[0]

    assert {round(saved((8, 1)), 2), round(saved((1, 8)), 2)} == {2.36, 9.06}
