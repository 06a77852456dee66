"""A node's event log on disk: what was asked, written and lost, one JSON object a line, for later analysis
(`lab/traces/store_log.py` reads it as a trace). Block ids are the first 8 bytes of the name as hex: they hold no text
and cannot be turned back without the tenant's salt. Private blocks do not appear.

    {"headrace_store_log": 1, "node", "incarnation", "block_tokens", "slots", "slot_bytes", "unix_s"}
    {"s": 1.25, "op": "read", "who": "prefill-0", "role": "prefill", "hit": 3, "blocks": [...]}    a lease or a match
    {"s": 1.30, "op": "put", "who": ..., "role": ..., "parent": id or null, "blocks": [...]}       visible now
    {"s": 1.31, "op": "gone", "why": "evicted", "quota", "expired", "dropped", "corrupt" or "flushed", "blocks": [...]}
    {"s": 1.40, "op": "joined" | "left", "who": ..., "role": ...}
"""

import json
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

from headrace.errors import ConfigError
from headrace.ids import BlockName
from headrace.kernels.formats import BLOCK_TOKENS
from headrace.kvstore.names import is_private

log = logging.getLogger(__name__)
VERSION = 1
ID_BYTES = 8


class Journal:
    """Lines are buffered; `flush` regularly. At `max_bytes` it ends with a warning; a full disk ends it too, and never
    the daemon."""

    def __init__(
        self, path: Path, header: dict[str, object], max_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises ConfigError when the file cannot be made. An existing file is replaced."""
        self._path, self._max_bytes, self._clock = path, max_bytes, clock
        self._start_s = clock()
        self._bytes = 0
        self._gone: dict[str, list[str]] = {}
        try:
            self._file: IO[str] | None = path.open("w", buffering=1 << 20)
        except OSError as error:
            raise ConfigError(f"store.event_log: cannot write {path}: {error.strerror}") from error
        self._line({"headrace_store_log": VERSION, "block_tokens": BLOCK_TOKENS, "unix_s": time.time(), **header})

    def read(self, who: str, role: str, names: Iterable[BlockName], hit: int) -> None:
        self._op("read", who=who, role=role, hit=hit, blocks=_ids(names))

    def put(self, who: str, role: str, parent: BlockName | None, names: Iterable[BlockName]) -> None:
        blocks = _ids(names)
        if blocks:
            self._op("put", who=who, role=role, parent=None if parent is None else _id(parent), blocks=blocks)

    def gone(self, name: BlockName, why: str) -> None:
        """Collected, written with the next line of any kind."""
        if not is_private(name):
            self._gone.setdefault(why, []).append(_id(name))

    def member(self, who: str, role: str, *, joined: bool) -> None:
        self._op("joined" if joined else "left", who=who, role=role)

    def flush(self) -> None:
        self._write_gone()
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._end(str(error))

    def close(self) -> None:
        self._write_gone()
        self._end("")

    def _op(self, op: str, **fields: object) -> None:
        self._write_gone()
        self._line({"s": round(self._clock() - self._start_s, 6), "op": op, **fields})

    def _write_gone(self) -> None:
        gone, self._gone = self._gone, {}
        for why, blocks in gone.items():
            self._line({"s": round(self._clock() - self._start_s, 6), "op": "gone", "why": why, "blocks": blocks})

    def _line(self, row: dict[str, object]) -> None:
        if self._file is None:
            return
        text = json.dumps(row, separators=(",", ":")) + "\n"
        self._bytes += len(text)
        if self._bytes > self._max_bytes:
            self._end(f"it would be larger than {self._max_bytes} bytes")
            return
        try:
            self._file.write(text)
        except OSError as error:
            self._end(str(error))

    def _end(self, why: str) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        if why:
            log.warning("the event log %s ends: %s", self._path, why)
        try:
            file.close()
        except OSError as error:
            log.warning("the event log %s is cut short: %s", self._path, error)


def _id(name: BlockName) -> str:
    return name[:ID_BYTES].hex()


def _ids(names: Iterable[BlockName]) -> list[str]:
    return [_id(name) for name in names if not is_private(name)]
