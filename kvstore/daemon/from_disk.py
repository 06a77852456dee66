"""The disk tier as a source of promotions."""

from collections.abc import Sequence

from headrace.ids import BlockName, Tier
from headrace.kvstore.daemon.promoter import Sink
from headrace.kvstore.daemon.pump import Lane, Pump
from headrace.kvstore.disk.store import DiskStore


class DiskSource:
    """Implements promoter.Source: one transfer a block."""

    here = True

    def __init__(self, disk: DiskStore, pump: Pump) -> None:
        self._disk = disk
        self._pump = pump

    def leading(self, names: Sequence[BlockName]) -> int:
        return next((i for i, name in enumerate(names) if not self._disk.has(name)), len(names))

    def start(self, names: Sequence[BlockName], sink: Sink, lane: Lane) -> int:
        for i, name in enumerate(names):
            if not self._pump.offer(lane, lambda name=name: self._bring(name, sink)):  # type: ignore[misc]
                return i
        return len(names)

    async def _bring(self, name: BlockName, sink: Sink) -> None:
        resident = self._disk.tier.get(name) if self._disk.on else None
        if resident is None:
            sink.gave_up(name)
            return
        place = sink.begin(resident.meta)
        if place is None:
            return
        try:
            transfer = await self._disk.read(name, place.view)
        except BaseException:
            sink.failed(place, lambda: self._disk.busy)
            raise
        if transfer.ok:
            sink.done(place, transfer.digest, Tier.DISK)
        elif transfer.running is None:
            sink.failed(place)
        else:
            running = transfer.running
            sink.failed(place, lambda: not running.done())
            await transfer.settled()
