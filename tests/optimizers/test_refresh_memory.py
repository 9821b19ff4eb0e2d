"""What a refresh allocates: the bound that the README states, at the size of the benchmark.

The products are left out: they write into buffers that are counted, oneDNN's own scratch differs by processor, and
bf16 takes minutes where it is not native. Each rank is played by this process, so that all is freed on one thread.
"""

from collections import deque

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from optimizers import Muon
from optimizers.orthogonal import newton_schulz
from tests.optimizers.test_orthogonal_limits import peak_bytes

SHAPES = [(512, 512), (2048, 512), (512, 2048)]
BLOCKS = 12
LARGEST = 2 * 2048 * 512


class Work:
    """Holds both buffers until it is let go, as that of a backend does."""

    def __init__(self, *buffers):
        self.buffers = buffers

    def wait(self):
        pass


@pytest.fixture
def ranks(monkeypatch):
    """Plays a rank of some, without traffic and without products."""
    for name in ("bmm", "baddbmm"):
        monkeypatch.setattr(torch, name, lambda *args, out, **options: out.zero_())
    monkeypatch.setattr(dist, "all_to_all_single", lambda received, sent, *args, **options: Work(received, sent))
    monkeypatch.setattr("optimizers.sharding.gather._all_gather", lambda *buffers, **options: Work(*buffers))

    def play(rank, count, blocks=BLOCKS):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count)
        mesh = init_device_mesh("cpu", (count,))
        params = []
        for m, n in SHAPES * blocks:
            params.append(nn.Parameter(DTensor.from_local(torch.ones(m // count, n), mesh, [Shard(0)])))
            params[-1].grad = torch.ones_like(params[-1])
        return params

    yield play
    dist.destroy_process_group()


def peak(params, **options):
    optimizer = Muon(params, ns_dtype=torch.bfloat16, **options)
    optimizer.step()
    return peak_bytes(optimizer.step)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_refresh_stays_below_the_bound(ranks, rank):
    params = ranks(rank, 2)
    momentum = sum(4 * p.to_local().numel() for p in params)
    for bucket in (LARGEST, 2 * LARGEST, 5 * LARGEST):
        for in_flight in (1, 2, 3, 4):
            bound = (2 * in_flight + 6) * bucket / 2
            assert peak(params, bucket_bytes=bucket, max_in_flight=in_flight) <= bound, (bucket, in_flight)
    assert peak(params, bucket_bytes=LARGEST, max_in_flight=2) < momentum / 5


@pytest.mark.parametrize("what", ["input", "result", "received"])
def test_the_bound_notices_a_copy(ranks, what, monkeypatch):
    kept = deque(maxlen=1)
    load, orthogonal = newton_schulz.load, newton_schulz._orthogonal
    if what == "input":  # the stack in fp32 beside that in bf16, as it was once
        monkeypatch.setattr(newton_schulz, "load", lambda m, x, *a: (kept.append(x.float()), load(m, x, *a)))
    elif what == "result":
        monkeypatch.setattr(
            newton_schulz, "_orthogonal", lambda *a: (found := orthogonal(*a), kept.append(found.float()))[0]
        )
    else:
        monkeypatch.setattr("optimizers.sharding.exchange.Trip.arrive", keep_all)
    worst = 0
    for rank in (0, 1):
        params = ranks(rank, 2)
        for in_flight in (2, 3):
            found = peak(params, bucket_bytes=LARGEST, max_in_flight=in_flight)
            worst = max(worst, found / ((2 * in_flight + 6) * LARGEST / 2))
    assert worst > 1


def keep_all(trip):
    """As ``Trip.arrive``, but the buffer that was sent stays."""
    trip.work.wait()
    return trip.received


@pytest.mark.parametrize("count", [4, 8])
def test_a_matrix_above_the_share_of_a_rank_costs_its_owner_so_much_and_no_more(ranks, count):
    bucket = LARGEST  # a share is LARGEST / count, and the owner holds LARGEST
    for in_flight in (2, 3):
        bound = (in_flight + 1) * bucket / count + 4 * LARGEST
        assert peak(ranks(0, count, 4), bucket_bytes=bucket, max_in_flight=in_flight) <= bound


def test_gathering_holds_whole_buckets_but_iterates_on_a_share(ranks):
    bucket = 4 * LARGEST
    for in_flight in (2, 3):
        bound = in_flight * (bucket + bucket / 4) + 2 * bucket / 4 + 3 * bucket / 4
        assert peak(ranks(1, 4), exchange="gather", bucket_bytes=bucket, max_in_flight=in_flight) <= bound


def test_auto_buckets_hold_at_most_64_mib_of_a_rank_whatever_the_number_of_ranks():
    from optimizers.sharding.plan import Cargo, Planner

    for count in (2, 64):
        matrix = (1024, 2048)
        cargo = [Cargo(i, matrix, (1024 // count,) * count) for i in range(128 * count)]
        buckets = Planner(count, "auto").plan(cargo, torch.bfloat16)
        shares = [2 * sum(c.elements(0) for c in bucket.cargo) for bucket in buckets]
        assert max(shares) == 64 * 2**20 and sum(shares) == 128 * 2**22
