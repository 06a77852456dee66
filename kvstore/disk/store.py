"""The disk tier at work: its bookkeeping, its file, the threads that move bytes, deadlines, switching off and on.

Runs on the daemon's event loop; only the file's calls run on threads. Views passed in are read or written by a thread
until the returned `Transfer` says otherwise.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from headrace.errors import ConfigError, DigestMismatch
from headrace.ids import BlockName, SlotIndex
from headrace.kvstore.base import BlockMeta
from headrace.kvstore.checksum import digest
from headrace.kvstore.disk.base import SlabFile
from headrace.kvstore.disk.health import Health
from headrace.kvstore.disk.tier import DiskTier
from headrace.kvstore.residents import Resident
from headrace.kvstore.workers import Workers, within

log = logging.getLogger(__name__)
T = TypeVar("T")
SYNC_S = 1.0
"""How long a finished write may not be safe from a power failure (it always is from the end of the process)."""
CLOSE_S = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """How one read or write ended for whoever asked."""

    ok: bool
    digest: bytes = b""
    """Of what was read, when `ok`."""
    running: "asyncio.Future[None] | None" = None
    """Set when it was given up past its deadline: a thread uses the caller's memory until this is done."""

    async def settled(self) -> None:
        """Until no thread uses the caller's memory."""
        if self.running is not None:
            await asyncio.wait([self.running])


@dataclasses.dataclass(slots=True)
class DiskTotals:
    """Since the start."""

    errors: int = 0
    late: int = 0
    """Transfers past their deadline."""
    checksum_failures: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    write_bytes: int = 0
    write_seconds: float = 0.0


class DiskStore:
    """`open_file` opens the slab file; while it raises OSError the tier is off and tries again."""

    def __init__(
        self,
        tier: DiskTier,
        open_file: Callable[[], SlabFile],
        *,
        payload_bytes: int,
        threads: int,
        timeout_s: float,
        retry_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tier = tier
        self.totals = DiskTotals()
        self.health = Health(retry_s=retry_s, clock=clock)
        self._open_file = open_file
        self._payload_bytes = payload_bytes
        self._timeout_s = timeout_s
        self._clock = clock
        self._file: SlabFile | None = None
        # One more than transfers are given out: a sync or a probe must not wait behind them.
        self._workers = Workers(threads + 1, "disk")
        self._upkeep: asyncio.Task[None] | None = None
        self._erasures: set[asyncio.Task[None]] = set()
        self._dirty = False
        self._synced_s = 0.0

    @property
    def on(self) -> bool:
        return self._file is not None and self.health.on

    @property
    def busy(self) -> bool:
        """Something is still running."""
        return self._workers.busy > 0 or bool(self._erasures)

    def open(self) -> None:
        """Blocking, before anything else. A file that cannot be had switches the tier off; ConfigError is for the
        operator."""
        try:
            self._file = self._open_file()
            self._recover(self._file)
        except OSError as error:
            self.health.switch_off(f"cannot open: {error}")
            log.error("disk tier is off: %s", self.health.reason)

    def has(self, name: BlockName) -> bool:
        return self.on and self.tier.has(name)

    # --- transfers --------------------------------------------------------------------------------------------------

    async def write(self, meta: BlockMeta, taken: bytes, slab: memoryview) -> Transfer:
        """Store a block. `taken`: digest of its payload, from whoever wrote it first. Not ok: skipped or failed."""
        file = self._file
        begun = self.tier.begin_write(meta, taken) if file is not None and self.on else None
        if file is None or begun is None:
            return Transfer(False)
        slot, record = begun
        began = self._clock()
        future = self._workers.start(lambda: file.write(slot, record, slab))
        try:
            await within(future, self._timeout_s)
        except TimeoutError:
            self.tier.abort(slot, quarantine=True)
            future.add_done_callback(lambda _: self.tier.unquarantine(slot))
            self._late("write")
            return Transfer(False, running=future)
        except OSError as error:
            self.tier.abort(slot, quarantine=True)
            self._erase(slot)
            self._failed(f"write: {error}")
            return Transfer(False)
        self.tier.commit(slot)
        self._dirty = True
        self.totals.write_bytes += slab.nbytes
        self.totals.write_seconds += self._clock() - began
        self.health.succeeded()
        return Transfer(True)

    async def read(self, name: BlockName, into: memoryview) -> Transfer:
        """Load a block and check its digest. Not ok: not here, failed, or not what was written (then it is dropped)."""
        file = self._file
        resident = self.tier.begin_read(name) if file is not None and self.on else None
        if file is None or resident is None:
            return Transfer(False)
        began = self._clock()
        future = self._workers.start(lambda: self._load(file, resident, into))
        try:
            await within(future, self._timeout_s)
        except TimeoutError:
            future.add_done_callback(lambda _: self._end_read(resident))
            self._late("read")
            return Transfer(False, running=future)
        except OSError as error:
            self._end_read(resident)
            self._failed(f"read: {error}")
            return Transfer(False)
        except DigestMismatch as error:
            self.totals.checksum_failures += 1
            self.drop(name)
            self._end_read(resident)
            self._failed(str(error))
            return Transfer(False)
        self._end_read(resident)
        self.tier.counters.reads += 1
        self.totals.read_bytes += into.nbytes
        self.totals.read_seconds += self._clock() - began
        self.health.succeeded()
        return Transfer(True, resident.digest)

    def drop(self, name: BlockName) -> None:
        slot = self.tier.drop(name)
        if slot is not None:
            self._erase(slot)

    def flush(self) -> int:
        slots = self.tier.flush()
        for slot in slots:
            self._erase(slot)
        return len(slots)

    # --- upkeep -----------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Regular upkeep, on the event loop."""
        self.tier.tick()
        if self._upkeep is not None and not self._upkeep.done():
            return
        if self.health.probe_due():
            self._upkeep = asyncio.ensure_future(self._probe())
        elif self._dirty and self.on and self._clock() - self._synced_s >= SYNC_S:
            self._upkeep = asyncio.ensure_future(self._sync())

    async def close(self) -> None:
        """Waits a little for transfers; one that hangs keeps the file until the process ends."""
        if self._dirty and self.on:
            await self._sync()
        await self.abandon()
        if self._file is not None and not self._workers.busy:
            self._file.close()
            self._file = None

    async def abandon(self) -> None:
        """End all work; the file stays open. For tests of what a killed process leaves."""
        for task in [*self._erasures, *([self._upkeep] if self._upkeep is not None else [])]:
            task.cancel()
        end = time.monotonic() + CLOSE_S
        while self._workers.busy and time.monotonic() < end:
            await asyncio.sleep(0.01)
        self._workers.close()

    def values(self) -> dict[str, float]:
        totals = {f"{name}_total": float(value) for name, value in dataclasses.asdict(self.totals).items()}
        state = {"on": float(self.on), "switched_off_total": float(self.health.times_off)}
        return {**self.tier.stats(), **totals, **state}

    # --- inside -----------------------------------------------------------------------------------------------------

    def _load(self, file: SlabFile, resident: Resident, into: memoryview) -> None:
        record = file.read(resident.slot, into)
        name = resident.meta.name
        found = "damaged" if record is None else record.name.hex()[:16]
        if record is None or (record.name, record.digest) != (name, resident.digest):
            raise DigestMismatch(f"disk slot {resident.slot} should hold {name.hex()[:16]}, its record is {found}")
        if digest(into[: self._payload_bytes]) != resident.digest:
            raise DigestMismatch(f"block {name.hex()[:16]} in disk slot {resident.slot} is not what was written")

    def _end_read(self, resident: Resident) -> None:
        slot = self.tier.end_read(resident)
        if slot is not None:
            self._erase(slot)

    def _erase(self, slot: SlotIndex) -> None:
        """Make the record of a quarantined slot invalid, then free the slot."""
        task = asyncio.ensure_future(self._erased(slot))
        self._erasures.add(task)
        task.add_done_callback(self._erasures.discard)

    async def _erased(self, slot: SlotIndex) -> None:
        file = self._file
        if file is not None and self.on:
            future = self._workers.start(lambda: file.erase(slot))
            try:
                await within(future, self._timeout_s)
            except TimeoutError:
                self._late("erase")
                await asyncio.wait([future])
            except OSError as error:
                self._failed(f"erase: {error}")
        # Not erased: a restart may find the old record, and the digest decides then whether it is any good.
        self.tier.unquarantine(slot)

    def _late(self, what: str) -> None:
        self.totals.late += 1
        self._failed(f"a {what} took longer than {self._timeout_s} s")

    def _failed(self, reason: str) -> None:
        self.totals.errors += 1
        log.warning("disk tier: %s", reason)
        if self.health.failed(reason):
            log.error("disk tier is off after failures in a row, the last: %s", reason)

    def _recover(self, file: SlabFile) -> None:
        began = time.monotonic()
        stale = self.tier.recover(file.records())
        for slot in stale:
            file.erase(slot)
        count = self.tier.counters.recovered
        log.info("disk tier: %d of %d slots recovered in %.2f s", count, file.slots, time.monotonic() - began)

    async def _probe(self) -> None:
        try:
            if self._file is None:
                self._file = await within(self._workers.start(self._open_file), self._timeout_s)
                self._recover(self._file)
            await within(self._workers.start(self._file.probe), self._timeout_s)
        except (OSError, TimeoutError, ConfigError) as error:
            log.warning("disk tier stays off: %s", error or type(error).__name__)
            return
        self.health.probed(True)
        log.warning("disk tier is on again")

    async def _sync(self) -> None:
        assert self._file is not None
        self._dirty = False
        try:
            await within(self._workers.start(self._file.sync), self._timeout_s)
            self._synced_s = self._clock()
        except (OSError, TimeoutError) as error:
            self._dirty = True
            self._failed(f"sync: {error or type(error).__name__}")
