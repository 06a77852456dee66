"""Trace readers by name, and how a file's format is recognised. A reader is a module with

    DESCRIPTION: str                                        one line for --help
    sniff(first_line: str) -> bool                          is this my format?
    read(lines: Iterable[str], options: ReadOptions) -> Trace

Files may be plain, gzip, xz or bzip2: told by their first bytes, not by their name.
"""

import bz2
import gzip
import importlib
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.errors import InputError
from headrace.lab.traces.form import Trace
from headrace.lab.traces.options import ReadOptions

_READERS = {
    "recorded": "headrace.lab.traces.recorded",
    "store-log": "headrace.lab.traces.store_log",
    "weka": "headrace.lab.traces.weka",
    "aiperf": "headrace.lab.traces.aiperf",
    "mooncake": "headrace.lab.traces.mooncake",
    "text": "headrace.lab.traces.text",
    "azure": "headrace.lab.traces.azure",
}
"""In the order in which they are asked: `aiperf` lines are mooncake lines with more fields."""
_MAGIC: tuple[tuple[bytes, Any], ...] = ((b"\x1f\x8b", gzip.open), (b"\xfd7zXZ", lzma.open), (b"BZh", bz2.open))


def format_names() -> list[str]:
    return list(_READERS)


def describe(name: str) -> str:
    text: str = _reader(name).DESCRIPTION
    return text


def read_trace(path: str | Path, format_name: str = "auto", options: ReadOptions | None = None) -> Trace:
    """Read a trace file. Raises InputError when no reader takes it, or when a line is not what its format says."""
    file = Path(path)
    name = detect(file) if format_name == "auto" else format_name
    reader = _reader(name)
    try:
        trace: Trace = reader.read(_lines(file), _named(options or ReadOptions(), file))
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise InputError(f"{file} is not a {name} trace: {type(error).__name__}: {error}") from error
    if not trace.sessions:
        raise InputError(f"{file} holds no request")
    return trace


def detect(path: Path) -> str:
    """Name of the first reader that recognises the file's first line."""
    first = next(_lines(path), "")
    for name in _READERS:
        if _reader(name).sniff(first):
            return name
    raise InputError(f"{path}: no reader knows this; formats: {', '.join(_READERS)}; it starts with {first[:80]!r}")


def _reader(name: str) -> Any:
    if name not in _READERS:
        raise InputError(f"trace format {name!r} is not known; known: auto, {', '.join(_READERS)}")
    return importlib.import_module(_READERS[name])


def _named(options: ReadOptions, file: Path) -> ReadOptions:
    return options if options.name else options.renamed(file.name.split(".")[0])


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open("rb") as raw:
            head = raw.read(6)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    opener = next((opener for magic, opener in _MAGIC if head.startswith(magic)), open)
    try:
        with opener(path, "rt", encoding="utf-8") as text:
            yield from (line for line in text if line.strip())
    except (UnicodeDecodeError, EOFError, OSError, lzma.LZMAError) as error:
        raise InputError(f"{path} is damaged or not text: {error}") from error
