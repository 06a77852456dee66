"""Rows to files and to the terminal."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.errors import InputError

Row = dict[str, Any]


def to_csv(rows: Sequence[Row]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def save(path: str, text: str) -> None:
    """Write a report. Raises InputError with the reason."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def to_json(rows: Sequence[Row], facts: Sequence[str]) -> str:
    return json.dumps({"about": list(facts), "rows": list(rows)}, indent=1) + "\n"


def to_text(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """A plain table of `columns`."""
    cells = [[_text(row.get(key)) for key in columns] for row in rows]
    widths = [max(len(key), *(len(line[i]) for line in cells)) for i, key in enumerate(columns)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in [list(columns), *cells]
    )


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
