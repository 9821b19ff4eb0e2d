"""An optimizer inside accelerate: its FSDP2 path replaces the parameters after the optimizer was built."""

import torch
import torch.distributed as dist

from tests.distributed.ranks import run


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 48), torch.nn.GELU(), torch.nn.Linear(48, 16))


def train(net, optimizer, backward, steps=7):
    sent = []
    for step in range(steps):
        x = torch.randn(12, 16, generator=torch.Generator().manual_seed(step))
        backward((net(x) - x).square().mean())
        optimizer.step()
        sent.append(getattr(optimizer, "optimizer", optimizer).wire_bytes)
        optimizer.zero_grad()
    return sent


def with_accelerate():
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    from optimizers import PeriodicRowMuon, param_groups

    options = {"lr": 0.01, "period": 3, "ns_dtype": torch.float32, "wire_dtype": torch.float32}
    accelerator = Accelerator(cpu=True)
    # accelerate reserves FSDP for GPUs; the code behind the switch is the same
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=100
    )
    net = model()
    net, optimizer = accelerator.prepare(net, PeriodicRowMuon(param_groups(net), **options))
    sent = train(net, optimizer, accelerator.backward)
    whole = model()
    train(whole, PeriodicRowMuon(param_groups(whole), **options), torch.Tensor.backward)
    for ours, theirs in zip(net.parameters(), whole.parameters(), strict=True):
        assert (ours.full_tensor() - theirs).abs().max() < 1e-5
    inner = optimizer.optimizer
    assert set(inner.state) == set(net.parameters())
    assert all(hasattr(value, "placements") for state in inner.state.values() for value in state.values())
    assert [count > 0 for count in sent] == [step % 3 == 0 for step in range(7)] or dist.get_world_size() == 1
    inner.param_groups[0]["params"][0] = torch.nn.Parameter(torch.zeros(48, 16))
    try:
        inner.step()
    except ValueError as error:
        assert "replaced in the groups after the first step" in str(error)
    else:
        raise AssertionError("a parameter replaced in mid-run lost its state in silence")


def test_parameters_that_accelerate_shards_after_construction_are_followed():
    run(with_accelerate, 2)
