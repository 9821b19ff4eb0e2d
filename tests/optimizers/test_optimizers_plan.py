"""The plan of an exchange, without any process group: balance, exact sizes, order of the pipeline."""

import pytest
import torch

from optimizers.sharding.exchange import pipeline
from optimizers.sharding.layout import chunk_rows
from optimizers.sharding.matrices import Rect
from optimizers.sharding.plan import Cargo, Planner


def cargo(shapes, ranks):
    return [Cargo(i, shape, chunk_rows(shape[0], ranks)) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("rows", [1, 2, 7, 10, 18, 72])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 16])
def test_rows_follow_torch_chunk(rows, ranks):
    parts = [len(part) for part in torch.arange(rows).chunk(ranks)]
    assert list(chunk_rows(rows, ranks)) == parts + [0] * (ranks - len(parts))


@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
def test_every_matrix_travels_once_without_padding(ranks):
    shapes = [(72, 5), (18, 7), (1, 9), (7, 3), (10, 6)] * 3
    buckets = Planner(ranks, 500).plan(cargo(shapes, ranks), torch.bfloat16)
    assert sorted(c.index for b in buckets for c in b.cargo) == list(range(len(shapes)))
    assert sum(sum(map(sum, b.traffic)) for b in buckets) == sum(m * n for m, n in shapes)
    for bucket in buckets:
        largest = max(sum(row) for row in bucket.traffic) * 2
        assert largest <= 500 or len(bucket.cargo) == 1
        assert list(bucket.owners) == sorted(bucket.owners)


@pytest.mark.parametrize(("ranks", "replicas"), [(2, ()), (3, ()), (8, ()), (4, (0, 0, 1, 1))])
def test_no_rank_holds_or_owns_more_than_its_share_of_a_bucket_unless_by_one_matrix(ranks, replicas):
    shapes = [(96, 16)] * (ranks + 1) + [(24, 16)] * 23 + [(7, 5), (1, 9)] * 3
    shards = ranks // len(set(replicas or (0,)))
    items = [Cargo(i, shape, chunk_rows(shape[0], shards)) for i, shape in enumerate(shapes)]
    for item in items:
        object.__setattr__(item, "shares", item.shares * (ranks // shards))
    for limit in (1, 2000, 12000):
        buckets = Planner(ranks, limit, replicas).plan(items, torch.bfloat16)
        assert sorted(c.index for b in buckets for c in b.cargo) == list(range(len(shapes)))
        for bucket in buckets:
            held = [2 * sum(row) for row in bucket.home]
            assert max(held) * shards <= limit or len(bucket.cargo) == 1
            for rank in range(ranks):
                sent = 2 * sum(row[rank] for row in bucket.home)
                assert sent * shards <= limit or len(bucket.owned(rank)) == 1
            assert bucket.share_bytes == max(*held, *(2 * sum(column) for column in zip(*bucket.home, strict=True)))


def test_auto_has_room_for_a_matrix_a_rank():
    ranks = 64
    buckets = Planner(ranks, "auto").plan(cargo([(1024, 2048)] * ranks * 2, ranks), torch.bfloat16)
    assert [sorted(bucket.owners) for bucket in buckets] == [list(range(ranks))] * 2


def test_auto_has_room_for_a_matrix_a_replica():
    ranks = 16
    everywhere = [Cargo(i, (256, 1024), [Rect(0, 256, 0, 1024)] * ranks) for i in range(2 * ranks)]
    buckets = Planner(ranks, "auto", tuple(range(ranks))).plan(everywhere, torch.bfloat16)
    assert [sorted(bucket.owners) for bucket in buckets] == [list(range(ranks))] * 2


def test_bytes_of_a_balanced_refresh_follow_the_formula():
    ranks, shapes = 4, [(16, 8)] * 8
    (bucket,) = Planner(ranks, 2**26).plan(cargo(shapes, ranks), torch.float32)
    for rank in range(ranks):
        assert bucket.bytes_sent[rank] == 2 * 4 * 8 * 16 * 8 * (ranks - 1) / ranks**2


def test_work_is_dealt_by_flops_and_not_by_count():
    ranks, shapes = 4, [(96, 16)] * 8 + [(16, 16)] * 40
    planner = Planner(ranks, 2000)
    loads = [0] * ranks
    for bucket in planner.plan(cargo(shapes, ranks), torch.bfloat16):
        for item, owner in zip(bucket.cargo, bucket.owners, strict=True):
            loads[owner] += item.flops
    assert max(loads) - min(loads) <= Cargo(0, (16, 16), ()).flops


def experts(count, shards, replicas):
    """A stack divided over shards between its matrices, in each of the replicas."""
    per = -(-count // shards)
    rows = lambda i: [16 if i // per == shard else 0 for shard in range(shards)]  # noqa: E731
    return [Cargo(i, (16, 8), [Rect(0, r, 0, 8) for r in rows(i) * replicas]) for i in range(count)]


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_matrix_that_ranks_hold_whole_is_dealt_among_them_and_travels_home_only(replicas):
    shards, count = 4, 36
    planner = Planner(shards * replicas, 500, tuple(r for r in range(replicas) for _ in range(shards)))
    cut = [Cargo(i, (24, 8), [Rect(6 * s, 6, 0, 8) for s in range(shards)] * replicas) for i in range(20)]
    apart, together = planner.plan_all([(experts(count, shards, replicas), torch.bfloat16), (cut, torch.bfloat16)])
    for bucket in apart:
        assert not bucket.departs
        assert all(c.elements(owner) == 16 * 8 for c, owner in zip(bucket.cargo, bucket.owners, strict=True))
    assert all(bucket.departs for bucket in together)
    assert sum(sum(b.bytes_sent) for b in apart) == 2 * count * 16 * 8 * (replicas - 1)
    alone = list(map(sum, zip(*(b.work for b in apart), strict=True)))
    assert max(alone) - min(alone) <= apart[0].cargo[0].flops
    work = list(map(sum, zip(*(b.work for b in [*apart, *together]), strict=True)))
    assert max(work) - min(work) <= cut[0].flops


def test_each_bucket_of_a_stack_keeps_the_ranks_of_all_shards_busy_and_holds_what_it_may():
    planner = Planner(8, 4 * 2 * 16 * 8 * 2, (0, 0, 0, 0, 1, 1, 1, 1))  # two matrices in each of four shards
    buckets = planner.plan(experts(32, 4, 2), torch.bfloat16)
    assert [len(bucket.cargo) for bucket in buckets] == [8] * 4
    assert all(len(set(bucket.work)) == 1 for bucket in buckets)


def test_bucket_k_plus_one_is_out_and_k_minus_one_on_its_way_home_while_k_is_at_its_turn():
    events = []
    log = lambda kind: lambda item: events.append(f"{kind}{item}") or item  # noqa: E731
    for in_flight in (1, 2, 3):
        pipeline(range(4), log("out"), log("turn"), log("land"), in_flight, lambda: events.append("meanwhile"))
        if in_flight == 1:
            assert events == "out0 meanwhile turn0 land0 out1 turn1 land1 out2 turn2 land2 out3 turn3 land3".split()
        elif in_flight == 3:  # more travel out, but one home
            expected = "out0 out1 out2 meanwhile turn0 out3 turn1 land0 turn2 land1 turn3 land2 land3"
            assert events == expected.split()
        else:
            assert events == ("out0 out1 meanwhile turn0 out2 turn1 land0 out3 turn2 land1 turn3 land2 land3".split())
        events.clear()
    pipeline([], log("out"), log("turn"), log("land"), 2, lambda: events.append("meanwhile"))
    assert events == ["meanwhile"]
