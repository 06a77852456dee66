"""A node's bookkeeping with lower tiers, in this process and on the running event loop: what suites of the disk tier
drive. No test framework here."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.ids import BlockName, Incarnation, SlotIndex, new_incarnation
from headrace.kvstore.checksum import digest
from headrace.kvstore.daemon.lower import DiskSide, LowerTiers
from headrace.kvstore.daemon.promoter import Source
from headrace.kvstore.disk.base import SlabFile
from headrace.kvstore.disk.file import open_file, slot_start
from headrace.kvstore.disk.store import DiskStore
from headrace.kvstore.disk.tier import DiskTier
from headrace.kvstore.faults import FaultPlan, FaultySlabFile
from headrace.kvstore.host_tier import HostTier
from headrace.kvstore.policies import make_policy
from headrace.kvstore.policies.write import make_write_policy
from headrace.kvstore.residents import Resident
from headrace.kvstore.testing import FINGERPRINT

SLOT_BYTES = 4096
PAYLOAD_BYTES = 4000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LowerSettings:
    host_slots: int = 4
    disk_slots: int = 16
    write_policy: str = "through"
    admit_uses: int = 1
    depth: int = 2
    timeout_s: float = 5.0
    retry_s: float = 0.05
    policy: str = "lru"


class LowerFixture:
    """One host tier in a bytearray over one slab file. `owner` is a client of it; `crash` forgets all but the file."""

    def __init__(
        self,
        directory: Path,
        settings: LowerSettings | None = None,
        plan: FaultPlan | None = None,
        sources: Sequence[Source] = (),
    ) -> None:
        self.settings = settings or LowerSettings()
        self.path = directory / "node-0.slabs"
        self.plan = plan or FaultPlan()
        self.owner: Incarnation = new_incarnation()
        self.sources = sources
        self._files: list[SlabFile] = []
        self.start()

    def start(self) -> None:
        wanted = self.settings
        self.memory = memoryview(bytearray(wanted.host_slots * SLOT_BYTES))
        self.host = HostTier(
            slots=wanted.host_slots, slot_bytes=SLOT_BYTES, policy=make_policy(wanted.policy, wanted.host_slots),
            lease_s=1e9,
        )  # fmt: skip
        self.tier = DiskTier(
            slots=wanted.disk_slots, slot_bytes=SLOT_BYTES, policy=make_policy(wanted.policy, wanted.disk_slots)
        )
        self.disk = DiskStore(
            self.tier, self._open, payload_bytes=PAYLOAD_BYTES, threads=wanted.depth, timeout_s=wanted.timeout_s,
            retry_s=wanted.retry_s,
        )  # fmt: skip
        self.disk.open()
        side = DiskSide(
            store=self.disk,
            policy=make_write_policy(wanted.write_policy),
            admit_uses=wanted.admit_uses,
            depth=wanted.depth,
        )
        self.lower = LowerTiers(self.host, self.view, side, self.sources)
        self.host.attach(self.owner)

    def _open(self) -> SlabFile:
        size = slot_start(self.settings.disk_slots, SLOT_BYTES)
        made = FaultySlabFile(
            open_file(self.path, fingerprint=FINGERPRINT, disk_bytes=size, slot_bytes=SLOT_BYTES), self.plan
        )
        self._files.append(made)
        return made

    def view(self, slot: int) -> memoryview:
        return self.memory[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]

    def put(self, names: Sequence[BlockName], start: int = 0, stop: int | None = None) -> list[BlockName]:
        """Write blocks of a chain into the host tier; returns those that went in."""
        stop = len(names) if stop is None else stop
        blocks = [(names[i], names[i - 1] if i else None, i) for i in range(start, stop)]
        writes = []
        for (name, _, _), slot in zip(blocks, self.host.begin_put(self.owner, blocks)):
            if slot >= 0:
                self.view(slot)[:PAYLOAD_BYTES] = payload_of(name)
                writes.append((name, SlotIndex(slot), digest(payload_of(name))))
        self.host.commit_put(self.owner, writes, keep_lease=False)
        put = [name for name, _, _ in writes]
        self.lower.used(put)
        return put

    def lease(self, name: BlockName) -> Resident | None:
        """As a client: held until `release`."""
        found = self.host.lease(self.owner, [name])[0]
        if found is not None:
            self.lower.leased([name])
        return found

    def release(self, name: BlockName) -> None:
        self.host.release(self.owner, [name])

    def read(self, name: BlockName) -> bytes | None:
        """The bytes a client would see, and no lease afterwards."""
        found = self.lease(name)
        if found is None:
            return None
        data = bytes(self.view(found.slot)[:PAYLOAD_BYTES])
        self.release(name)
        return data

    async def bring(self, names: Sequence[BlockName], timeout_s: float = 10.0) -> int:
        """Promote until nothing more is coming; how many leading names are readable then."""
        end = time.monotonic() + timeout_s
        while (state := self.lower.promote(names, urgent=True)).coming:
            assert time.monotonic() < end, f"still coming: {state}"
            await asyncio.sleep(0.001)
        return state.ready

    async def settle(self, done: Callable[[], bool] = lambda: True, timeout_s: float = 10.0) -> None:
        """Upkeep until nothing moves and `done()`."""
        end = time.monotonic() + timeout_s
        while not (self.lower.idle and done()):
            assert time.monotonic() < end, f"not settled: {self.lower.values()}"
            self.tick()
            await asyncio.sleep(0.001)

    async def settle_until(self, done: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Upkeep until `done()`, whatever else moves."""
        end = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < end, f"not settled: {self.lower.values()}"
            self.tick()
            await asyncio.sleep(0.001)

    def tick(self) -> None:
        self.lower.tick()
        self.host.tick()

    def evict_host(self) -> None:
        """Empty the host tier as pressure would, without writing anything back."""
        while (coldest := self.host.coldest()) is not None:
            self.host.evict(coldest.meta.name)

    async def crash(self) -> None:
        """The process ends without a word; a new one starts on the same file. Threads of this process cannot be killed,
        so transfers are waited for: a half-written slot is made by a fault instead."""
        self.plan.release()
        await self.lower.abandon()
        for file in self._files:
            file.close()
        self._files.clear()
        self.start()

    def violations(self) -> list[str]:
        return self.host.check_integrity() + self.lower.check_integrity()

    async def close(self) -> None:
        self.plan.clear()
        await self.lower.close()
        self.host.detach(self.owner)
        assert self.violations() == []


def payload_of(name: BlockName) -> bytes:
    """The content of a block follows from its name, so that a wrong byte is noticed."""
    return (name * (PAYLOAD_BYTES // len(name) + 1))[:PAYLOAD_BYTES]
