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
) -> Any:
    """A dataclass field that `headrace config` can document and `load` can check. Bounds are inclusive."""
    meta = {"doc": doc, "unit": unit, "choices": choices, "minimum": minimum, "maximum": maximum}
    return dataclasses.field(default=default, metadata=meta)


def section(cls: type[Any], doc: str) -> Any:
    """A nested section of the tree."""
    return dataclasses.field(default_factory=cls, metadata={"doc": doc})
