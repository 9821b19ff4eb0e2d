"""The config: strict, layered, and every refusal is one line that names the fix."""

import dataclasses
import json
import typing

import pytest
import yaml

from dit_train import config as settings
from dit_train import overlays
from dit_train.config import Config, ConfigError
from dit_train.optimizer_config import (
    AuONConfig,
    AuONHybridConfig,
    MuonBPConfig,
    OptimizerConfig,
    ScionConfig,
    ScionOtherConfig,
)

BP, AUTO = ["--optimizer.name", "muon_bp"], ["--optimizer.period", "auto"]
FIXED = ["--train.deterministic", "true", "--train.compute_dtype", "fp32"]


def refusal(*arguments: str, files=()) -> str:
    with pytest.raises(ConfigError) as caught:
        overlays.read(files, arguments)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_no_input_gives_the_defaults():
    assert overlays.read([]) == Config()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--optimizer.lrr", "1"], "did you mean optimizer.lr?"),
        (["--optimzer.lr", "1"], "did you mean optimizer?"),
        (["--optimizer.name", "muon_pb"], "did you mean muon_bp?"),
        (["--model.position", "rop"], "did you mean rope?"),
        (["--model.width", "1.5"], "expected a whole number, not 1.5"),
        (["--model.qk_norm", "1"], "expected true or false"),
        (["--optimizer.lr", "fast"], "expected a finite number"),
        (["--optimizer.lr", ".nan"], "expected a finite number"),
        (["--optimizer.lr", "true"], "expected a finite number"),
        (["--optimizer.betas", "0.9"], "expected a list of 2 values"),
        (["--train.clip_norm", "-1"], "must be above 0"),
        (["--train.steps", "0"], "must be above 0"),
        (["--train.ema_decay", "1"], "must lie in [0, 1)"),
        (["--optimizer.betas", "0.9", "1"], "both must lie in [0, 1)"),
        (["--data.heldout_every", "1"], "at least 2"),
        (["--optimizer.lr"], "needs a value"),
        (["--model", "3"], "expected settings below it"),
        (["--optimizer.period", "3"], "optimizer.period: no such setting"),  # AdamW has none
        (
            [*BP, "--optimizer.period", "atuo"],
            "optimizer.period: expected a whole number or auto or a schedule [[0, value], [step, value]",
        ),
        ([*BP, "--optimizer.period", "0"], "optimizer.period: must be above 0"),
        ([*BP, *AUTO, "--optimizer.period_budget", "0"], "optimizer.period_budget: must be above 0"),
        ([*BP, *AUTO, "--optimizer.period_budged", "1"], "did you mean optimizer.period_budget?"),
        ([*BP, "--optimizer.period_budget", "0.1"], "does nothing beside optimizer.period 5; set that to auto"),
        ([*BP, *AUTO, *FIXED], "optimizer.period: auto goes by a measurement; name a number"),
        (["--optimizer.name", "normuo"], "did you mean normuon?"),
        (["--optimizer.name", "normuon", "--optimizer.neuron_beta", "0.9"], "did you mean optimizer.neuron_beta2?"),
        (["--optimizer.name", "normuon", "--optimizer.neuron_beta2", "1"], "must lie in [0, 1)"),
        (["--optimizer.name", "auon", "--optimizer.form", "hybrd"], "optimizer.form: no such value 'hybrd'; did you"),
        (["--optimizer.name", "scion", "--optimizer.ball", "1"], "optimizer.ball: no such value '1'; known: "),
        (["--optimizer.name", "auon", "--optimizer.ns_steps", "5"], "form paper has no such setting; form hybrid has"),
        (
            ["--optimizer.name", "scion", "--optimizer.ball", "sign", "--optimizer.adjust_lr_fn", "original"],
            "optimizer.adjust_lr_fn: ball sign has no such setting; ball spectral has",
        ),
        (["--optimizer.name", "adago", "--optimizer.neuron_beta2", "0.9"], "no such setting"),
    ],
)
def test_a_wrong_setting_is_one_line_with_the_fix(arguments, expected):
    assert expected in refusal(*arguments)


def test_the_file_that_holds_the_wrong_key_is_named(tmp_path):
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("model: {width: 64}\n")
    bad.write_text("model: {widht: 64}\n")
    assert f"{bad}: model.widht" in refusal(files=[good, bad])


@pytest.mark.parametrize("text", ["[1, 2]", "model: [", "\t", "1: 2"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    assert str(path) in refusal(files=[path])


def test_a_binary_file_is_refused(tmp_path):
    path = tmp_path / "picture.yaml"
    path.write_bytes(bytes(range(256)))
    assert "cannot be read as YAML" in refusal(files=[path])


def test_a_section_that_stands_twice_does_not_lose_its_first_half(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text("train: {steps: 5}\nmodel: {width: 64}\ntrain: {seed: 1}\n")
    assert "'train' stands twice" in refusal(files=[path])


@pytest.mark.parametrize("text", ["optimizer: [1]", "optimizer: {name: [a]}", "optimizer: muon"])
def test_an_optimizer_that_is_no_section_is_refused(tmp_path, text):
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    refusal(files=[path])


def test_a_number_beyond_all_floats_is_refused():
    assert "expected a finite number" in refusal("--optimizer.lr", "9" * 400)


@pytest.mark.parametrize(
    "order",
    [["--optimizer.lr", "0.5", "--optimizer.name", "muon"], ["--optimizer.name", "muon", "--optimizer.lr", "0.5"]],
)
def test_the_order_of_arguments_does_not_lose_a_setting(order):
    assert overlays.read([], order).optimizer.lr == 0.5


def test_naming_the_default_optimizer_keeps_what_is_set(tmp_path):
    path = tmp_path / "lr.yaml"
    path.write_text("optimizer: {lr: 0.5}\n")
    assert overlays.read([path], ["--optimizer.name", "adamw"]).optimizer.lr == 0.5


def test_a_missing_file_names_the_nearest_shipped_one():
    assert "did you mean configs/optimizers/muon_bp.yaml?" in refusal(files=["configs/optimizers/muonbp.yaml"])


@pytest.mark.parametrize(
    ("words", "member"),
    [
        ("auon", AuONConfig()),
        ("auon --optimizer.form repo", AuONConfig(form="repo")),
        ("auon --optimizer.form hybrid --optimizer.ns_steps 5", AuONHybridConfig(ns_steps=5)),
        ("scion --optimizer.wire_dtype fp32", ScionConfig(wire_dtype="fp32")),
        ("scion --optimizer.ball column", ScionOtherConfig(ball="column")),
    ],
)
def test_a_form_or_ball_brings_the_settings_that_it_has(words, member):
    config = overlays.read([], ["--optimizer.name", *words.split()])
    assert config.optimizer == member
    assert overlays._build(Config, yaml.safe_load(overlays.dump(config)), "", {}) == config


def test_every_optimizer_and_form_has_a_file():
    files = {path.stem: overlays.read([path]).optimizer for path in overlays.shipped_configs().glob("optimizers/*")}
    members = typing.get_args(OptimizerConfig)
    assert {type(config) for config in files.values()} == set(members)
    assert {member.name for member in members} <= files.keys()


def test_shipped_configs_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = overlays.read(["configs/quickstart/base.yaml", "configs/optimizers/muon_bp.yaml"])
    assert (config.model.width, config.optimizer.period) == (64, 5)


def test_later_layers_win_and_keep_what_they_do_not_name(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("train: {steps: 10, batch: 20}\n")
    second.write_text("train: {steps: 30}\n")
    train = overlays.read([first, second], ["--train.seed=4"]).train
    assert (train.steps, train.batch, train.seed) == (30, 20, 4)


def test_another_optimizer_replaces_the_section_instead_of_inheriting_foreign_settings(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("optimizer: {name: adamw, lr: 0.5, betas: [0.1, 0.2]}\n")
    second.write_text("optimizer: {name: muon_bp, period: 7}\n")
    assert overlays.read([first, second]).optimizer == MuonBPConfig(period=7)


def test_numbers_that_yaml_reads_as_text_are_numbers():
    assert overlays.read([], ["--optimizer.lr", "3e-4"]).optimizer.lr == 3e-4


@pytest.mark.parametrize("path", ["123", "a: b", "[x", "true", "~/x", "1e5"])
def test_a_path_on_the_command_line_is_text_whatever_it_looks_like(path):
    assert overlays.read([], ["--data.path", path]).data.path == path


def test_a_period_is_a_number_or_auto_and_reads_back(tmp_path):
    for words in (AUTO, [*AUTO, "--optimizer.period_budget", "0.1"], ["--optimizer.period", "7"]):
        config = overlays.read([], [*BP, *words])
        assert config.optimizer.period in ("auto", 7)
        (tmp_path / "config.yaml").write_text(overlays.dump(config))
        assert overlays.read([tmp_path / "config.yaml"]) == config


def test_null_on_the_command_line_is_null():
    config = overlays.read([], ["--data.path", "null", "--train.clip_norm", "null"])
    assert config.data.path is None and config.train.clip_norm is None


@pytest.mark.parametrize(("text", "grid"), [("4", 4), ("[2, 3]", (2, 3)), ("null", None)])
def test_a_setting_of_several_types(text, grid):
    assert (
        overlays.read([], ["--optimizer.name", "muon_bp", "--optimizer.block_grid", text]).optimizer.block_grid == grid
    )


@pytest.mark.parametrize("name", sorted({member.name for member in typing.get_args(OptimizerConfig)}))
def test_the_resolved_file_reads_back_equal(tmp_path, name):
    config = overlays.read([], ["--optimizer.name", name, "--train.micro_batch", "4", "--data.path", "a/b: c"])
    path = tmp_path / "config.yaml"
    path.write_text(overlays.dump(config, version="1", note="two: parts"))
    assert overlays.read([path]) == config


def test_every_shipped_config_is_valid():
    for path in sorted(overlays.shipped_configs().rglob("*.yaml")):
        overlays.read([path])


def test_every_setting_has_a_type_and_a_default():
    def walk(cls):
        for name, hint in typing.get_type_hints(cls).items():
            for member in typing.get_args(hint) or (hint,):
                if dataclasses.is_dataclass(member):
                    member()
                    walk(member)
            assert name in {field.name for field in dataclasses.fields(cls)}

    walk(settings.Config)


@pytest.mark.parametrize(
    ("text", "seconds"), [("3:55:00", 14100), ("0:30:00", 1800), ("03:55:00", 14100), ("59:30", 3570), ("90", 90)]
)
def test_a_time_is_the_same_seconds_from_the_command_line_and_from_a_file_where_yaml_reads_some_as_numbers(
    tmp_path, text, seconds
):
    (tmp_path / "c.yaml").write_text(f"run: {{time_limit: {text}}}\n")
    assert overlays.read([tmp_path / "c.yaml"]).run.time_limit == seconds
    assert overlays.read([], ["--run.time_limit", text]).run.time_limit == seconds


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--run.time_limit", "0"], "run.time_limit: must be above 0"),
        (["--run.time_limit", "4 hours"], "run.time_limit: expected a finite number or null"),
        (["--run.time_limit", "1:75:00"], "run.time_limit: expected a finite number or null"),
        (["--run.stall_seconds", "-1"], "run.stall_seconds: must not be negative"),
        (["--faults.window", "7"], "faults.window: must be at least 8"),
        (["--faults.spike_sigmas", "0"], "faults.spike_sigmas: must be above 0"),
        (["--faults.stop_after", "0"], "faults.stop_after: must be above 0"),
        (["--fault.window", "9"], "did you mean faults"),
        (["--data.unreadable", "skip"], "no such value 'skip'"),
        (["--train.deterministic", "true"], "train.compute_dtype: auto goes by a measurement; name fp32 or bf16"),
    ],
)
def test_settings_for_long_runs_are_refused_in_one_line(arguments, line):
    with pytest.raises(ConfigError) as caught:
        overlays.read([], arguments)
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_ranges_name_settings_that_exist():
    known = set()
    for member in typing.get_args(OptimizerConfig):
        flat = overlays.to_dict(Config(optimizer=member()))
        known |= {f"{a}.{b}" for a, inner in flat.items() for b in inner}
        known |= {f"optimizer.adamw.{key}" for key in (flat["optimizer"].get("adamw") or {})}
    listed = [*overlays._POSITIVE, *overlays._NOT_NEGATIVE, *overlays._FRACTION, *overlays._BELOW_ONE]
    assert set(listed) <= known


# -- schedules of periods and ratios --------------------------------------------------------------------------------


def test_periods_and_ratios_may_follow_a_schedule_and_are_kept_as_written():
    text = {"name": "periodic_row_muon", "period": [[0, 1], [100, 3]], "row_lr_ratio": [[0, 1], [1000, 0.25]]}
    config = overlays.read([], ["--optimizer.name", "muon_bp", "--optimizer.period", "[[0, 2], [50, 5]]"])
    assert config.optimizer.period == ((0, 2), (50, 5))
    arguments = [part for key, value in text.items() for part in (f"--optimizer.{key}", str(value))]
    config = overlays.read([], arguments)
    assert config.optimizer.period == ((0, 1), (100, 3)) and config.optimizer.row_lr_ratio == ((0, 1.0), (1000, 0.25))
    written = yaml.safe_dump(json.loads(json.dumps(dataclasses.asdict(config.optimizer))))
    assert yaml.safe_load(written)["period"] == [[0, 1], [100, 3]]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("[[1, 2]]", "the steps of a schedule must ascend from 0, not \\[1\\]"),
        ("[[0, 2], [0, 3]]", "must ascend from 0, not \\[0, 0\\]"),
        ("[]", "must ascend from 0"),
        ("[[0, 0]]", "must be above 0, not 0"),
        ("[[0, 2, 1]]", "expected a whole number or auto or a schedule"),
        ("often", "expected a whole number or auto or a schedule"),
    ],
)
def test_what_is_no_schedule_is_one_line(value, text):
    with pytest.raises(ConfigError, match=f"optimizer.period: .*{text}"):
        overlays.read([], ["--optimizer.name", "muon_bp", "--optimizer.period", value])
