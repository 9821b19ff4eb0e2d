"""state.json is not trusted: whatever it says is a run's state or one line, and a flipped bit is noticed."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dit_train.checkpoint import manifest
from dit_train.checkpoint.manifest import File, Manifest, RunState
from dit_train.config import ConfigError

STATE = RunState(7, 1.5, 2, recent=[[0.5, 1.0]], compute_dtype="bf16")
SOUND = Manifest(STATE, {"a": [1, 2.5, None, "x"]}, [7, 7], {"__0_0.distcp": File(5, "0" * 64)})


def content() -> dict:
    return json.loads(json.dumps(manifest.asdict(SOUND)))


def write(folder, changed: dict) -> None:
    """A manifest whose own sum is right."""
    text = json.dumps({**changed, "sha256": manifest._sum(changed)})
    (folder / manifest.NAME).write_text(text)


def refusal(folder) -> str:
    with pytest.raises(ConfigError) as caught:
        manifest.read(folder)
    text = str(caught.value)
    assert "damaged checkpoint" in text and "remove that folder" in text and "\n" not in text and len(text) < 1000
    return text


def test_what_was_written_is_read(tmp_path):
    manifest.write(tmp_path, SOUND)
    assert manifest.read(tmp_path) == SOUND
    assert [path.name for path in tmp_path.iterdir()] == [manifest.NAME]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("run", "step"), "7"),
        (("run", "step"), -1),
        (("run", "step"), True),
        (("run", "step"), 7.0),
        (("run", "step"), 1 << 63),
        (("run", "step"), None),
        (("run", "train_seconds"), 10**400),
        (("run", "train_seconds"), "1"),
        (("run", "evaluated"), 1),
        (("run", "compute_dtype"), ["bf16"]),
        (("run", "other"), 1),
        (("run",), []),
        (("fixed",), "x"),
        (("fixed", "a"), {"b": 1}),
        (("fixed", "a"), [[1]]),
        (("fixed", "a"), "x" * 5000),
        (("fixed", "a"), 10**4000),
        (("optimizer_steps",), 7),
        (("optimizer_steps",), [-1]),
        (("optimizer_steps",), ["7"]),
        (("files",), None),
        (("files", "a"), 5),
        (("files", "a"), {"bytes": -5, "sha256": "0" * 64}),
        (("files", "a"), {"bytes": 5, "sha256": "0" * 63}),
        (("files", "a"), {"bytes": 5}),
        (("files", "../x"), {"bytes": 5, "sha256": "0" * 64}),
        (("files", "/etc/passwd"), {"bytes": 5, "sha256": "0" * 64}),
        (("files", ".."), {"bytes": 5, "sha256": "0" * 64}),
        (("files", "a/b"), {"bytes": 5, "sha256": "0" * 64}),
        (("files", "a\0"), {"bytes": 5, "sha256": "0" * 64}),
        (("files", "state.json"), {"bytes": 5, "sha256": "0" * 64}),
        (("more",), 1),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_value_that_no_run_writes_is_one_line(tmp_path, path, value):
    changed = content()
    *outer, last = path
    inner = changed
    for key in outer:
        inner = inner[key]
    inner[last] = value
    write(tmp_path, changed)
    refusal(tmp_path)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b"7",
        b"\xff\xfe{}",
        b'{"run": "\xe9"}',
        b'{"run": {"step": NaN}}',
        b'{"run": -Infinity}',
        b'{"run": 1' + b"0" * 5000 + b"}",
        b"[" * 200_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"run": 1e999}',
    ],
    ids=lambda raw: repr(raw[:20]),
)
def test_hostile_json_is_one_line(tmp_path, raw):
    (tmp_path / manifest.NAME).write_bytes(raw)
    refusal(tmp_path)


def test_lists_of_numbers_are_a_runs_and_other_lists_are_not():
    sound, broken = ([], [1.5, 2], [[1.0, 2.0], [3, 4]]), (["x"], [[None]], [{}], "x", [float("inf")], [True])
    assert all(manifest._like(value, []) for value in sound)
    assert not any(manifest._like(value, []) for value in broken)


def test_a_file_without_end_is_not_read_to_it(tmp_path):
    with (tmp_path / manifest.NAME).open("wb") as file:
        file.truncate(1 << 40)  # a hole: it takes no space
    assert "longer than 64 MiB" in refusal(tmp_path)


def test_every_flipped_bit_is_noticed_or_changes_nothing(tmp_path):
    manifest.write(tmp_path, SOUND)
    path = tmp_path / manifest.NAME
    raw = path.read_bytes()
    noticed = 0
    for i in range(len(raw)):
        path.write_bytes(raw[:i] + bytes([raw[i] ^ 1 << i % 8]) + raw[i + 1 :])
        try:
            assert manifest.read(tmp_path) == SOUND  # for example another case of an escape
        except ConfigError:
            noticed += 1
    assert noticed > 0.99 * len(raw)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(["run", "fixed", "optimizer_steps", "files"]), JSON))
def test_any_json_is_a_manifest_or_one_line(tmp_path, drawn):
    write(tmp_path, {**content(), **drawn})
    try:
        read = manifest.read(tmp_path)
    except ConfigError:
        return
    assert read.run.step >= 0 and all("/" not in name for name in read.files)
