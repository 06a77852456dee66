"""Build a `Config` from defaults, a YAML mapping and dotted overrides; refuse anything that is not exactly right."""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from headrace.config.tree import Config
from headrace.errors import ConfigError

REDIS_SCHEMES = ("redis://", "rediss://", "unix://")


def load_config(file: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """Defaults, then `file` (YAML), then each `a.b=c` of `overrides` (the value is parsed as YAML).

    Raises ConfigError naming the field and what it allows.
    """
    raw: dict[str, Any] = {}
    if file is not None:
        raw = _read_yaml(Path(file))
    for item in overrides:
        _apply_override(raw, item)
    return from_dict(raw)


def from_dict(raw: Mapping[str, Any]) -> Config:
    """The inverse of `to_dict`; missing keys take their defaults. Raises ConfigError."""
    config = _build(Config, raw, "")
    assert isinstance(config, Config)
    _check_whole(config)
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """Plain dicts, lists and scalars: what YAML, JSON and msgpack take."""
    return dataclasses.asdict(config)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected sections at the top, got {type(raw).__name__}")
    return raw


def _apply_override(raw: dict[str, Any], item: str) -> None:
    key, equals, text = item.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {item!r}: expected section.field=value")
    *parents, leaf = key.split(".")
    node = raw
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {item!r}: {parent} is a value, not a section")
        node = child
    try:
        node[leaf] = yaml.safe_load(text) if text else ""
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {item!r}: the value is not YAML: {error}") from error


def _build(cls: type[Any], raw: Any, path: str) -> Any:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path or 'config'}: expected a section, got {raw!r}")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in raw:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{_join(path, key)}: no such setting{hint} (known: {', '.join(fields)})")
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in raw.items():
        where = _join(path, key)
        if dataclasses.is_dataclass(hints[key]):
            values[key] = _build(hints[key], value, where)
        else:
            values[key] = _check_value(where, value, hints[key], fields[key].metadata)
    return cls(**values)


def _check_value(where: str, value: Any, hint: Any, meta: Mapping[str, Any]) -> Any:
    if meta["names"] and (isinstance(value, Mapping) or "=" in str(value)):
        return _check_mapping(where, value, meta)
    value = _coerce(where, value, hint)
    choices, low, high = meta["choices"], meta["minimum"], meta["maximum"]
    if choices and value not in choices:
        raise ConfigError(f"{where}: {value!r} is not one of {', '.join(map(str, choices))}")
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"{low if low is not None else '-inf'} .. {high if high is not None else 'inf'}"
        raise ConfigError(f"{where}: {value} is outside {bounds} {meta['unit']}".rstrip())
    return value


def _check_mapping(where: str, value: Any, meta: Mapping[str, Any]) -> str:
    """`{a: x}` or `a=x,b=y` -> `a=x,b=y`, in the order of the names."""
    pairs = value
    if not isinstance(pairs, Mapping):
        pairs = {name.strip(): choice.strip() for name, _, choice in (p.partition("=") for p in str(value).split(","))}
    for name, choice in pairs.items():
        if name not in meta["names"]:
            raise ConfigError(f"{where}: no {name!r}; known: {', '.join(meta['names'])}")
        if choice not in meta["choices"]:
            raise ConfigError(f"{where}.{name}: {choice!r} is not one of {', '.join(map(str, meta['choices']))}")
    return ",".join(f"{name}={pairs[name]}" for name in meta["names"] if name in pairs)


def _coerce(where: str, value: Any, hint: Any) -> Any:
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if hint is str:
        # YAML reads `off` as False and `1` as 1; both are fine texts for a text field.
        if isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, (str, int, float)):
            return str(value)
    if typing.get_origin(hint) is tuple and isinstance(value, (list, tuple)):
        inner = typing.get_args(hint)[0]
        return tuple(_coerce(f"{where}[{i}]", item, inner) for i, item in enumerate(value))
    name = f"a list like [{value}]" if isinstance(hint, types.GenericAlias) else hint.__name__
    raise ConfigError(f"{where}: expected {name}, got {value!r}")


def _check_whole(config: Config) -> None:
    """Rules that need more than one field."""
    if config.prefill.chunk_tokens % 64:
        raise ConfigError(f"prefill.chunk_tokens: {config.prefill.chunk_tokens} is not a multiple of 64 tokens")
    url = config.directory.url
    if url and not url.startswith(REDIS_SCHEMES):
        raise ConfigError(f"directory.url: {url!r} does not start with one of {', '.join(REDIS_SCHEMES)}")


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
