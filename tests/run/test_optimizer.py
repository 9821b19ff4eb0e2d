"""Settings that reach the optimizer as they are, whatever its class."""

import dataclasses
import inspect
import re
import typing
from pathlib import Path

import pytest
import torch
from torch import nn

import optimizers
from dit_train import overlays
from dit_train.optimizer_config import AuxiliaryAdamW, MarsAdamWConfig, MuonConfig, OptimizerConfig
from dit_train.run import optimizer
from optimizers.engine.algorithm import ALGORITHMS
from optimizers.orthogonal.coefficients import resolve

ROOT = Path(__file__).parent.parent.parent
MEMBERS = typing.get_args(OptimizerConfig)
MATRICES = [member for member in MEMBERS if hasattr(member, "momentum_dtype")]
IN_GROUPS = {"params", "param_names", "step"}
VALUES = {
    **{"lr": 0.5, "weight_decay": 0.25, "momentum": 0.75, "betas": (0.5, 0.75), "eps": 0.125, "input_momentum": 0.5},
    **{"momentum_dtype": "dynamic8", "mars_gamma": 0.5, "mars_clip": 2.0, "mars_exact": True},
    **{"adjust_lr_fn": "original", "ns_coefficients": "cubic5", "ns_steps": 3, "exchange": "gather"},
    **{"equilibrate": "rc", "neuron_beta2": 0.5, "neuron_eps": 0.5, "neuron_norm": "direction", "block_grid": 2},
    **{"period": 7, "phase": 2, "stagger": True, "block_lr_ratio": 0.5, "row_lr_ratio": 0.5, "sign_lr_ratio": 0.5},
    **{"row_norm": "plain", "row_eps": 0.5, "radius": 2.0, "max_norm": 2.0, "least_step": 0.5, "initial_norm": 0.5},
    **{"fraction": 0.5, "selection": "local", "rank_fraction": 0.5, "rank_multiple": 4},
}
"""Another value than the default for every setting that becomes an option of the group, but for two."""


def model():
    return nn.Sequential(nn.Linear(64, 66), nn.LayerNorm(66))


def named(member) -> str:
    return "-".join([member.name, *(getattr(member, key) for key in ("form", "ball") if hasattr(member, key))])


def options(group):
    found = {key: value for key, value in group.items() if key not in IN_GROUPS}
    if "ns_coefficients" in found:
        found["ns_coefficients"] = resolve(found["ns_coefficients"], found.pop("ns_steps"))
        found["wire_dtype"] = found["wire_dtype"] or torch.bfloat16
    return found


@pytest.mark.parametrize("member", MEMBERS, ids=named)
def test_the_defaults_are_those_of_the_class(member):
    config = member()
    built = optimizer.build(config, model())
    form = {key: getattr(config, key) for key in ("form", "ball") if hasattr(config, key)}
    own = type(built)(model().parameters() if member not in MATRICES else [torch.zeros(4, 6)], **form)
    groups = {group["algorithm"]: options(group) for group in built.param_groups if group["weight_decay"] != 0}
    groups.setdefault(built.param_groups[0]["algorithm"], options(built.param_groups[0]))
    expected = options(own.param_groups[0])
    assert groups[expected["algorithm"]] == expected
    assert ALGORITHMS[expected["algorithm"]].name.startswith(config.name)


@pytest.mark.parametrize("member", MEMBERS, ids=named)
def test_every_setting_reaches_the_group(member):
    names = {field.name for field in dataclasses.fields(member)} - {"name", "form", "ball"}
    settings = {name: value for name, value in VALUES.items() if name in names}
    if "nesterov" in names:
        settings["nesterov"] = not member.nesterov
    if "momentum_form" in names:
        settings["momentum_form"] = "ema" if member.momentum_form == "heavy_ball" else "heavy_ball"
    (group, *_) = optimizer.build(member(**settings), model()).param_groups
    assert {name: group[name] for name in settings} == settings
    assert names - settings.keys() <= {"ns_dtype", "wire_dtype", "compile", "bucket_mib", "period_budget", "adamw"}
    assert not [name for name, value in settings.items() if value == getattr(member(), name, None)]


@pytest.mark.parametrize("member", MATRICES, ids=named)
def test_what_is_no_option_of_a_group_reaches_a_matrix_optimizer_too(member):
    """And AdamW takes the rest, at rates of its own where they are given."""
    names = {field.name for field in dataclasses.fields(member)}
    settings = {"compile": True, "wire_dtype": "fp32", "ns_dtype": "bf16", "bucket_mib": 0.5}
    settings = {name: value for name, value in settings.items() if name in names}
    adamw = AuxiliaryAdamW(lr=0.25, betas=(0.5, 0.75), eps=0.5, weight_decay=0.125)
    built = optimizer.build(member(**settings, adamw=adamw), model())
    group, rest = built.param_groups[0], built.param_groups[-1]
    assert built._compile is ("compile" in names) and built._bucket_bytes == 2**19
    assert group.get("ns_dtype") == (torch.bfloat16 if "ns_dtype" in names else None)
    assert group.get("wire_dtype") == (torch.float32 if "wire_dtype" in names else None)
    assert (rest["algorithm"], rest["lr"], rest["betas"], rest["eps"]) == ("adamw", 0.25, (0.5, 0.75), 0.5)
    assert rest["weight_decay"] == 0  # vectors


@pytest.mark.parametrize("member", [member for member in MEMBERS if member not in MATRICES], ids=named)
def test_an_elementwise_optimizer_takes_everything_and_decays_no_vectors(member):
    net = model()
    matrices, vectors = optimizer.build(member(weight_decay=0.5), net).param_groups
    assert (matrices["algorithm"], matrices["weight_decay"], vectors["weight_decay"]) == (member.name, 0.5, 0)
    assert vectors["algorithm"] == ("adamw" if member is MarsAdamWConfig else member.name)
    assert {p.ndim for p in matrices["params"]} == {2} and {p.ndim for p in vectors["params"]} == {1}
    assert vectors["lr"] == member().lr


@pytest.mark.parametrize(("chosen", "kept"), [("fp32", None), ("bf16", torch.bfloat16), ("int8", "int8")])
def test_momentum_is_kept_as_it_is_named(chosen, kept):
    config = overlays.read([], ["--optimizer.name", "scion", "--optimizer.momentum_dtype", chosen]).optimizer
    built = optimizer.build(config, model())
    weight = built.param_groups[0]["params"][0]
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}[chosen]
    assert built.param_groups[0]["momentum_dtype"] == kept
    assert built.state[weight]["momentum_buffer"].dtype == dtype


def test_every_class_of_the_library_can_be_named():
    classes = {value for value in vars(optimizers).values() if inspect.isclass(value)}
    classes = {value for value in classes if issubclass(value, torch.optim.Optimizer)}
    assert set(optimizer._CLASSES.values()) == classes
    assert optimizer._CLASSES.keys() == {member.name for member in MEMBERS}


def test_every_algorithm_has_a_config_and_a_line_in_the_comparison_on_digits():
    configs = {path.stem: path for path in (ROOT / "configs" / "optimizers").glob("*.yaml")}
    assert configs.keys() == ALGORITHMS.keys()
    for name, path in configs.items():
        assert optimizer.build(overlays.read([path]).optimizer, model()).param_groups[0]["algorithm"] == name
    compared = re.findall(r"^at [\de.,-]+ ((?:\w+ |\\\n *)*\w+)$", (ROOT / "scripts" / "family.sh").read_text(), re.M)
    assert sorted(word for words in compared for word in words.replace("\\", " ").split()) == sorted(configs)
    table = (ROOT / "optimizers" / "README.md").read_text().split("| configs/optimizers/ | rate: loss |")[1]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table.split("\n\n")[0], re.M)) == sorted(configs)


def test_adamw_has_nothing_to_compile():
    with pytest.raises(overlays.ConfigError, match=r"optimizer\.compile: no such setting"):
        overlays.read([], ["--optimizer.name", "adamw", "--optimizer.compile", "true"])


def test_a_bucket_larger_than_any_model_is_no_error():
    assert optimizer.build(MuonConfig(bucket_mib=1e308), model())._bucket_bytes > 2**60
