"""Launch shapes measured on a machine, as data: `kernels/tables/<op>.<arch>.json`, written by `headrace kernels tune`.

A file holds entries of one op on one architecture. Each says for which sizes and dtype a configuration was the fastest;
a look-up takes the nearest entry, so a table needs no entry for every size. What a configuration's fields mean is its
op's business. A file's `status` says whether its numbers were measured or the configurations have only been compiled.
"""

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from headrace.errors import KernelUnsupported
from headrace.kernels.launch import Tile, architecture

FOLDER = Path(__file__).parent / "tables"
MEASURED = "measured"
COMPILED = "compiled, not run"


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """`shape` e.g. {"rows": 16, "out": 2624, "inner": 6144}; `config` e.g. {"m": 64, "n": 128, "warps": 4}."""

    dtype: str
    shape: Mapping[str, int]
    config: Mapping[str, int | str]
    us: float | None = None
    """Median microseconds of a launch where it was measured."""


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """All entries of an op on an architecture ("sm_90", "gfx950", "gfx942")."""

    op: str
    arch: str
    status: str = COMPILED
    source: str = ""
    """Device, software and date of the measurements."""
    entries: tuple[Entry, ...] = ()

    def lookup(self, shape: Mapping[str, int], dtype: str, **wanted: int | str) -> Mapping[str, int | str] | None:
        """Configuration of the nearest entry of that dtype, or None if there is none. Distance: the sum over sizes of
        |log2(size / entry's size)|, the first entry of equals. `wanted` keeps entries whose configuration says so."""
        best: tuple[float, Entry] | None = None
        for entry in self.entries:
            if entry.dtype != dtype or any(entry.config.get(key) != value for key, value in wanted.items()):
                continue
            gap = sum(abs(math.log2(max(shape[name], 1) / size)) for name, size in entry.shape.items())
            if best is None or gap < best[0]:
                best = gap, entry
        return best[1].config if best else None


_forced: dict[str, Tile] = {}
_asked: list[tuple[str, str, Mapping[str, int]]] | None = None


def tile(op: str, device: torch.device, dtype: str, shape: Mapping[str, int], otherwise: Tile) -> Tile:
    """Launch shape of an op's Triton kernel for these sizes: from the table `triton-<op>`, or `otherwise`, made to fit
    an AMD device where there is no table. Sizes must not include the number of rows in deterministic mode."""
    if _asked is not None:
        _asked.append((op, dtype, dict(shape)))
    if op in _forced:
        return _forced[op]
    config = load(f"triton-{op}", architecture(device)).lookup(shape, dtype)
    if config is None:
        return otherwise.on(device)
    return Tile(*(int(config[name]) for name in ("m", "n", "warps", "stages")))


@contextlib.contextmanager
def forced(op: str, choice: Tile) -> Iterator[None]:
    """Inside, `tile` gives this for the op: how configurations are compared."""
    _forced[op] = choice
    try:
        yield
    finally:
        del _forced[op]


@contextlib.contextmanager
def asked() -> Iterator[list[tuple[str, str, Mapping[str, int]]]]:
    """Collects what `tile` is asked for inside: (op, dtype, sizes)."""
    global _asked
    found: list[tuple[str, str, Mapping[str, int]]] = []
    _asked = found
    try:
        yield found
    finally:
        _asked = None


@functools.cache
def load(op: str, arch: str, folder: Path = FOLDER) -> Table:
    """The packaged table, or an empty one where there is no file. Raises KernelUnsupported for a bad file."""
    path = folder / f"{op}.{arch}.json"
    if not path.exists():
        return Table(op, arch)
    try:
        table = parse(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError) as error:
        raise KernelUnsupported(f"{path}: not a table of tuned configurations: {error!r}") from error
    if (table.op, table.arch) != (op, arch):
        raise KernelUnsupported(f"{path} holds {table.op} on {table.arch}")
    return table


def parse(data: Mapping[str, Any]) -> Table:
    """Inverse of `dump`. Raises ValueError, KeyError or TypeError."""
    entries = []
    for raw in data["entries"]:
        shape, config = raw["shape"], raw["config"]
        if not shape or not all(type(size) is int and size > 0 for size in shape.values()):
            raise ValueError(f"shape {shape}: sizes must be integers above 0")
        if not all(type(value) in (int, str) for value in config.values()):
            raise ValueError(f"config {config}: values must be integers or strings")
        entries.append(Entry(raw["dtype"], dict(shape), dict(config), raw.get("us")))
    if data["status"] not in (MEASURED, COMPILED):
        raise ValueError(f"status {data['status']!r}: must be {MEASURED!r} or {COMPILED!r}")
    return Table(data["op"], data["arch"], data["status"], data["source"], tuple(entries))


def dump(table: Table) -> str:
    """JSON text with one line an entry, so that a new measurement is a readable difference."""
    lines = []
    for entry in table.entries:
        fields = {"dtype": entry.dtype, "shape": dict(entry.shape), "config": dict(entry.config)}
        lines.append("  " + json.dumps(fields | ({} if entry.us is None else {"us": entry.us})))
    head = {"op": table.op, "arch": table.arch, "status": table.status, "source": table.source}
    fields_text = "".join(f'"{key}": {json.dumps(value)},\n' for key, value in head.items())
    return "{" + fields_text + '"entries": [\n' + ",\n".join(lines) + "\n]}\n"


def save(table: Table, folder: Path = FOLDER) -> Path:
    """Write (replace) the table's file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{table.op}.{table.arch}.json"
    path.write_text(dump(table))
    load.cache_clear()
    return path
