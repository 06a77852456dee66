"""Bytes, seconds and failures of each way that blocks take. Pure. One set of counters a process: it has one link."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Legs:
    """Thread-safe. Names are `<from>_to_<to>`: host_to_device, device_to_host, device_to_device."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: dict[str, tuple[int, float, int]] = {}

    @contextmanager
    def copy(self, leg: str, size: int) -> Iterator[None]:
        """Around one copy. One that raises counts as failed, with none of its bytes."""
        began, good = time.perf_counter(), False
        try:
            yield
            good = True
        finally:
            self.add(leg, size if good else 0, time.perf_counter() - began, failed=not good)

    def add(self, leg: str, size: int, seconds: float, *, failed: bool = False) -> None:
        with self._lock:
            total, took, failures = self._done.get(leg, (0, 0.0, 0))
            self._done[leg] = (total + size, took + seconds, failures + failed)

    def values(self) -> dict[str, float]:
        """As in `BoxStatus.values`."""
        with self._lock:
            done = dict(self._done)
        values = {}
        for leg, (size, seconds, failures) in done.items():
            values[f"leg_bytes_total{{leg={leg}}}"] = float(size)
            values[f"leg_seconds_total{{leg={leg}}}"] = seconds
            values[f"leg_failures_total{{leg={leg}}}"] = float(failures)
        return values


legs = Legs()
"""This process's."""
