"""One measured figure beside its goal and yardstick."""

from typing import Any

Row = dict[str, Any]


def row(what: str, value: float, unit: str, goal: str = "", yardstick: str = "", ratio: float | None = None) -> Row:
    shown = "" if ratio is None else f"{ratio:.2f}"
    return {
        "what": what, "value": round(value, 3), "unit": unit, "goal": goal, "yardstick": yardstick, "ratio": shown
    }  # fmt: skip
