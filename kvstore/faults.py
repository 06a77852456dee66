"""Faults at the edges where bytes move, for tests and soaks: wrappers with the interface of what they wrap.

    error     the call fails
    short     half of the bytes move, the call fails
    torn      half of the bytes move, the call says it worked
    corrupt   all bytes move, one is wrong
    slow      the call takes `seconds` longer
    late      as slow; meant to be longer than the caller's deadline, so that it completes when nobody waits any more
    hang      the call does not come back until `FaultPlan.release`, and fails then

Legs are named "<tier>.<direction>": disk.read, disk.write, peer.send, peer.receive, device.load, device.store.
"""

import dataclasses
import enum
import errno
import fnmatch
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from headrace.kvstore.disk.base import Record, SlabFile
from headrace.kvstore.peer.stream import Pipe


class Fault(enum.StrEnum):
    ERROR = "error"
    SHORT = "short"
    TORN = "torn"
    CORRUPT = "corrupt"
    SLOW = "slow"
    LATE = "late"
    HANG = "hang"


@dataclasses.dataclass(slots=True)
class Rule:
    """Applies to a share of the calls on matching legs."""

    leg: str
    """Name, or pattern like "disk.*"."""
    fault: Fault
    share: float = 1.0
    seconds: float = 0.0
    """Of slow and late."""
    left: int | None = None
    """How many more times; None: no limit."""


class FaultPlan:
    """Decides for every call whether it fails and how. Thread-safe."""

    def __init__(self, rules: Iterable[Rule] = (), seed: int = 0) -> None:
        self.injected: Counter[tuple[str, Fault]] = Counter()
        self._rules = list(rules)
        self._dice = random.Random(seed)
        self._lock = threading.Lock()
        self._released = threading.Event()

    def add(
        self, leg: str, fault: Fault, *, share: float = 1.0, seconds: float = 0.0, times: int | None = None
    ) -> None:
        with self._lock:
            self._rules.append(Rule(leg, fault, share, seconds, times))

    def clear(self) -> None:
        """No more faults from now on; what hangs comes back."""
        with self._lock:
            self._rules.clear()
        self.release()

    def release(self) -> None:
        """Let what hangs fail now."""
        self._released.set()
        self._released = threading.Event()

    def strike(self, leg: str) -> Fault | None:
        """The fault of this call, if any. Sleeps, hangs and raises by itself; what is left to the caller to act out is
        SHORT, TORN and CORRUPT."""
        rule = self._draw(leg)
        if rule is None:
            return None
        if rule.fault is Fault.ERROR:
            raise OSError(errno.EIO, f"{leg}: injected error")
        if rule.fault in (Fault.SLOW, Fault.LATE):
            time.sleep(rule.seconds)
        if rule.fault is Fault.HANG:
            self._released.wait()
            raise OSError(errno.EIO, f"{leg}: hung until it was released")
        return rule.fault

    def _draw(self, leg: str) -> Rule | None:
        with self._lock:
            for rule in self._rules:
                if rule.left == 0 or not fnmatch.fnmatch(leg, rule.leg) or self._dice.random() >= rule.share:
                    continue
                if rule.left is not None:
                    rule.left -= 1
                self.injected[leg, rule.fault] += 1
                return rule
        return None


def flip(view: memoryview, where: int) -> None:
    """Make one byte wrong."""
    view[where % view.nbytes] ^= 0x40


class FaultySlabFile:
    """A slab file whose transfers fail as the plan says. Implements disk.base.SlabFile."""

    def __init__(self, inner: SlabFile, plan: FaultPlan) -> None:
        self._inner = inner
        self._plan = plan
        self.slots, self.slot_bytes = inner.slots, inner.slot_bytes

    def records(self) -> list[Record | None]:
        return self._inner.records()

    def write(self, slot: int, record: Record, slab: memoryview) -> None:
        fault = self._plan.strike("disk.write")
        if fault in (Fault.SHORT, Fault.TORN, Fault.CORRUPT):
            changed = memoryview(bytearray(slab))
            if fault is Fault.CORRUPT:
                flip(changed, slot * 977)
            else:
                half = slab.nbytes // 2
                changed[half:] = bytes(slab.nbytes - half)
            slab = changed
        self._inner.write(slot, record, slab)
        if fault is Fault.SHORT:
            raise OSError(errno.EIO, "disk.write: injected short transfer")

    def read(self, slot: int, into: memoryview) -> Record | None:
        fault = self._plan.strike("disk.read")
        record = self._inner.read(slot, into)
        if fault is Fault.CORRUPT:
            flip(into, slot * 977)
        elif fault in (Fault.SHORT, Fault.TORN):
            half = into.nbytes // 2
            into[half:] = bytes(into.nbytes - half)
        if fault is Fault.SHORT:
            raise OSError(errno.EIO, "disk.read: injected short transfer")
        return record

    def erase(self, slot: int) -> None:
        self._plan.strike("disk.erase")
        self._inner.erase(slot)

    def sync(self) -> None:
        self._plan.strike("disk.sync")
        self._inner.sync()

    def probe(self) -> None:
        self._plan.strike("disk.probe")
        self._inner.probe()

    def close(self) -> None:
        self._inner.close()


SLAB_LIKE_BYTES = 1024
"""Smaller transfers on a data connection are its own framing."""


class FaultyPipe:
    """A data connection whose slabs fail as the plan says. Implements peer.stream.Pipe."""

    def __init__(self, inner: Pipe, plan: FaultPlan) -> None:
        self._inner = inner
        self._plan = plan

    def send(self, data: memoryview) -> None:
        fault = self._plan.strike("peer.send") if data.nbytes >= SLAB_LIKE_BYTES else None
        if fault in (Fault.SHORT, Fault.TORN):
            self._inner.send(data[: data.nbytes // 2])
            if fault is Fault.TORN:
                self._inner.send(memoryview(bytes(data.nbytes - data.nbytes // 2)))
                return
            self._inner.close()
            raise OSError(errno.EPIPE, "peer.send: injected short transfer")
        if fault is Fault.CORRUPT:
            data = memoryview(bytearray(data))
            flip(data, 977)
        self._inner.send(data)

    def receive(self, into: memoryview) -> None:
        fault = self._plan.strike("peer.receive") if into.nbytes >= SLAB_LIKE_BYTES else None
        if fault is Fault.SHORT:
            self._inner.receive(into[: into.nbytes // 2])
            raise OSError(errno.EIO, "peer.receive: injected short transfer")
        self._inner.receive(into)
        if fault is Fault.CORRUPT:
            flip(into, 977)
        elif fault is Fault.TORN:
            into[into.nbytes // 2 :] = bytes(into.nbytes - into.nbytes // 2)

    def close(self) -> None:
        self._inner.close()


class FaultyCopier:
    """Copies between a pool and slabs that fail as the plan says, in place of `copiers.copier_for(pool)`. A copy that
    fails half-way has moved the first half of its blocks."""

    def __init__(self, inner: Any, plan: FaultPlan) -> None:
        self._inner = inner
        self._plan = plan

    def load(self, pool: Any, slots: Sequence[int], views: Sequence[memoryview]) -> None:
        self._copy("device.load", self._inner.load, pool, slots, views)

    def store(self, pool: Any, slots: Sequence[int], views: Sequence[memoryview]) -> None:
        self._copy("device.store", self._inner.store, pool, slots, views)

    def _copy(
        self, leg: str, copy: Callable[..., None], pool: Any, slots: Sequence[int], views: Sequence[memoryview]
    ) -> None:
        fault = self._plan.strike(leg)
        if fault is Fault.SHORT:
            half = len(slots) // 2
            copy(pool, slots[:half], views[:half])
            raise OSError(errno.EIO, f"{leg}: injected short copy")
        copy(pool, slots, views)
