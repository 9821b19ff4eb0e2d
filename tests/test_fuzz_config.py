"""Whatever a config file or a command line holds: a config, or one line of `ConfigError`; no other error, no hang."""

from __future__ import annotations

import typing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dit_train import overlays, preflight
from dit_train.config import Config, ConfigError
from dit_train.optimizer_config import OptimizerConfig

OPTIMIZERS = [member.name for member in typing.get_args(OptimizerConfig)]
TEXTS = [
    *(path.read_text() for path in sorted(overlays.shipped_configs().rglob("*.yaml"))),
    *(overlays.dump(overlays.read([], ["--optimizer.name", name])) for name in OPTIMIZERS),
]
ODD = [
    *(
        "",
        "null",
        "~",
        "true",
        "no",
        "{}",
        "[]",
        "[[]]",
        "[1, [2]]",
        "{a: 1}",
        "- x",
        "? x",
        "? [1]: 2",
        "=",
        "<<: {lr: 1}",
    ),
    *(
        "&a [*a]",
        "*a",
        "&a {b: *a}",
        "!!python/object/apply:os.system [echo]",
        "!!binary eA==",
        "!!set {a}",
        "!x y",
        "!!int x",
    ),
    *(
        "2020-01-01",
        "2020-99-99",
        "0x1F",
        "0o17",
        "1_000",
        "1:30",
        ".inf",
        "-.nan",
        "1e999",
        "-0",
        "9" * 30,
        "-1",
        "1e-400",
    ),
    *(
        "\0",
        "\x85",
        "\u2028",
        "\ud7ff",
        "\ufeff",
        "\t",
        "é",
        "🖼",
        "%YAML 9.9",
        "---\n---",
        "...",
        "'",
        '"',
        "|",
        ">",
        "#",
    ),
    *("../..", "/", "/dev/null", "/proc/self/mem", "~root/x", "$HOME", "a" * 300, "--", "=", "[" * 400, "{a: " * 300),
]
SETTINGS = sorted(
    {
        path
        for name in OPTIMIZERS
        for section, values in overlays.to_dict(overlays.read([], ["--optimizer.name", name])).items()
        for key, value in values.items()
        for path in (
            [f"{section}.{key}"] if not isinstance(value, dict) else [f"{section}.{key}.{below}" for below in value]
        )
    }
)
NUMBERS = ["-1", "0", "1", "2", "3", "8", "10", "64", "0.5", "1e-3", "1e300", str(10**7), str(2**62), str(10**19)]
WORDS = ["digits", "synthetic", "image_folder", "fashion_mnist", "rope", "sincos", "uniform", "exact", "digits-cnn"]

fuzzed = settings(
    derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@st.composite
def broken_texts(draw: st.DrawFn) -> str:
    """A config with a few cuts, doublings, odd pieces and exchanged lines."""
    text = draw(st.sampled_from(TEXTS))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        kind = draw(st.sampled_from(["cut", "odd", "double", "lines", "any"]))
        if kind == "cut":
            text = text[:start] + text[end:]
        elif kind == "odd":
            text = text[:start] + draw(st.sampled_from(ODD)) + text[end:]
        elif kind == "double":
            text = text[:end] + text[start:]
        elif kind == "lines":
            text = "\n".join(draw(st.permutations(text.split("\n"))))
        else:
            text = text[:start] + draw(st.text(max_size=6)) + text[end:]
    return text


def arguments(values: list[str]) -> st.SearchStrategy[list[str]]:
    """A command line of known settings, with one or two values each."""
    value = st.sampled_from(values)
    flag = st.sampled_from(SETTINGS).map(lambda path: f"--{path}")
    given_ = st.one_of(
        st.tuples(flag, value),
        st.tuples(flag, value, value),
        st.builds("{}={}".format, flag, value).map(lambda f: (f,)),
    )
    name = st.sampled_from(OPTIMIZERS).map(lambda name: ("--optimizer.name", name))
    return st.tuples(name, st.lists(given_, max_size=4)).map(
        lambda found: [w for words in (found[0], *found[1]) for w in words]
    )


def outcome(read: typing.Callable[[], typing.Any]) -> typing.Any:
    """What a reader returns, None where it refuses with one line."""
    try:
        return read()
    except ConfigError as error:
        assert str(error) and len(str(error).splitlines()) == 1
        return None


def check_config(config: Config | None, tmp_path: Path) -> None:
    """A config that was taken can be written, and reads back as the same."""
    if config is not None:
        (tmp_path / "back.yaml").write_text(overlays.dump(config), encoding="utf-8")
        assert overlays.read([tmp_path / "back.yaml"]) == config


@settings(fuzzed, max_examples=150)
@given(text=broken_texts())
def test_a_broken_config_file_is_refused_in_one_line_or_read(tmp_path, text):
    path = tmp_path / "fuzzed.yaml"
    path.write_bytes(text.encode("utf-8", errors="surrogatepass"))
    check_config(outcome(lambda: overlays.read([path])), tmp_path)


@settings(fuzzed, max_examples=60)
@given(raw=st.binary(max_size=60), text=st.sampled_from(TEXTS), at=st.integers(0, 400))
def test_bytes_that_are_no_text_are_refused_in_one_line_or_read(tmp_path, raw, text, at):
    path = tmp_path / "fuzzed.yaml"
    path.write_bytes(text.encode()[:at] + raw + text.encode()[at:])
    check_config(outcome(lambda: overlays.read([path])), tmp_path)


@settings(fuzzed, max_examples=100)
@given(
    words=st.one_of(
        arguments([*NUMBERS, *WORDS, *ODD]),
        st.lists(
            st.one_of(st.sampled_from([*ODD, *NUMBERS]), st.text(max_size=8), st.text(max_size=8).map("--{}".format))
        ),
    )
)
def test_any_command_line_is_refused_in_one_line_or_read(tmp_path, words):
    check_config(outcome(lambda: overlays.read([], words)), tmp_path)


@settings(fuzzed, max_examples=120)
@given(words=arguments([*NUMBERS, *WORDS]), ranks=st.integers(1, 9))
def test_a_check_of_odd_settings_ends_with_a_plan_or_one_line_and_writes_nothing(tmp_path, monkeypatch, words, ranks):
    monkeypatch.chdir(tmp_path)
    small = ["--model.width", "32", "--model.depth", "1", "--model.heads", "2", "--train.batch", "24"]
    config = outcome(lambda: overlays.read([], [*small, *words]))
    if config is not None:
        outcome(lambda: preflight.check(config, ranks))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text",
    [
        *("[" * 600, "{a: " * 600, "!!bool x", "!!int ''", "!!timestamp x", "2020-99-99", "? [1]: 2"),
        *("&a {b: *a}", "&a [*a]", "0x" + "f" * 5000, "9" * 5000),
        "{a0: &a0 {x: 1}, " + ", ".join(f"a{i + 1}: &a{i + 1} {{x: *a{i}, y: *a{i}}}" for i in range(60)) + "}",
        "[&a0 [x], " + ", ".join(f"&a{i + 1} [*a{i}, *a{i}]" for i in range(60)) + "]",
    ],
)
@pytest.mark.parametrize("where", ["{}", "model: {}", "model: {{width: {}}}", "optimizer: {{name: {}}}", "{}: 1"])
def test_what_yaml_itself_stumbles_over_is_refused_in_one_line(tmp_path, text, where):
    path = tmp_path / "odd.yaml"
    path.write_text(where.format(text))
    assert outcome(lambda: overlays.read([path])) is None
    assert outcome(lambda: overlays.read([], ["--model.width", text])) is None


@fuzzed
@given(name=st.one_of(st.text(), st.sampled_from([*ODD, "x" * 300, "x/" * 3000])))
def test_no_name_of_a_config_file_is_another_error(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    found = outcome(lambda: overlays.find(name))
    assert found is None or found.is_file()


@pytest.mark.parametrize(
    "path", ["configs/../pyproject.toml", "configs/optimizers/../../README.md", "../pyproject.toml", "/etc/../x.yaml"]
)
def test_a_shipped_config_lies_among_the_shipped_configs(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no such config file"):
        overlays.find(path)


@pytest.mark.parametrize(
    ("arguments", "ranks", "text"),
    [
        (["--train.batch", str(10**18)], 7, "do not divide over 7 ranks; use 5 or 8 ranks"),
        (["--train.batch", str(10**18), "--train.micro_batch", "7"], 1, "use 8"),
        (["--train.batch", "4"], 10**15, "use 4 ranks"),
        (["--model.width", str(10**18 + 1), "--model.heads", "6"], 1, "does not divide model.width"),
        (["--model.depth", str(10**12)], 1, "at most 1000 blocks"),
        (
            ["--data.source", "synthetic", "--data.image_size", "8", "--data.count", str(10**10)],
            1,
            "at most 10,000,000",
        ),
    ],
)
def test_a_refusal_of_a_huge_number_does_not_count_up_to_it(tmp_path, arguments, ranks, text):
    config = overlays.read([], [*arguments, "--run.folder", str(tmp_path / "run")])
    with pytest.raises(ConfigError, match=text):
        preflight.check(config, ranks)
