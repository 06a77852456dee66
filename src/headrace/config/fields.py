"""One way to declare a setting: default, one-line documentation with its unit, and what values are allowed."""

import dataclasses
from typing import Any


def setting(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    choices: tuple[Any, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    names: tuple[str, ...] = (),
) -> Any:
    """A dataclass field that `headrace config` can document and `load` can check. Bounds are inclusive.
    `names`: besides a choice the value may be a mapping of some of these names to choices, kept as `name=choice,...`.
    """
    meta = {"doc": doc, "unit": unit, "choices": choices, "minimum": minimum, "maximum": maximum, "names": names}
    return dataclasses.field(default=default, metadata=meta)


def section(cls: type[Any], doc: str) -> Any:
    """A nested section of the tree."""
    return dataclasses.field(default_factory=cls, metadata={"doc": doc})
