"""Which parameter goes where, and that nothing goes there silently."""

import re

import pytest
import torch
from torch import nn

from optimizers import MuonBP, param_groups, routing_table


class Part(nn.Module):
    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


def dit(depth=2, d=8):
    def block():
        return Part(
            norm=nn.LayerNorm(d),
            attention=Part(query=nn.Linear(d, d), output=nn.Linear(d, d)),
            mlp=Part(up=nn.Linear(d, 4 * d), down=nn.Linear(4 * d, d)),
            modulation=Part(linear=nn.Linear(d, 6 * d)),
        )

    return Part(
        patch_embedding=Part(projection=nn.Conv2d(4, d, 2)),
        time_embedding=Part(in_proj=nn.Linear(d, d)),
        label_embedding=Part(table=nn.Embedding(11, d)),
        position=nn.Parameter(torch.zeros(1, 16, d)),
        blocks=nn.ModuleList(block() for _ in range(depth)),
        mixer=nn.Conv2d(d, d, 3),
        final_layer=Part(linear=nn.Linear(d, 16)),
    )


MATRICES = {
    *(
        f"blocks.{i}.{name}.weight"
        for i in range(2)
        for name in ("attention.query", "attention.output", "mlp.up", "mlp.down")
    ),
    "mixer.weight",
}


def names(groups):
    return [set(group["param_names"]) for group in groups]


def test_a_dit_is_routed_by_module_and_name():
    model = dit()
    matrix, decayed, plain = param_groups(model)
    assert set(matrix["param_names"]) == MATRICES and "algorithm" not in matrix
    assert set(decayed["param_names"]) == {
        "patch_embedding.projection.weight", "time_embedding.in_proj.weight", "label_embedding.table.weight",
        "position",
        "blocks.0.modulation.linear.weight", "blocks.1.modulation.linear.weight", "final_layer.linear.weight",
    }  # fmt: skip
    assert decayed["algorithm"] == plain["algorithm"] == "adamw" and plain["weight_decay"] == 0.0
    assert all(p.ndim == 1 for p in plain["params"])
    assert set().union(*names((matrix, decayed, plain))) == {name for name, _ in model.named_parameters()}


def test_names_of_other_diffusion_transformers():
    for name in (
        "x_embedder",
        "t_embedder",
        "y_embedder",
        "adaLN_modulation",
        "lm_head",
        "head",
        "proj_out",
        "pos_embed",
    ):
        assert "algorithm" in param_groups(Part(**{name: nn.Linear(4, 4, bias=False)}))[0], name
    for name in ("norm1", "norm_out", "time_step_proj", "caption_projection", "proj_out_2"):
        assert "algorithm" in param_groups(Part(blocks=Part(**{name: nn.Linear(4, 4, bias=False)})))[0], name
    for name in ("headless", "multi_heads", "output", "proj", "finally", "normal", "runtime_proj"):
        assert "algorithm" not in param_groups(Part(**{name: nn.Linear(4, 4, bias=False)}))[0], name


DIFFUSERS = {
    "DiTTransformer2DModel": {
        "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 8, "num_layers": 2,
        "sample_size": 8, "patch_size": 2, "num_embeds_ada_norm": 10,
    },
    "SD3Transformer2DModel": {
        "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "num_layers": 2,
        "sample_size": 8, "patch_size": 2, "joint_attention_dim": 32, "caption_projection_dim": 16,
        "pooled_projection_dim": 24, "dual_attention_layers": (0,),
    },
    "FluxTransformer2DModel": {
        "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "num_layers": 1,
        "num_single_layers": 2, "patch_size": 1, "joint_attention_dim": 32, "pooled_projection_dim": 32,
        "axes_dims_rope": (4, 4, 8),
    },
}  # fmt: skip


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", DIFFUSERS)
def test_modulation_and_output_of_diffusers_models_are_no_matrices_but_hidden_projections_are(name, wrapped):
    import diffusers

    model = getattr(diffusers, name)(**DIFFUSERS[name])
    prefix = "module.model." if wrapped else ""
    groups = param_groups(Part(module=Part(model=model)) if wrapped else model)
    found = set(groups[0]["param_names"])
    expected = {
        prefix + path
        for path, p in model.named_parameters()
        if path.endswith("weight")
        and re.search(r"_blocks\.\d+\.(attn\d?\.(to|add)_|ff(_context)?\.|proj_mlp|proj_out)", path)
        and p.ndim == 2
    }
    assert found == expected and len(found) > 8
    assert any(path.endswith(("blocks.1.proj_out.weight", "blocks.1.ff.net.2.weight")) for path in found)


def test_tied_and_frozen_parameters_stay_out_of_the_matrices():
    model = Part(
        first=nn.Linear(4, 4, bias=False), second=nn.Linear(4, 4, bias=False), third=nn.Linear(4, 4, bias=False)
    )
    model.second.weight = model.first.weight
    model.third.weight.requires_grad_(False)
    (group,) = param_groups(model)
    assert group["algorithm"] == "adamw" and group["param_names"] == ["first.weight"]


def test_conv1d_weights_are_not_read_as_stacks():
    (group,) = param_groups(Part(conv=nn.Conv1d(4, 4, 3, bias=False)))
    assert group["algorithm"] == "adamw"


def test_patterns_move_parameters():
    matrix, decayed, _ = param_groups(dit(), matrices=["*.modulation.linear.weight"], adamw=["*.mlp.*", "mixer.weight"])
    assert set(matrix["param_names"]) == {
        f"blocks.{i}.{n}.weight" for i in range(2) for n in ("attention.query", "attention.output", "modulation.linear")
    }
    assert "blocks.0.mlp.up.weight" in decayed["param_names"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"adamw": ["blocks.0.mlp.upp.weight"]},
            "in adamw matches no trainable parameter; the nearest is 'blocks.0.mlp.up.weight'",
        ),
        ({"matrices": ["blocks.*.norm.weight"]}, r"'blocks.0.norm.weight' of shape \(8,\) is no matrix"),
        ({"matrices": ["mixer.*t"], "adamw": ["mixer.weight"]}, "'mixer.weight' matches patterns of both"),
    ],
)
def test_bad_patterns_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        param_groups(dit(), **options)


def test_options_reach_the_optimizer_and_the_table_shows_them():
    groups = param_groups(dit(), matrix_options={"period": 4}, adamw_options={"lr": 3e-4, "betas": (0.8, 0.9)})
    optimizer = MuonBP(groups, lr=2e-3, weight_decay=0.2)
    matrix, decayed, plain = optimizer.param_groups
    assert matrix["period"] == 4 and matrix["lr"] == 2e-3
    assert decayed["lr"] == 3e-4 and decayed["betas"] == (0.8, 0.9) and decayed["weight_decay"] == 0.2
    assert plain["weight_decay"] == 0.0
    table = routing_table(optimizer).splitlines()
    assert table[1].split()[:5] == ["0", "muon_bp", "9", "1,856", "54.0%"]
    assert "blocks.*.attention.query.weight" in table[1] and "0.002" in table[1]
    assert routing_table(groups).splitlines()[1].split()[1] == "-"


def test_errors_name_the_parameter():
    with pytest.raises(ValueError, match=r"group 0, parameter 'norm.bias' of shape \(4,\)"):
        MuonBP([{"params": [nn.Parameter(torch.zeros(4))], "param_names": ["norm.bias"]}])
