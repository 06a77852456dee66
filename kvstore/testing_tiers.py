"""Every tier behind one small form, for the conformance suite: blocks of two chains go in and out, the process that
keeps them may die. No test framework here."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from headrace.ids import BlockName, SlotIndex
from headrace.kvstore.device_index import DeviceIndex
from headrace.kvstore.policies import make_policy
from headrace.kvstore.testing_lower import PAYLOAD_BYTES, LowerFixture, LowerSettings, payload_of
from headrace.kvstore.testing_peer import PeerPair

SLOTS = 8


class TierUnderTest(Protocol):
    """A tier of SLOTS blocks. Coroutines run on one loop; several may be under way at once."""

    survives: bool
    """Whether blocks are there again after `crash`."""

    async def put(self, names: Sequence[BlockName], start: int, stop: int) -> None:
        """Store blocks `start..stop` of a chain, as far as there is room; the content follows from the name."""
        ...

    async def get(self, name: BlockName) -> bytes | None:
        """Payload, or None if the tier does not have the block."""
        ...

    def has(self, name: BlockName) -> bool: ...

    async def hold(self, name: BlockName) -> Callable[[], object] | None:
        """Keep a block from eviction until the returned call; None if it is not here."""
        ...

    async def crash(self) -> None:
        """Whoever keeps the blocks dies and starts again."""
        ...

    def violations(self) -> list[str]: ...

    async def close(self) -> None: ...


class DeviceTier:
    """A rank's index over bytes in memory: slots are written before they are named."""

    survives = False

    def __init__(self, directory: Path) -> None:
        self._start()

    def _start(self) -> None:
        self.index = DeviceIndex(SLOTS, make_policy("lru", SLOTS))
        self.bytes: dict[SlotIndex, bytes] = {}

    async def put(self, names: Sequence[BlockName], start: int, stop: int) -> None:
        held = self.index.acquire(names[:start])
        for depth in range(start, stop):
            slots = self.index.allocate(1)
            if slots is None:
                break
            self.bytes[slots[0]] = b"\xee" * PAYLOAD_BYTES
            await asyncio.sleep(0)
            self.bytes[slots[0]] = payload_of(names[depth])
            held.append(self.index.name_slot(slots[0], names[depth], names[depth - 1] if depth else None, depth))
        self.index.release(held)

    async def get(self, name: BlockName) -> bytes | None:
        held = self.index.acquire([name])
        await asyncio.sleep(0)
        found = self.bytes[held[0]] if held else None
        self.index.release(held)
        return found

    def has(self, name: BlockName) -> bool:
        return bool(self.index.match([name]))

    async def hold(self, name: BlockName) -> Callable[[], object] | None:
        held = self.index.acquire([name])
        return (lambda: self.index.release(held)) if held else None

    async def crash(self) -> None:
        self._start()

    def violations(self) -> list[str]:
        return self.index.check_integrity()

    async def close(self) -> None:
        assert self.index.held_count == 0


class HostTierOnly:
    """The host tier of a node whose disk never gets anything."""

    survives = False

    def __init__(self, directory: Path) -> None:
        self.node = LowerFixture(directory, LowerSettings(host_slots=SLOTS, disk_slots=1, admit_uses=255))

    async def put(self, names: Sequence[BlockName], start: int, stop: int) -> None:
        self.node.put(names, start, stop)
        await asyncio.sleep(0)

    async def get(self, name: BlockName) -> bytes | None:
        found = self.node.lease(name)
        if found is None:
            return None
        await asyncio.sleep(0)
        data = bytes(self.node.view(found.slot)[:PAYLOAD_BYTES])
        self.node.release(name)
        return data

    def has(self, name: BlockName) -> bool:
        return self.node.host.find([name])[0] is not None

    async def hold(self, name: BlockName) -> Callable[[], object] | None:
        return None if self.node.lease(name) is None else lambda: self.node.release(name)

    async def crash(self) -> None:
        await self.node.crash()

    def violations(self) -> list[str]:
        return self.node.violations()

    async def close(self) -> None:
        await self.node.close()


class DiskTierOnly:
    """The disk tier; blocks pass through a host tier that is larger and emptied at once."""

    survives = True

    def __init__(self, directory: Path) -> None:
        self.node = LowerFixture(directory, LowerSettings(host_slots=4 * SLOTS, disk_slots=SLOTS))

    async def put(self, names: Sequence[BlockName], start: int, stop: int) -> None:
        for depth in range(start, stop):
            if not self.has(names[depth]):
                self.node.put(names, depth, depth + 1)
                await self.node.settle()
        self.node.evict_host()

    async def get(self, name: BlockName) -> bytes | None:
        if not self.has(name):
            return None
        await self.node.bring([name])
        data = self.node.read(name)
        self.node.evict_host()
        return data

    def has(self, name: BlockName) -> bool:
        return self.node.disk.has(name)

    async def hold(self, name: BlockName) -> Callable[[], object] | None:
        held = self.node.tier.begin_read(name)
        return None if held is None else lambda: self.node.tier.end_read(held)

    async def crash(self) -> None:
        await self.node.settle()
        await self.node.crash()

    def violations(self) -> list[str]:
        return self.node.violations()

    async def close(self) -> None:
        await self.node.settle()
        await self.node.close()


class PeerTier:
    """Another node's host tier, seen from a reader whose own host tier is emptied at once."""

    survives = False

    def __init__(self, directory: Path) -> None:
        self.pair = PeerPair(
            directory,
            owner=LowerSettings(host_slots=SLOTS, disk_slots=1, admit_uses=255),
            reader=LowerSettings(host_slots=4 * SLOTS, disk_slots=1, admit_uses=255),
        )

    async def open(self) -> None:
        await self.pair.open()

    async def put(self, names: Sequence[BlockName], start: int, stop: int) -> None:
        self.pair.owner.put(names, start, stop)
        await self._known()

    async def get(self, name: BlockName) -> bytes | None:
        await self._known()
        if not self.has(name):
            return None
        await self.pair.reader.bring([name])
        data = self.pair.reader.read(name)
        self.pair.reader.evict_host()
        return data

    def has(self, name: BlockName) -> bool:
        return self.pair.owner.host.find([name])[0] is not None

    async def hold(self, name: BlockName) -> Callable[[], object] | None:
        return None if self.pair.owner.lease(name) is None else lambda: self.pair.owner.release(name)

    async def crash(self) -> None:
        """The owner's blocks are gone, and its service with a new one in its place."""
        await self.pair.restart_owner()
        await self._known()

    def violations(self) -> list[str]:
        return self.pair.owner.violations() + self.pair.reader.violations()

    async def close(self) -> None:
        await self.pair.close()

    async def _known(self) -> None:
        """Until the reader has heard what changed at the owner."""
        await self.pair.in_step()


TIERS: dict[str, Callable[[Path], Any]] = {
    "device": DeviceTier,
    "host": HostTierOnly,
    "disk": DiskTierOnly,
    "peer": PeerTier,
}


async def make_tier(kind: str, directory: Path) -> TierUnderTest:
    made = TIERS[kind](directory)
    if isinstance(made, PeerTier):
        await made.open()
    tier: TierUnderTest = made
    return tier
