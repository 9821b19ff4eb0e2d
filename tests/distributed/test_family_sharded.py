"""The whole family on 2, 3 and 4 gloo ranks. Every ``case_…`` runs on all ranks of one start."""

import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import optimizers as o
from optimizers import census
from optimizers.engine.algorithm import ALGORITHMS
from optimizers.engine.forms import fits_code
from optimizers.sharding.layout import chunk_rows
from tests.distributed.ranks import run, run_case
from tests.distributed.test_optimizers_sharded import FP32, SHAPES, largest_difference, set_gradients, values

QUANTISED = [(72, 64), (3, 40, 60), (64, 16, 2, 2), (5, 6)]  # uneven on 3 and 4 ranks; large enough, but for the last
MARS = {"mars_gamma": 0.025}
NEURONS = {"neuron_beta2": 0.9}
STEPS = {"period": 2}

EVERYWHERE: list[tuple[type, dict]] = [
    (o.RowMuon, {}),
    (o.RowMuon, {"row_norm": "plain", "row_eps": 0.1}),
    (o.NorMuon, FP32),
    (o.NorMuon, {"neuron_norm": "direction", "exchange": "gather", **FP32}),
    (o.MuonEq, {"equilibrate": "rc", **FP32}),
    (o.AdaGO, FP32),
    (o.AuON, {}),
    (o.AuON, {"form": "repo"}),
    (o.AuON, {"form": "hybrid", **FP32}),
    (o.Scion, FP32),
    (o.Scion, {"ball": "row"}),
    (o.Scion, {"ball": "column"}),
    (o.Scion, {"ball": "sign"}),
    (o.PeriodicSignMuon, FP32),
    (o.PeriodicSignMuon, {"stagger": True, **STEPS, **FP32}),
    (o.Dion2, FP32),
    (o.Dion2, {"fraction": 0.6, "exchange": "gather", **MARS, **FP32}),
    (o.Dion, {}),
    (o.Dion, {"rank_fraction": 0.3, **MARS}),
    (o.MarsMuon, FP32),
    (o.MarsMuon, {"mars_clip": None, **FP32}),
    (o.MarsMuon, {"mars_exact": True, **FP32}),
    (o.PeriodicRowMuon, {**STEPS, **MARS, **NEURONS, **FP32}),
    (o.PeriodicRowMuon, {**STEPS, **MARS, **NEURONS, "stagger": True, "equilibrate": "c", **FP32}),
]
"""Whose result does not depend on how many ranks there are, under any sharding."""

ELEMENTWISE: list[tuple[type, dict]] = [
    (o.MarsAdamW, {}),
    (o.MarsAdamW, {"mars_exact": True}),
    (o.Lion, {}),
    (o.SGD, {}),
    (o.AdamW8bit, {}),
]

EIGHT_BIT: list[tuple[type, dict]] = [
    (o.Muon8bit, FP32),
    (o.Muon8bit, {"momentum_dtype": "dynamic8", **FP32}),
    (o.AdamW8bit, {}),
    (o.Dion, {"momentum_dtype": "int8", "rank_fraction": 0.3}),
    (o.PeriodicRowMuon, {"momentum_dtype": "int8", **STEPS, **MARS, **NEURONS, **FP32}),
    (o.PeriodicRowMuon, {"momentum_dtype": torch.bfloat16, **STEPS, **FP32}),
]


def mesh_of(*shape):
    names = ("data", "tensor")[: len(shape)]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def weights(shapes, mesh=None, placements=()):
    full = [values(i, shape) for i, shape in enumerate(shapes)]
    if mesh is not None:
        full = [distribute_tensor(w, mesh, placements, src_data_rank=None) for w in full]
    return [nn.Parameter(w) for w in full]


def take_step(optimizer, params, step):
    """One on gradients of this number, to which the weights are added, so that those at the last weights are others."""
    exact = optimizer.takes_previous
    if exact:
        with optimizer.at_previous_weights():
            pull_back(params, step)
    (pull_back if exact else set_gradients)(params, step)
    optimizer.step()


def pull_back(params, step):
    set_gradients(params, step)
    for p in params:
        p.grad += 10 * p.detach()


def train(cls, options, shapes, mesh=None, placements=(), steps=4):
    params = weights(shapes, mesh, placements)
    optimizer = cls(params, lr=0.02, **options)
    for step in range(steps):
        take_step(optimizer, params, step)
    return [p.detach() if mesh is None else p.full_tensor() for p in params], optimizer


def same_everywhere(cases, shapes, mesh, placements, limit=1e-6):
    for cls, options in cases:
        alone, _ = train(cls, options, shapes)
        shared, _ = train(cls, options, shapes, mesh, placements)
        scale = max(1.0, *(w.abs().max().item() for w in alone))
        found = largest_difference(alone, shared)
        assert found <= limit * scale, f"{cls.__name__} {options} {placements}: {found}"


def case_sharded_rows_equal_one_process():
    mesh = mesh_of(dist.get_world_size())
    same_everywhere(EVERYWHERE, SHAPES, mesh, [Shard(0)])
    same_everywhere(ELEMENTWISE, [*SHAPES, (7,)], mesh, [Shard(0)])
    same_everywhere(EIGHT_BIT, QUANTISED, mesh, [Shard(0)])


def case_sharded_columns_equal_one_process():
    shapes = [shape for shape in SHAPES if len(shape) == 2]
    mesh = mesh_of(dist.get_world_size())
    same_everywhere(EVERYWHERE, shapes, mesh, [Shard(1)])
    same_everywhere(ELEMENTWISE, shapes, mesh, [Shard(1)])
    same_everywhere(EIGHT_BIT[-1:], [(72, 64), (30, 50)], mesh, [Shard(1)])


def case_replicas_equal_one_process():
    same_everywhere([*EVERYWHERE, *ELEMENTWISE], SHAPES, mesh_of(dist.get_world_size()), [Replicate()])


def case_both_axes_of_a_mesh_equal_one_process():
    shapes = [shape for shape in SHAPES if len(shape) == 2]
    for placements in ([Shard(0), Shard(1)], [Replicate(), Shard(0)]):
        same_everywhere([*EVERYWHERE, *ELEMENTWISE], shapes, mesh_of(2, 2), placements)


def case_rows_are_selected_among_all_or_among_those_of_a_rank():
    mesh = mesh_of(dist.get_world_size())
    alone, _ = train(o.Dion2, FP32, [(24, 8)])
    local, optimizer = train(o.Dion2, {"selection": "local", **FP32}, [(24, 8)], mesh, [Shard(0)], steps=1)
    assert largest_difference(alone, local) > 1e-3
    moved = (local[0] - values(0, (24, 8)) * (1 - 0.02 * 0.01)).abs().sum(1) > 1e-4
    assert [int(part.sum()) for part in moved.chunk(dist.get_world_size())] == [
        -(-rows // 4) for rows in chunk_rows(24, dist.get_world_size())
    ]
    whole = collectives_of_a_step(o.Muon, {}, Shard(0), [(64, 64)] * 6)[0][1]
    some = collectives_of_a_step(o.Dion2, {"selection": "local"}, Shard(0), [(64, 64)] * 6)[0][1]
    assert some == whole / 4 or dist.get_world_size() == 3
    assert optimizer.plan.flops("refresh") == train(o.Dion2, FP32, [(24, 8)], mesh, [Shard(0)])[1].plan.flops("refresh")


def case_8_bit_columns_have_blocks_of_their_own():
    """Ranks that divide columns have blocks of their own: near to one process, not equal to it."""
    mesh = mesh_of(dist.get_world_size())
    alone, _ = train(o.Muon8bit, FP32, [(72, 64)])
    shared, optimizer = train(o.Muon8bit, FP32, [(72, 64)], mesh, [Shard(1)])
    assert 0 < largest_difference(alone, shared) < 0.02
    (state,) = optimizer.state.values()
    assert tuple(state["momentum_buffer_absmax"].shape) == (72, dist.get_world_size())


def collectives_of_a_step(cls, options, placement, shapes=SHAPES):
    """(calls, bytes) of the census, and the bytes that the optimizer says it sent, of a step after the first."""
    shapes = [shape for shape in shapes if placement.dim == 0 or len(shape) == 2]
    params = weights(shapes, mesh_of(dist.get_world_size()), [placement])
    optimizer = cls(params, **options)
    found = []
    for step in range(3):
        set_gradients(params, step)
        with census() as counted:
            optimizer.step()
        found.append((dict(counted.calls), counted.bytes_sent))
        assert optimizer.wire_bytes == counted.bytes_sent, (cls, options, placement, step)
        if dist.get_world_size() == 2 and cls not in (o.MarsAdamW, o.Lion, o.AdamW8bit):  # without rounding
            (group,) = optimizer.param_groups
            kind = "refresh" if ALGORITHMS[group["algorithm"]].refreshes({**group, "step": step}) else "other"
            assert optimizer.plan.bytes_sent(kind)[dist.get_rank()] == counted.bytes_sent, (cls, options, kind)
    return found


def case_small_numbers_travel_in_one_collective_a_step():
    for cls, options, all_reduces in (
        (o.NorMuon, {}, 1),
        (o.AdaGO, {}, 1),
        (o.MarsMuon, {}, 1),
        (o.MarsAdamW, {}, 1),
        (o.AuON, {}, 2),
        (o.Dion2, {"selection": "local"}, 0),
        (o.Scion, {"ball": "column"}, 1),
        (o.Scion, {"ball": "row"}, 0),
        (o.PeriodicSignMuon, {"period": 10**6, "phase": 1}, 0),
        (o.RowMuon, {}, 0),
        (o.Dion, {}, 3),
        (o.MarsMuon, NEURONS, 2),
        (o.PeriodicRowMuon, {**NEURONS, **MARS, "period": 100, "phase": 50}, 1),
        (o.Lion, {}, 0),
        (o.AdamW8bit, {}, 0),
    ):
        for calls, _ in collectives_of_a_step(cls, options, Shard(0)):
            assert calls.get("allreduce_", 0) == all_reduces, (cls, options, calls)
            assert set(calls) <= {"allreduce_", "alltoall_base_"}, calls
    for cls, options, all_reduces in (
        (o.NorMuon, {}, 2),
        (o.RowMuon, MARS, 2),
        (o.AuON, {}, 2),
        (o.AdaGO, {}, 1),
        (o.Dion, {}, 2),
    ):
        for calls, _ in collectives_of_a_step(cls, options, Shard(1)):
            assert calls["allreduce_"] == all_reduces, (cls, calls)


def case_state_survives_a_checkpoint_with_its_dtype_and_goes_on():
    for cls, options in (*EVERYWHERE, *ELEMENTWISE, *EIGHT_BIT):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 72, bias=False), nn.Linear(72, 70, bias=False))
        for layer in net:
            fully_shard(layer, mesh=mesh_of(dist.get_world_size()))
        fully_shard(net, mesh=mesh_of(dist.get_world_size()))
        params = list(net.parameters())
        optimizer = cls(params, lr=0.02, **options)
        for step in range(3):
            take_step(optimizer, params, step)
        saved = {"optimizer": get_optimizer_state_dict(net, optimizer)}
        with folder() as path:
            dcp.save(saved, checkpoint_id=path)
            dist.barrier()
            other = cls(params, lr=0.02, **options)
            loaded = {"optimizer": get_optimizer_state_dict(net, other)}
            dcp.load(loaded, checkpoint_id=path)
            dist.barrier()
        set_optimizer_state_dict(net, other, loaded["optimizer"])
        for p in params:
            assert optimizer.state[p].keys() == other.state[p].keys()
            for key, kept in optimizer.state[p].items():
                found = other.state[p][key]
                assert found.dtype == kept.dtype and torch.equal(found.to_local(), kept.to_local()), (cls, key)
        before = [p.detach().clone() for p in params]
        after = []
        for one in (optimizer, other):
            for p, w in zip(params, before, strict=True):
                p.data.copy_(w)
            take_step(one, params, 3)
            after.append([p.full_tensor() for p in params])
        assert largest_difference(*after) == 0, (cls, options)


def case_8_bit_state_takes_a_byte_an_element():
    params = weights([(512, 512)], mesh_of(dist.get_world_size()), [Shard(0)])
    for cls, options, keys in (
        (o.Muon8bit, {}, ["momentum_buffer"]),
        (o.MuonBP, {"momentum_dtype": "dynamic8"}, ["momentum_buffer"]),
        (o.AdamW8bit, {}, ["exp_avg", "exp_avg_sq"]),
    ):
        (state,) = cls(params, **options).state.values()
        held = sum(x.to_local().nbytes for x in state.values())
        assert fits_code(params[0]) and held <= 1.01 * len(keys) * params[0].to_local().numel()


def case_an_error_of_one_rank_is_one_of_all():
    """A wrong form or ball was raised before ranks compared notes, and left the others waiting."""
    mesh, first = mesh_of(dist.get_world_size()), dist.get_rank() == 0
    for build, words in (
        (lambda p: o.AuON(p, form="papr" if first else "paper"), "form is 'papr' but has to be one of paper, repo"),
        (lambda p: o.Scion(p, ball="x" if first else "row"), "ball is 'x' but has to be one of spectral, row"),
        (lambda p: o.AuON(p, form="repo" if first else "paper"), "the optimizer differs between ranks"),
        (lambda p: o.Dion2(p, fraction=0.5 if first else 0.25), "the optimizer differs between ranks"),
    ):
        with pytest.raises(ValueError, match=words):
            build(weights([(12, 8)], mesh, [Shard(0)]))
    with pytest.raises(ValueError, match="neuron_beta2 normalises whole rows, but blocks here hold parts of them"):
        o.BlockMuon(weights([(12, 8)], mesh, [Shard(1)]), neuron_beta2=0.9)


def case_neurons_of_blocks_are_those_of_a_shard_also_beside_an_empty_one():
    """A rank without rows of one matrix took the variances of it for those of the next."""
    params = weights([(1, 9), (12, 6), (1, 4), (9, 8)], mesh_of(dist.get_world_size()), [Shard(0)])
    alone = [nn.Parameter(p.to_local().detach().clone()) for p in params]
    options = {"neuron_beta2": 0.9, "period": float("inf")}
    shared, apart = o.MuonBP(params, **options), o.MuonBP(alone, **options)
    for step in range(3):
        set_gradients(params, step)
        for p, q in zip(params, alone, strict=True):
            q.grad = p.grad.to_local().clone()
        shared.step()
        apart.step()
    assert all(torch.allclose(p.to_local(), q, atol=1e-6) for p, q in zip(params, alone, strict=True))


def case_all_algorithms_in_one_optimizer_meet_in_the_same_order():
    mesh = mesh_of(dist.get_world_size())
    groups = []
    for i, (name, algorithm) in enumerate(sorted(ALGORITHMS.items())):
        params = weights([(72, 64), (5, 3), (1, 7)], mesh, [Shard(0)] if i % 3 else [Replicate()])
        groups.append({"params": [*params, nn.Parameter(values(i, (6, 4)))], "algorithm": name})
        groups[-1] |= {"stagger": True} if "stagger" in algorithm.options else {}
        if "momentum_dtype" in algorithm.options and i % 2:
            groups[-1] |= {"momentum_dtype": "int8", "mars_gamma": 0.1}
    optimizer = o.Muon(groups, process_group=dist.group.WORLD)
    optimizer.time_spans()
    for step in range(4):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        set_gradients(params, step)
        for p in params[step + dist.get_rank() :: 3]:
            p.grad = None
        with census() as counted:
            optimizer.step()
        assert counted.bytes_sent == optimizer.wire_bytes
    for p in params:
        assert (p.full_tensor() if hasattr(p, "placements") else p).isfinite().all()


class folder:
    """A folder that all ranks see, for the length of a block."""

    def __enter__(self):
        made = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(made)
        return made[0]

    def __exit__(self, *error):
        pass


def check(cases):
    for case in cases:
        run_case(case)


TWO = [
    case_sharded_rows_equal_one_process,
    case_sharded_columns_equal_one_process,
    case_replicas_equal_one_process,
    case_rows_are_selected_among_all_or_among_those_of_a_rank,
    case_8_bit_columns_have_blocks_of_their_own,
    case_small_numbers_travel_in_one_collective_a_step,
    case_state_survives_a_checkpoint_with_its_dtype_and_goes_on,
    case_8_bit_state_takes_a_byte_an_element,
    case_an_error_of_one_rank_is_one_of_all,
    case_neurons_of_blocks_are_those_of_a_shard_also_beside_an_empty_one,
    case_all_algorithms_in_one_optimizer_meet_in_the_same_order,
]


def test_two_ranks():
    run(check, 2, TWO, timeout=300)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [3, 4])
def test_more_ranks(ranks):
    run(check, ranks, TWO if ranks == 3 else [*TWO[:4], case_both_axes_of_a_mesh_equal_one_process], timeout=400)
