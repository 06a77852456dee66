"""The reader's side: knows what other nodes have, and fetches it into the host tier. Runs on the daemon's loop; the
transfers run on threads, straight into arena slots."""

import asyncio
import dataclasses
import logging
import socket
import time
from collections.abc import Callable, Sequence

from headrace.errors import HeadraceError
from headrace.ids import BlockName, Incarnation, Tier
from headrace.kvstore import wire
from headrace.kvstore.base import BlockMeta
from headrace.kvstore.checksum import digest
from headrace.kvstore.daemon.promoter import Place, Sink
from headrace.kvstore.daemon.pump import Lane, Pump
from headrace.kvstore.directory.index import PlaceIndex
from headrace.kvstore.directory.tasks import end
from headrace.kvstore.disk.health import Health
from headrace.kvstore.peer.control import (
    EVENTS,
    MAX_TICKET_BLOCKS,
    REPORT,
    RESERVE,
    SERVICE,
    PeerEvents,
    Report,
    Reserve,
    Ticket,
)
from headrace.kvstore.peer.stream import Pipe, SocketPipe, receive_slabs
from headrace.kvstore.workers import Workers
from headrace.rpc import Channel

log = logging.getLogger(__name__)
LONG_POLL_S = 1.0
ANSWER_S = 5.0
RETRY_S = 0.5
_QUEUE = {Lane.RESTORE: 256, Lane.DEMOTE: 0, Lane.PREFETCH: 64}
"""Tickets that may wait per lane."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    fingerprint: bytes
    token: str
    payload_bytes: int
    depth: int
    """Data connections to one peer at once."""
    timeout_s: float
    """Deadline of every step of a transfer; also what the owner may take to bring blocks up."""
    retry_s: float


@dataclasses.dataclass(slots=True)
class PeerTotals:
    """Since the start."""

    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    failures: int = 0
    checksum_failures: int = 0


class PeerNode:
    """One other node, as a source of promotions (promoter.Source). `open` and `close` on the loop."""

    here = False

    def __init__(
        self, name: str, address: str, settings: PeerSettings, wrap: Callable[[Pipe], Pipe] = lambda pipe: pipe
    ) -> None:
        """`address`: "host:port" of its control service."""
        self.name = name
        self.totals = PeerTotals()
        self.health = Health(retry_s=settings.retry_s)
        self.heard = (Incarnation(""), 0)
        """The owner's run and the newest of its events that is known here."""
        self._address = address
        self._settings = settings
        self._wrap = wrap
        self._index = PlaceIndex()
        self._pump = Pump(settings.depth, _QUEUE)
        self._workers = Workers(settings.depth, f"peer-{name}")
        self._channel: Channel | None = None
        self._follower: asyncio.Task[None] | None = None

    async def open(self) -> None:
        self._channel = Channel(self._address, SERVICE, self._settings.token)
        self._follower = asyncio.create_task(self._follow())

    async def close(self) -> None:
        if self._follower is not None:
            await end(self._follower)
        await self._pump.close()
        self._workers.close()
        if self._channel is not None:
            await self._channel.close()

    @property
    def idle(self) -> bool:
        return self._pump.idle

    def leading(self, names: Sequence[BlockName]) -> int:
        if not self.health.on:
            return 0
        found = self._index.lookup(names)
        return max(found.host_blocks.get(self.name, 0), found.stored_blocks.get(self.name, 0))

    def start(self, names: Sequence[BlockName], sink: Sink, lane: Lane) -> int:
        for first in range(0, len(names), MAX_TICKET_BLOCKS):
            part = names[first : first + MAX_TICKET_BLOCKS]
            if not self._pump.offer(lane, lambda part=part: self._fetch(part, sink)):  # type: ignore[misc]
                return first
        return len(names)

    def tick(self) -> None:
        # A peer that failed is simply tried again after the pause.
        if self.health.probe_due():
            self.health.probed(True)

    def values(self) -> dict[str, float]:
        totals = {f"peer_{key}_total": value for key, value in dataclasses.asdict(self.totals).items()}
        state = {"peer_on": float(self.health.on), "peer_known_blocks": float(len(self._index))}
        return {f"{key}{{peer={self.name}}}": float(value) for key, value in {**state, **totals}.items()}

    # --- what it has ------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        reported = ""
        while True:
            try:
                assert self._channel is not None
                incarnation, after = self.heard
                request = wire.EventsRequest(incarnation=incarnation, after=after, wait_s=LONG_POLL_S)
                message = PeerEvents(fingerprint=self._settings.fingerprint, request=request)
                events: wire.Events = await self._channel.call(EVENTS, message, LONG_POLL_S + ANSWER_S)
                self._index.apply(self.name, events)
                self.heard, reported = (events.incarnation, events.last), ""
            except HeadraceError as error:
                if str(error) != reported:
                    log.warning("peer %s: %s", self.name, error)
                    reported = str(error)
                self._index.forget(self.name)
                self.heard = (Incarnation(""), 0)
                await asyncio.sleep(RETRY_S)

    # --- fetching ---------------------------------------------------------------------------------------------------

    async def _fetch(self, names: Sequence[BlockName], sink: Sink) -> None:
        """One ticket. Every name ends in the sink."""
        transfer = _Batch(list(names), sink, self._settings.payload_bytes)
        try:
            await self._reserved(transfer)
            if transfer.places:
                await self._streamed(transfer)
                self.health.succeeded()
        except (HeadraceError, OSError) as error:
            self.totals.failures += 1
            log.warning("peer %s: %s", self.name, error or type(error).__name__)
            if self.health.failed(str(error)):
                log.error("peer %s is not asked for %s s", self.name, self._settings.retry_s)
        finally:
            wrong = transfer.settle()
        for name in wrong:
            self.totals.checksum_failures += 1
            await self._report(name)

    async def _reserved(self, transfer: "_Batch") -> None:
        assert self._channel is not None
        settings = self._settings
        request = Reserve(
            fingerprint=settings.fingerprint, names=wire.pack_names(transfer.names), wait_s=settings.timeout_s
        )
        ticket: Ticket = await self._channel.call(RESERVE, request, settings.timeout_s + ANSWER_S)
        transfer.begin(ticket)

    async def _streamed(self, transfer: "_Batch") -> None:
        began = time.monotonic()
        host = transfer.ticket.host or self._address.rpartition(":")[0].strip("[]")
        loop = asyncio.get_running_loop()

        def arrived(index: int, good: bool) -> None:
            loop.call_soon_threadsafe(self._arrived, transfer, index, good)

        await self._workers.start(
            lambda: _receive(transfer, (host, transfer.ticket.port), self._settings, self._wrap, arrived)
        )
        # What the thread has told the loop comes before its end.
        self.totals.seconds += time.monotonic() - began

    def _arrived(self, transfer: "_Batch", index: int, good: bool) -> None:
        place = transfer.places.pop(index)
        if good:
            self.totals.blocks += 1
            self.totals.bytes += self._settings.payload_bytes
            transfer.sink.done(place, transfer.digests[index], Tier.PEER)
        else:
            transfer.wrong.append(place.name)
            transfer.sink.failed(place)

    async def _report(self, name: BlockName) -> None:
        log.error("peer %s: block %s came with wrong bytes", self.name, name.hex()[:16])
        try:
            assert self._channel is not None
            message = Report(fingerprint=self._settings.fingerprint, name=name)
            await self._channel.call(REPORT, message, self._settings.timeout_s)
        except HeadraceError as error:
            log.info("peer %s: %s", self.name, error)


class _Batch:
    """The blocks of one ticket and where they go."""

    def __init__(self, names: list[BlockName], sink: Sink, slab_bytes: int) -> None:
        self.names = names
        self._slab_bytes = slab_bytes
        self.sink = sink
        self.ticket: Ticket
        self.digests: list[bytes] = []
        self.places: dict[int, Place] = {}
        """By index in the ticket: slots that wait for their bytes."""
        self.wrong: list[BlockName] = []
        self._begun = 0

    def begin(self, ticket: Ticket) -> None:
        """Take host slots for what the owner holds."""
        self.ticket = ticket
        self.digests = wire.unpack_digests(ticket.digests)
        parents, depths = wire.unpack_names(ticket.parents), wire.unpack_ints(ticket.depths)
        tenants = [ticket.tenants[i : i + 8] for i in range(0, len(ticket.tenants), 8)]
        wire.same_length(self.digests, parents, depths, tenants)
        for index, (parent, depth, tenant) in enumerate(zip(parents, depths, tenants)):
            whose = tenant if any(tenant) else b""
            meta = BlockMeta(
                self.names[index], None if parent == wire.NO_NAME else parent, depth, self._slab_bytes, whose
            )
            self._begun = index + 1
            place = self.sink.begin(meta)
            if place is not None:
                self.places[index] = place

    def settle(self) -> list[BlockName]:
        """The transfer is over, however it ended: no slot stays behind. Returns blocks that came with wrong bytes."""
        for place in self.places.values():
            self.sink.failed(place)
        self.places = {}
        for name in self.names[self._begun :]:
            self.sink.gave_up(name)
        return self.wrong


def _receive(
    transfer: _Batch,
    address: tuple[str, int],
    settings: PeerSettings,
    wrap: Callable[[Pipe], Pipe],
    arrived: Callable[[int, bool], None],
) -> None:
    """On a thread: dial, receive, check each digest. Raises OSError."""
    views = {index: place.view[: settings.payload_bytes] for index, place in transfer.places.items()}

    def check(index: int) -> bool:
        good = digest(views[index]) == transfer.digests[index]
        arrived(index, good)
        return good

    pipe = wrap(SocketPipe(socket.create_connection(address, settings.timeout_s), settings.timeout_s))
    try:
        receive_slabs(pipe, transfer.ticket.ticket, sorted(views), views.__getitem__, check)
    finally:
        pipe.close()
