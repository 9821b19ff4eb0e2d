"""First weights depend on seed and name alone, and times survive a bf16 policy."""

import random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from dit_train.config import ModelConfig
from dit_train.model.dit import DiT
from dit_train.model.init import initialize

CONFIG = ModelConfig(width=32, depth=2, heads=2, qk_norm=True, position="rope")


def build(config: ModelConfig = CONFIG) -> DiT:
    # 11 labels, and 4 rows in the final layer: uneven over 2 or 3 ranks, and empty on the third
    return DiT(config, channels=1, image_size=8, num_classes=10)


def reference(seed: int = 0, config: ModelConfig = CONFIG) -> DiT:
    model = build(config)
    initialize(model, seed)
    return model


@pytest.fixture
def group():
    """Join a process group with the arguments given; left at the end of the test."""

    def join(*args, **kwargs) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(*args, **kwargs)

    yield join
    if dist.is_initialized():
        dist.destroy_process_group()


def shard(model: DiT, mesh, dtype: torch.dtype | None = None) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=False))


def test_linear_layers_are_xavier_tables_normal_and_the_rest_constant():
    model = reference(config=ModelConfig(width=192, depth=1, heads=2, qk_norm=True))
    block = model.blocks[0]
    for weight in (block.attention.key.weight, block.mlp.up.weight, model.patch_embedding.projection.weight):
        bound = (6 / sum(weight.shape)) ** 0.5
        assert weight.abs().max().item() == pytest.approx(bound, rel=0.05)
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
    for weight in (model.label_embedding.table.weight, model.time_embedding.in_proj.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    constant = {n: p for n, p in model.named_parameters() if n.endswith("bias") or "modulation" in n or "final" in n}
    assert len(constant) == 15
    assert not any(p.any() for p in constant.values())
    assert (block.attention.query_norm.weight == 1).all()


def test_no_two_parameters_share_their_draw():
    model = reference()
    first, second = (block.attention.query.weight for block in model.blocks)
    assert not torch.equal(first, second)
    assert not torch.equal(first, model.blocks[0].attention.key.weight)
    assert not torch.equal(first, reference(seed=1).blocks[0].attention.query.weight)


def test_weights_do_not_depend_on_global_randomness_or_registration_order():
    expected = reference().state_dict()
    torch.manual_seed(5)
    model = build()
    for module in model.modules():
        children = list(module._modules.items())
        random.Random(0).shuffle(children)
        module._modules.clear()
        module._modules.update(children)
        module._parameters = dict(reversed(module._parameters.items()))
    assert [n for n, _ in model.named_parameters()] != list(expected)
    initialize(model, 0)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize("position", ["sincos", "rope"])
def test_a_model_from_the_meta_device_equals_one_built_directly(position):
    config = ModelConfig(width=32, depth=2, heads=2, position=position)
    with torch.device("meta"):
        model = build(config)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    with pytest.raises(RuntimeError, match="to_empty"):
        initialize(model, 0)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().fill_(torch.nan)  # what memory may hold
    initialize(model, 0)
    expected = reference(config=config)
    for kind in ("named_parameters", "named_buffers"):
        pairs = dict(getattr(model, kind)()), dict(getattr(expected, kind)())
        assert pairs[0].keys() == pairs[1].keys()
        assert all(torch.equal(pairs[0][name], pairs[1][name]) for name in pairs[0])
    assert len(list(model.buffers())) == (1 if position == "sincos" else 4)


@pytest.mark.parametrize("shape", [(2,), (3,), (16,), (2, 2), (2, 3)])
def test_every_rank_of_every_mesh_holds_its_part_of_the_same_model(group, shape):
    """Without communication: the ranks' fake process group moves nothing."""
    whole = reference().state_dict()
    ranks = int(torch.tensor(shape).prod())
    empty = 0
    for rank in range(ranks):
        group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        with torch.device("meta"):
            model = build()
        names = tuple(f"{kind} of rank {rank}" for kind in ("replicate", "shard"))  # torch takes equal meshes for one
        shard(model, init_device_mesh("cpu", shape, mesh_dim_names=names[-len(shape) :]))
        model.to_empty(device="cpu")
        initialize(model, 0)
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            chunks = whole[name].chunk(shape[-1])  # the last may be short, and some may be missing
            place = rank % shape[-1]
            part = chunks[place] if place < len(chunks) else whole[name][:0]
            assert torch.equal(parameter.to_local(), part), (name, rank)
            empty += part.numel() == 0
    assert (empty > 0) == (shape[-1] > 2)


def test_times_reach_the_embedding_unrounded_under_a_bf16_policy(group):
    group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = reference(config=ModelConfig(width=32, depth=2, heads=2, position="rope"))
    shard(model, init_device_mesh("cpu", (1,)), torch.bfloat16)
    seen = {}
    model.time_embedding.register_forward_pre_hook(lambda module, args: seen.update(t=args[0].clone()))
    model.blocks[0].register_forward_pre_hook(lambda module, args: seen.update(tokens=args[0].dtype))
    output = model(torch.randn(2, 1, 8, 8), torch.tensor([0.99839, 0.5012]), torch.tensor([0, 10]))
    assert seen["t"].dtype == torch.float32
    assert seen["t"].tolist() == torch.tensor([0.99839, 0.5012]).tolist()
    assert seen["tokens"] == torch.bfloat16
    assert output.dtype == torch.float32
    output.square().mean().backward()
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_times_that_bf16_cannot_tell_apart_are_embedded_apart():
    embedding = reference().to(torch.bfloat16).time_embedding
    near, far = embedding(torch.tensor([0.99839, 1.0]))
    assert torch.tensor(0.99839).bfloat16() == 1.0
    assert (near - far).norm() > 0.1 * far.norm()
