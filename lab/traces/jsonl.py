"""Small helpers that the JSON-lines readers share."""

import json
from typing import Any


def first_object(line: str) -> dict[str, Any]:
    """The JSON object on `line`, or {} when it is something else. For sniffing."""
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def parse(number: int, line: str) -> dict[str, Any]:
    """The JSON object on a line. Raises ValueError naming the line."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"line {number}: expected an object, got {type(value).__name__}")
    return value
