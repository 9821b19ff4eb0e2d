"""Low-rank steps on 2, 3 and 4 gloo ranks: layouts that the family's cases lack, costs, resuming on other layouts."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from optimizers import Dion, census
from tests.distributed.ranks import run
from tests.distributed.test_family_sharded import check, folder, mesh_of
from tests.distributed.test_optimizers_sharded import largest_difference, set_gradients, values

SPLITS = {(10, 6): (7, 3), (12, 5): (3,), (8, 8): ("interleaved", 2), (4, 6, 5): (3, 3), (6, 3, 2, 2): (2,)}
"""By shape: parts that lie in one shard or in several, on any number of ranks."""

ROWS, COLUMNS = {2: [Shard(0)], 3: [Shard(1)], 4: [Shard(0)]}, {2: [Shard(1)], 3: [Shard(2)], 4: [Shard(1)]}
STACKS = {2: [Shard(1)], 3: [Shard(0)], 4: [Shard(0)]}
BOTH = {2: [Shard(0), Shard(1)], 3: [Shard(1), Shard(2)], 4: [Shard(1), Shard(0)]}
CROSSED = {2: [Shard(1), Shard(0)], 3: [Shard(0), Shard(2)], 4: [Shard(0), Shard(1)]}
OVER = {2: [_StridedShard(0, split_factor=2), Shard(0)], 3: [Shard(0), Shard(1)], 4: [Replicate(), Shard(1)]}


def layouts():
    """(mesh, placements by number of dimensions)."""
    ranks = dist.get_world_size()
    yield None, {}
    for placements in (ROWS, COLUMNS, STACKS):
        yield mesh_of(ranks), placements
    if ranks == 4:
        for placements in (BOTH, CROSSED, OVER):
            yield mesh_of(2, 2), placements


def train(mesh, placements, dtype=torch.float64, split=True, steps=4, zero=False, **options):
    full = [values(i, shape).to(dtype) for i, shape in enumerate(SPLITS)]
    if mesh is not None:
        full = [distribute_tensor(w, mesh, placements[w.ndim], src_data_rank=None) for w in full]
    params = [nn.Parameter(w) for w in full]
    splits = {"matrix_splits": list(SPLITS.values())} if split else {}
    optimizer = Dion([{"params": params, **splits}], lr=0.1, **options)
    sent = []
    for step in range(steps):
        set_gradients(params, step)
        if zero and step < 2:
            for p in params:
                p.grad.zero_()
        with census() as counted:
            optimizer.step()
        sent.append(counted)
        assert counted.bytes_sent == optimizer.wire_bytes
    return [p.detach() if mesh is None else p.full_tensor() for p in params], optimizer, sent


def bases(optimizer):
    found = [state["right_basis"] for state in optimizer.state.values()]
    return [q.full_tensor() if hasattr(q, "device_mesh") else q for q in found]


def case_every_layout_ends_as_one_process():
    """Bases of fp32 less nearly: the last columns of P, of which little is left, have the error of all before them."""
    f32, f64 = torch.float32, torch.float64
    for dtype, limits, options in (
        (f64, (1e-12, 1e-12), {}),
        (f64, (1e-12, 1e-12), {"zero": True, "rank_fraction": 0.5}),
        (f32, (1e-6, 1e-5), {}),
        (f32, (1e-6, 1e-5), {"split": False, "rank_fraction": 0.4}),
    ):
        alone = None
        for mesh, placements in layouts():
            found, optimizer, _ = train(mesh, placements, dtype, **options)
            alone = alone or (found, bases(optimizer))
            for these, those, limit in zip((found, bases(optimizer)), alone, limits, strict=True):
                assert largest_difference(these, those) <= limit, (options, dtype, placements)


def case_first_bases_are_the_same_everywhere():
    whole = None
    for mesh, placements in layouts():
        found = bases(train(mesh, placements, steps=0)[1])
        whole = whole or found
        assert largest_difference(whole, found) == 0, placements


def case_replicas_of_a_basis_agree_to_the_bit():
    for mesh, placements in list(layouts())[1:]:
        _, optimizer, _ = train(mesh, placements)
        for state in optimizer.state.values():
            q = state["right_basis"]
            for axis, placed in enumerate(q.placements):
                if isinstance(placed, Replicate):
                    told = [torch.empty_like(q.to_local()) for _ in range(mesh.size(axis))]
                    dist.all_gather(told, q.to_local().contiguous(), group=mesh.get_group(axis))
                    assert all(torch.equal(told[0], one) for one in told), placements


def case_the_plan_knows_products_and_bytes_of_every_rank():
    for mesh, placements in list(layouts())[1:]:
        _, optimizer, counted = train(mesh, placements, torch.float32, rank_fraction=0.5)
        plan, me = optimizer.plan, dist.get_rank()
        assert counted[-1].flops == plan.flops("other")[me], placements
        assert abs(counted[-1].bytes_sent - plan.bytes_sent("other")[me]) <= 64, placements  # each sum is rounded down


def case_matrices_travel_together_and_less_than_they_weigh():
    ranks = dist.get_world_size()
    for placed, calls in ((Shard(0), 3), (Shard(1), 2)):
        params = [
            nn.Parameter(distribute_tensor(values(i, (96, 128)), mesh_of(ranks), [placed], src_data_rank=None))
            for i in range(4)
        ]
        optimizer = Dion(params, rank_fraction=0.1)
        set_gradients(params, 0)
        with census() as counted:
            optimizer.step()
        assert dict(counted.calls) == {"allreduce_": calls}
        r, (rows, columns) = 10, (96, 128)
        numbers = 8 * r * (r + 1) + 4 * columns * r if calls == 3 else 4 * rows * r + 8 * r
        assert abs(counted.bytes_sent - 4 * 2 * numbers * (ranks - 1) / ranks) <= calls
        assert counted.bytes_sent < 4 * 4 * rows * columns * (ranks - 1) / ranks / 2


def case_ranks_of_small_waves_keep_step():
    from optimizers.engine import low_rank

    whole, low_rank.WAVE_BYTES = low_rank.WAVE_BYTES, 2000
    try:
        alone = None
        for mesh, placements in layouts():
            found, _, _ = train(mesh, placements, bucket_bytes=400)
            alone = alone or found
            assert largest_difference(alone, found) <= 1e-12
    finally:
        low_rank.WAVE_BYTES = whole


class Net(nn.Module):
    def __init__(self, mesh, placements):
        super().__init__()
        for i, shape in enumerate([(10, 7), (6, 9)]):
            w = values(i, shape).double()
            w = w if mesh is None else distribute_tensor(w, mesh, placements, src_data_rank=None)
            self.register_parameter(f"w{i}", nn.Parameter(w))

    def whole(self):
        return [
            p.full_tensor().detach() if hasattr(p, "device_mesh") else p.detach().clone() for p in self.parameters()
        ]

    def set(self, weights):
        for p, w in zip(self.parameters(), weights, strict=True):
            placed = hasattr(p, "device_mesh")
            p.data.copy_(distribute_tensor(w, p.device_mesh, p.placements, src_data_rank=None) if placed else w)

    def go_on(self, optimizer, steps):
        for step in steps:
            set_gradients(list(self.parameters()), step)
            optimizer.step()


def case_a_checkpoint_goes_on_under_other_layouts():
    ranks = dist.get_world_size()
    places = [(mesh_of(ranks), [Shard(0)]), (mesh_of(ranks), [Shard(1)]), (mesh_of(ranks), [Replicate()]), (None, ())]
    if ranks == 4:
        places.append((mesh_of(2, 2), [Shard(0), Shard(1)]))
    for place in (places[0], places[-1]):
        net = Net(*place)
        optimizer = Dion(net.parameters(), lr=0.1, rank_fraction=0.5)
        net.go_on(optimizer, (0, 1))
        half = net.whole()
        with folder() as path:
            dcp.save({"optimizer": get_optimizer_state_dict(net, optimizer)}, checkpoint_id=path)
            dist.barrier()
            net.go_on(optimizer, (2, 3))
            for there in places:
                other = Net(*there)
                other.set(half)
                theirs = Dion(other.parameters(), lr=0.1, rank_fraction=0.5)
                loaded = {"optimizer": get_optimizer_state_dict(other, theirs)}
                dcp.load(loaded, checkpoint_id=path)
                set_optimizer_state_dict(other, theirs, loaded["optimizer"])
                other.go_on(theirs, (2, 3))
                assert largest_difference(net.whole(), other.whole()) <= 1e-12, (place, there)
            dist.barrier()


CASES = [
    case_every_layout_ends_as_one_process,
    case_first_bases_are_the_same_everywhere,
    case_replicas_of_a_basis_agree_to_the_bit,
    case_the_plan_knows_products_and_bytes_of_every_rank,
    case_matrices_travel_together_and_less_than_they_weigh,
    case_ranks_of_small_waves_keep_step,
    case_a_checkpoint_goes_on_under_other_layouts,
]


def test_two_ranks():
    run(check, 2, CASES, timeout=200)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [3, 4])
def test_more_ranks(ranks):
    run(check, ranks, CASES, timeout=300)
