"""Settings of a simulated case, and how they are read from text and swept.

A size may be written as tokens ("0.5M", "64k"), as blocks of the trace ("1000b"), as bytes ("64GiB", "80GB", through
the slab size of a model), or "unlimited"; it is kept as text and turned into blocks when the trace is known.
"""

import dataclasses
import itertools
import re
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from headrace.config.fields import setting
from headrace.errors import ConfigError
from headrace.kernels.formats import BLOCK_TOKENS

C = TypeVar("C")

SLAB_BYTES = 3_502_592
"""Payload of 64 tokens of GLM-5.2 in the `tile656` format."""
UNLIMITED = 0
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(b|B|[kMGT]i?B?)?$")
_FACTORS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """One pool, one policy: the fast question."""

    policy: str = setting("lru", "Eviction policy, a name of kvstore/policies, `clairvoyant` or `reuse-oracle`")
    capacity: str = setting("1M", "Size of the pool", unit="tokens, or blocks with `b`, or bytes with `GB`, `GiB`")
    evict: str = setting(
        "leaves",
        "`leaves`: children before parents, as the store; `any`: as published tables",
        choices=("leaves", "any"),
    )
    warmup: float = setting(0.0, "Share of the requests that fills the pool uncounted", minimum=0.0, maximum=0.99)
    slab_bytes: int = setting(SLAB_BYTES, "Bytes of 64 tokens, for sizes given in bytes", unit="bytes", minimum=1)


def to_blocks(size: str, block_tokens: int, slab_bytes: int = SLAB_BYTES) -> int:
    """A size as blocks of `block_tokens` tokens, rounded down; UNLIMITED for "unlimited". Raises ConfigError."""
    if size.strip() == "unlimited":
        return UNLIMITED
    found = _SIZE.match(size.strip())
    if found is None:
        raise ConfigError(f"size {size!r}: expected tokens (0.5M), blocks (1000b), bytes (64GiB) or unlimited")
    number, unit = float(found[1]), found[2] or ""
    if unit == "b":
        blocks = int(number)
    elif unit.endswith("B"):
        blocks = int(number * _FACTORS[unit[:-1]] / (slab_bytes * block_tokens / BLOCK_TOKENS))
    elif unit in _FACTORS:
        blocks = int(round(number * _FACTORS[unit]) // block_tokens)
    else:
        raise ConfigError(f"size {size!r}: unit {unit!r} is not known")
    if blocks < 1:
        raise ConfigError(f"size {size!r} is less than one block of {block_tokens} tokens")
    return blocks


def to_bytes(size: str) -> float:
    """ "64GiB" as bytes. Raises ConfigError for a size that is not in bytes."""
    found = _SIZE.match(size.strip())
    if found is None or not (found[2] or "").endswith("B"):
        raise ConfigError(f"size {size!r}: expected bytes, like 64GiB or 2TB")
    return float(found[1]) * _FACTORS[found[2][:-1]]


def parse_settings(cls: type[C], assignments: Sequence[str]) -> C:
    """`["policy=lfu", …]` over the defaults of `cls`. Raises ConfigError naming the field and what it allows."""
    values = dict(_assignment(cls, text) for text in assignments)
    return cls(**{key: _value(cls, key, value) for key, value in values.items()})


def parse_sweep(base: C, sweeps: Sequence[str]) -> list[C]:
    """Every combination of `["capacity=1M,2M", "policy=lru,lfu"]`, the last one varying fastest."""
    axes: list[list[tuple[str, Any]]] = []
    cls = type(base)
    for text in sweeps:
        key, values = _assignment(cls, text)
        axes.append([(key, _value(cls, key, value)) for value in values.split(",") if value])
        if not axes[-1]:
            raise ConfigError(f"--sweep {text!r}: no values")
    return [dataclasses.replace(base, **dict(point)) for point in itertools.product(*axes)]  # type: ignore[type-var]


def describe_fields(cls: type[Any]) -> str:
    """One line a field: name, default, meaning, unit, choices."""
    lines = []
    for field in dataclasses.fields(cls):
        meta = field.metadata
        choices = f" (one of {', '.join(map(str, meta['choices']))})" if meta["choices"] else ""
        unit = f" [{meta['unit']}]" if meta["unit"] else ""
        lines.append(f"{field.name}={field.default}\n    {meta['doc']}{unit}{choices}")
    return "\n".join(lines)


def _assignment(cls: type[Any], text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    known = [f.name for f in dataclasses.fields(cls)]
    if not equals or key not in known:
        raise ConfigError(f"{text!r}: expected FIELD=VALUE with a field of {', '.join(known)}")
    return key, value


def _value(cls: type[Any], key: str, text: str) -> Any:
    field = next(f for f in dataclasses.fields(cls) if f.name == key)
    hint, meta = typing.get_type_hints(cls)[key], field.metadata
    try:
        value = {"true": True, "false": False}[text.lower()] if hint is bool else hint(text)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{key}: expected {hint.__name__}, got {text!r}") from error
    if meta["choices"] and value not in meta["choices"]:
        raise ConfigError(f"{key}: {value!r} is not one of {', '.join(map(str, meta['choices']))}")
    low, high = meta["minimum"], meta["maximum"]
    if (low is not None and value < low) or (high is not None and value > high):
        raise ConfigError(f"{key}: {value} is outside {low} .. {high} {meta['unit']}".rstrip())
    return value
