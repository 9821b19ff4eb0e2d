"""Builds a `Config` strictly from YAML files and ``--section.key value`` arguments, and writes it back.

Files are laid over each other in the order given, then the command line; what none of them names keeps its default.
An unknown key or a value of the wrong type raises `ConfigError` with one line that names the nearest key.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import math
import os
import re
import reprlib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from dit_train.config import MOST_PROFILED_STEPS, Config, ConfigError
from dit_train.optimizer_config import PERIOD_BUDGET, AdamWConfig


def read(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> Config:
    """Lay YAML files and ``--section.key value`` arguments over the defaults, in order.

    A file that names another ``optimizer.name`` than the ones before it replaces the whole section, since each
    optimizer has settings of its own.

    Raises:
        ConfigError: a file is missing or no YAML mapping, a key is unknown, a value has the wrong type or range.
    """
    layers = [(str(path), _load_yaml(find(path))) for path in files]
    layers.append(("command line", _parse_overrides(overrides)))
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, layer in layers:
        _merge(merged, layer, origin, origins)
    config = _build(Config, merged, "", origins)
    _check_ranges(config)
    return config


def find(path: str | Path) -> Path:
    """A config file by its path, else ``configs/…`` as shipped inside the package.

    Raises:
        ConfigError: neither exists; names the nearest shipped file.
    """
    given = Path(path)
    if os.path.isfile(given):  # unlike Path's it is false, and no error, for a name that no file can have
        return given
    shipped = shipped_configs()
    parts = given.parts[1:] if given.parts[:1] == ("configs",) else given.parts
    if ".." not in parts and os.path.isfile(shipped.joinpath(*parts)):
        return shipped.joinpath(*parts)
    known = [f"configs/{p.relative_to(shipped).as_posix()}" for p in sorted(shipped.rglob("*.yaml"))]
    raise ConfigError(f"{path}: no such config file{_nearest(str(path), known)}")


def shipped_configs() -> Path:
    """The folder of the configs that come with the package: in a checkout beside it, in a wheel inside it."""
    package = Path(__file__).parent
    return package / "configs" if (package / "configs").is_dir() else package.parent / "configs"


def to_dict(config: Any) -> dict[str, Any]:
    """A config, or a section, as plain YAML values."""
    return _plain(dataclasses.asdict(config))


def dump(config: Config, **header: str) -> str:
    """The resolved config as YAML text that `read` takes back, after comment lines ``# key: value``."""
    comments = "".join(f"# {key}: {value}\n" for key, value in header.items())
    return comments + yaml.safe_dump(to_dict(config), sort_keys=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _load_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except Exception as error:  # the loader raises whatever it meets: YAMLError, KeyError, AttributeError, …
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{path}: cannot be read as YAML ({reason})") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{path}: expected sections such as 'model:' at the top")
    return values


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice, of which YAML would drop the first without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """``--a.b 1``, ``--a.b=1`` and ``--a.b 1 2`` (a list) as one nested mapping; of equal ones the last counts."""
    layer: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--"):
            raise ConfigError(f"{flag}: config files come before --section.key value arguments")
        name, equals, text = flag[2:].partition("=")
        texts = [text] if equals else []
        while not equals and rest and not rest[0].startswith("--"):
            texts.append(rest.pop(0))
        if not texts:
            raise ConfigError(f"{flag}: needs a value, as in {flag} VALUE")
        values = [_Argument(text) for text in texts]
        *sections, key = name.replace("-", "_").split(".")
        below = layer
        for section in sections:
            below = below.setdefault(section, {})
            if not isinstance(below, dict):
                raise ConfigError(f"{flag}: {section} is given a value of its own as well; leave one of them out")
        below[key] = values[0] if len(values) == 1 else values
    return layer


class _Argument(str):
    """A command-line value, read as YAML unless the setting is text: a path may look like a number or a mapping."""

    def parsed(self) -> Any:
        try:
            return yaml.safe_load(self)
        except Exception:  # as in `_load_yaml`
            return str(self)


_FORMS = ("form", "ball")
_DEPTH = 3  # no setting lies deeper; YAML's anchors can nest without end


def _merge(base: dict[str, Any], layer: dict[str, Any], origin: str, origins: dict[str, str], prefix: str = "") -> None:
    for key, value in layer.items():
        path = f"{prefix}{key}"
        below = base.get(key)
        name = below.get("name", AdamWConfig.name) if isinstance(below, dict) else None
        if isinstance(below, dict) and isinstance(value, dict) and value.get("name", name) == name:
            _merge(below, value, origin, origins, f"{path}.")
        elif isinstance(value, dict) and prefix.count(".") < _DEPTH:
            base[key] = {}
            _merge(base[key], value, origin, origins, f"{path}.")
        else:
            base[key] = value
        origins[path] = origin


# --- building --------------------------------------------------------------------------------------------------------


def _build(cls: type, values: Any, path: str, origins: dict[str, str]) -> Any:
    """An instance of dataclass `cls` from a mapping, with unknown keys and wrong types refused."""
    if not isinstance(values, dict):
        raise ConfigError(f"{_where(path, origins)}expected settings below it, not {_shown(values)}")
    hints = typing.get_type_hints(cls)
    arguments = {}
    for key, value in values.items():
        inner = f"{path}.{key}" if path else str(key)
        if key not in hints:
            known = [f"{path}.{name}" if path else name for name in hints]
            raise ConfigError(f"{_where(inner, origins)}no such setting{_nearest(inner, known)}")
        arguments[key] = _convert(hints[key], value, inner, origins)
    return cls(**arguments)


def _convert(hint: Any, value: Any, path: str, origins: dict[str, str]) -> Any:
    """`value` as the annotated type, or ConfigError."""
    if isinstance(value, _Argument):
        if hint is str or typing.get_origin(hint) is Literal:
            value = str(value)
        elif hint is type(None) or hint in (int, float, bool) or typing.get_origin(hint) is tuple:
            value = value.parsed()
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, path, origins)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = typing.get_args(hint)
        if all(dataclasses.is_dataclass(member) for member in members):
            return _build_tagged(members, value, path, origins)
        for member in sorted(members, key=lambda member: member is not type(None)):  # "null" before text
            try:
                return _convert(member, value, path, origins)
            except ConfigError:
                continue
    elif typing.get_origin(hint) is Literal:
        if value in typing.get_args(hint):
            return value
        if isinstance(value, str):
            raise ConfigError(
                f"{_where(path, origins)}no such value {_shown(value)}{_nearest(value, typing.get_args(hint))}"
            )
    elif typing.get_origin(hint) is tuple:
        kinds = typing.get_args(hint)
        if kinds[-1] is Ellipsis and isinstance(value, list | tuple):
            kinds = kinds[:1] * len(value)
        if isinstance(value, list | tuple) and len(value) == len(kinds):
            return tuple(_convert(kind, item, path, origins) for kind, item in zip(kinds, value, strict=True))
    elif hint is float:
        number = _as_float(value)
        if number is not None:
            return number
    elif hint is int:
        if type(value) is int and abs(value) < _INT_END:
            return value
    elif (hint is type(None) and value is None) or (hint is not type(None) and type(value) is hint):
        return value
    raise ConfigError(f"{_where(path, origins)}expected {_describe(hint)}, not {_shown(value)}")


def _build_tagged(members: tuple[type, ...], value: Any, path: str, origins: dict[str, str]) -> Any:
    """The member of a tagged union whose ``name`` the mapping gives (default: the first), and whose form if it has any.

    Members of one name differ in their settings by a second tag, ``form`` or ``ball``.
    """
    if not isinstance(value, dict):
        raise ConfigError(f"{_where(path, origins)}expected settings below it, not {_shown(value)}")
    name = value.get("name", members[0].name)
    named = [member for member in members if member.name == name]
    if not named:
        near = _nearest(name if isinstance(name, str) else "", list(dict.fromkeys(m.name for m in members)))
        raise ConfigError(f"{_where(f'{path}.name', origins)}no such {path} {_shown(name)}{near}")
    tag = next((tag for tag in _FORMS if hasattr(named[0], tag)), None)
    if tag is None:
        return _build(named[0], value, path, origins)
    by_form = {form: member for member in named for form in typing.get_args(typing.get_type_hints(member)[tag])}
    form = value.get(tag, getattr(named[0], tag))
    if not isinstance(form, str) or form not in by_form:
        near = _nearest(form if isinstance(form, str) else "", list(by_form))
        raise ConfigError(f"{_where(f'{path}.{tag}', origins)}no such value {_shown(form)}{near}")
    for key in value.keys() - typing.get_type_hints(by_form[form]).keys():
        having = [other for other, member in by_form.items() if key in typing.get_type_hints(member)]
        if having:
            where = _where(f"{path}.{key}", origins)
            raise ConfigError(f"{where}{tag} {form} has no such setting; {tag} {' or '.join(having)} has")
    return _build(by_form[form], value, path, origins)


def _as_float(value: Any) -> float | None:
    """A number; YAML 1.1 reads ``3e-4`` as text, so text that is a number counts.

    It also reads ``3:55:00`` as seconds; so does this what YAML leaves as text, such as ``0:30:00``.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and re.fullmatch(r"\d+(:[0-5]?\d){1,2}", value):
        value = functools.reduce(lambda seconds, part: 60 * seconds + int(part), value.split(":"), 0)
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


class _Short(reprlib.Repr):
    """Values as Python writes them, cut where they are long or deep."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 100

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to write thousands of digits."""
        return super().repr_int(x, level) if abs(x) < _INT_END else "a number beyond 64 bits"


_INT_END = 2**63
_shown = _Short().repr


def _describe(hint: Any) -> str:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_describe(member) for member in typing.get_args(hint))
    if typing.get_origin(hint) is tuple and typing.get_args(hint)[-1] is Ellipsis:
        return "a schedule [[0, value], [step, value], ...]"
    if typing.get_origin(hint) is tuple:
        return f"a list of {len(typing.get_args(hint))} values"
    if typing.get_origin(hint) is Literal:
        choices = ", ".join(map(str, typing.get_args(hint)))
        return f"one of {choices}" if "," in choices else choices
    names = {float: "a finite number", int: "a whole number", str: "text", bool: "true or false", type(None): "null"}
    return names.get(hint, str(hint))


def _nearest(word: str, known: Sequence[str]) -> str:
    """``; did you mean …?`` with the nearest known word; where none is near, the known words if they are few."""
    best = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if best:
        return f"; did you mean {best[0]}?"
    return f"; known: {', '.join(known)}" if len(known) <= 12 else ""


def _where(path: str, origins: dict[str, str]) -> str:
    origin = origins.get(path)
    return f"{origin}: {path}: " if origin else f"{path}: "


# --- ranges ----------------------------------------------------------------------------------------------------------

_POSITIVE = (
    "model.width model.depth model.heads model.patch model.mlp_ratio data.image_size data.classes data.count "
    "objective.logit_std optimizer.lr optimizer.ns_steps optimizer.bucket_mib optimizer.period "
    "optimizer.period_budget optimizer.adamw.lr optimizer.mars_clip optimizer.max_norm optimizer.initial_norm "
    "train.steps train.batch train.micro_batch train.clip_norm sample.steps sample.batch score.count "
    "run.log_every run.validate_count run.checkpoint_every run.keep_checkpoints run.time_limit "
    "faults.spike_sigmas faults.stop_after"
).split()
_NOT_NEGATIVE = (
    "optimizer.weight_decay optimizer.eps optimizer.adamw.eps optimizer.adamw.weight_decay optimizer.block_lr_ratio "
    "optimizer.row_lr_ratio optimizer.sign_lr_ratio optimizer.mars_gamma optimizer.neuron_eps optimizer.row_eps "
    "optimizer.radius optimizer.least_step "
    "optimizer.phase schedule.warmup_steps train.seed sample.grid sample.seed sample.guidance "
    "score.every run.norms_every run.validate_every run.sample_every run.keep_every run.stall_seconds "
    "run.silence_seconds"
).split()
_FRACTION = "model.label_dropout schedule.final_fraction".split()
_BELOW_ONE = "optimizer.momentum optimizer.input_momentum optimizer.neuron_beta2 train.ema_decay".split()


def _check_ranges(config: Config) -> None:
    rules = (
        (_POSITIVE, lambda v: v > 0, "must be above 0"),
        (_NOT_NEGATIVE, lambda v: v >= 0, "must not be negative"),
        (_FRACTION, lambda v: 0 <= v <= 1, "must lie in [0, 1]"),
        (_BELOW_ONE, lambda v: 0 <= v < 1, "must lie in [0, 1)"),
        (["optimizer.fraction"], lambda v: 0 < v <= 1, "must lie in (0, 1]"),
        (["data.heldout_every"], lambda v: v >= 2, "must be at least 2"),
        (["faults.window"], lambda v: v >= 8, "must be at least 8"),
    )
    for paths, holds, text in rules:
        for path in paths:
            found = _lookup(config, path)
            for value in [value for _, value in found] if isinstance(found, tuple) else [found]:
                if value is not None and value != "auto" and not holds(value):
                    raise ConfigError(f"{path}: {text}, not {_shown(value)}")
    for path in ("optimizer.period", *(f"optimizer.{kind}_lr_ratio" for kind in ("block", "row", "sign"))):
        _check_schedule(path, _lookup(config, path))
    for path in ("optimizer.betas", "optimizer.adamw.betas"):
        betas = _lookup(config, path)
        if betas is not None and not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"{path}: both must lie in [0, 1), not {list(betas)}")
    if config.run.profile is not None:
        first, count = config.run.profile
        if first < 1 or not 1 <= count <= MOST_PROFILED_STEPS:
            raise ConfigError(
                f"run.profile: must be the first step, from 1, and their number, 1 to {MOST_PROFILED_STEPS}, not "
                f"{[first, count]}"
            )
    if config.train.deterministic and config.train.compute_dtype == "auto":
        raise ConfigError("train.compute_dtype: auto goes by a measurement; name fp32 or bf16 with train.deterministic")
    if not config.run.folder.strip():
        raise ConfigError("run.folder: must name a folder")
    if getattr(config.optimizer, "mars_exact", False) and not config.optimizer.mars_gamma:
        raise ConfigError("optimizer.mars_exact: does nothing beside optimizer.mars_gamma 0; set that to 0.025, say")
    _check_period(config)


def _check_schedule(path: str, value: Any) -> None:
    """Of [step, value], if it is one."""
    if isinstance(value, tuple):
        steps = [step for step, _ in value]
        if not steps or steps[0] != 0 or any(a >= b for a, b in itertools.pairwise(steps)):
            raise ConfigError(f"{path}: the steps of a schedule must ascend from 0, not {_shown(steps)}")


def _check_period(config: Config) -> None:
    period, budget = (getattr(config.optimizer, name, None) for name in ("period", "period_budget"))
    if period == "auto" and config.optimizer.mars_exact:
        raise ConfigError(
            "optimizer.period: auto compares with AdamW, which has no second pass as mars_exact; name a number"
        )
    if period == "auto" and config.train.deterministic:
        raise ConfigError("optimizer.period: auto goes by a measurement; name a number with train.deterministic")
    if period not in (None, "auto") and budget != PERIOD_BUDGET:
        raise ConfigError(
            f"optimizer.period_budget: {budget:g} does nothing beside optimizer.period {period}; set that to auto"
        )


def _lookup(config: Any, path: str) -> Any:
    """The value at a dotted path, or None where this config has no such setting."""
    for key in path.split("."):
        config = getattr(config, key, None)
    return config
