"""FLOPs by census: what the code multiplies, on real and fake tensors, against what the plan says."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from optimizers import BlockMuon, Muon, MuonBP, PeriodicRowMuon, census
from optimizers.engine import scratch
from optimizers.orthogonal import pieces


def with_gradients(*shapes):
    params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    for p in params:
        p.grad = torch.ones_like(p)
    return params


def counted(optimizer):
    with census() as seen:
        optimizer.step()
    return seen.flops


def test_products_are_counted_by_their_shapes_and_nothing_else_is():
    a, b, batch = torch.ones(3, 4), torch.ones(4, 5), torch.ones(7, 3, 3)
    with census() as seen:
        a @ b
        assert seen.flops == 2 * 3 * 4 * 5
        torch.baddbmm(batch, batch, batch, out=torch.empty_like(batch))
        a + a
    assert seen.flops == 2 * 3 * 4 * 5 + 7 * 2 * 27 and seen.collectives == seen.bytes_sent == 0


@pytest.mark.parametrize(
    ("cls", "options", "kinds"),
    [
        (Muon, {}, ["refresh", "refresh"]),
        *((Muon, {"ns_coefficients": name}, ["refresh"]) for name in ("cubic5", "turbo", "gram_ns5", "gram_exact")),
        (Muon, {"ns_coefficients": "gram_polar_express", "ns_steps": 9}, ["refresh"]),
        (MuonBP, {"period": 2, "block_grid": (2, 3)}, ["refresh", "other"]),
        (BlockMuon, {"block_grid": 3, "ns_steps": 2}, ["other", "other"]),
        (PeriodicRowMuon, {"period": 2}, ["refresh", None]),
    ],
)
def test_a_step_multiplies_what_the_plan_says(cls, options, kinds):
    params = with_gradients((12, 30), (30, 12), (2, 9, 9), (7, 1))
    optimizer = cls(params, ns_dtype=torch.float32, **options)
    for kind in kinds:
        assert counted(optimizer) == (optimizer.plan.flops(kind)[0] if kind else 0)


@pytest.mark.parametrize(("grid", "fewer"), [((8, 1), 9.06), ((1, 8), 2.36)])
def test_a_block_step_of_16384_by_53248_in_eight_blocks_is_cheaper_by_so_much(grid, fewer, monkeypatch):
    for module in (scratch, pieces):
        monkeypatch.setattr(module, "CACHE_BYTES", 2**30)  # fewer slices, which hold no product
    with FakeTensorMode():
        params = with_gradients((16384, 53248))
        optimizer = MuonBP(params, period=2, block_grid=grid, ns_dtype=torch.bfloat16)
        refresh, block = counted(optimizer), counted(optimizer)
        assert refresh == optimizer.plan.flops("refresh")[0] and block == optimizer.plan.flops("other")[0]
    assert refresh / block == pytest.approx(fewer, abs=0.005)


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("exchange", ["owner", "gather"])
def test_every_rank_multiplies_what_the_plan_says_of_it(rank, exchange):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        params = [nn.Parameter(DTensor.from_local(torch.ones(8, 12), mesh, [Shard(0)])) for _ in range(6)]
        params += [nn.Parameter(DTensor.from_local(torch.ones(4, 16), mesh, [Shard(0)])) for _ in range(4)]
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer = MuonBP(params, period=2, exchange=exchange, ns_dtype=torch.float32)
        with census() as seen:
            optimizer.step()
        plan = optimizer.plan
        assert seen.flops == plan.flops("refresh")[rank] > 0
        assert seen.bytes_sent == plan.bytes_sent("refresh")[rank] == optimizer.wire_bytes
        assert counted(optimizer) == plan.flops("other")[rank] > 0
    finally:
        dist.destroy_process_group()
