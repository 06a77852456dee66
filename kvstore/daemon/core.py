"""What the node daemon does with each request: sessions, host tier, event log. Pure: the server (`server.py`) brings
messages, the fake client (`kvstore/fake.py`) calls it directly. Single-threaded.
"""

import asyncio
import dataclasses
import heapq
import logging
from collections.abc import Callable, Sequence
from typing import Any

from headrace.errors import HeadraceError, IncompatiblePeer
from headrace.ids import BlockName, Incarnation, Role, SlotIndex, Tier
from headrace.kvstore import wire
from headrace.kvstore.checksum import DIGEST_BYTES
from headrace.kvstore.daemon.events import HOST_PLACE, EventLog
from headrace.kvstore.daemon.journal import Journal
from headrace.kvstore.daemon.lower import LowerTiers
from headrace.kvstore.daemon.peers import PeerProcess
from headrace.kvstore.host_tier import HostTier
from headrace.kvstore.pins import Pins
from headrace.kvstore.quotas import TENANT_BYTES
from headrace.kvstore.residents import Resident
from headrace.messages import BoxStatus, ErrorInfo, FlushDone, FlushRequest, Hello, StatusRequest

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What a daemon tells its clients about itself."""

    node: str
    incarnation: Incarnation
    fingerprint: bytes
    lease_s: float
    arena: str
    slots: int
    slot_bytes: int
    payload_bytes: int = 0
    lower_tiers: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class Session:
    """One connection after its Hello. `place` is set by its first announcement."""

    name: str
    role: str
    owner: Incarnation
    peer: PeerProcess
    stores: bool
    """Whether it leases and writes; routers and tools only look."""
    place: str = ""
    open: bool = True


_NO_DIGEST = bytes(DIGEST_BYTES)
LOOKER_ROLES = ("router", "tool")
MAX_LISTED = 4096
"""Blocks of one answer to ListBlocks."""


class StoreCore:
    """`on_change` is called when new events are in the log."""

    def __init__(
        self,
        facts: NodeFacts,
        tier: HostTier,
        on_change: Callable[[], None] = lambda: None,
        lower: LowerTiers | None = None,
    ) -> None:
        self.facts = facts
        self.tier = tier
        self.pins = Pins(tier, tier.clock)
        self.lower = lower
        self.events = EventLog(facts.incarnation, sources={HOST_PLACE: tier.visible})
        self.on_change = on_change
        self._journal: Journal | None = None
        self.constants: dict[str, float] = {"host_bytes": float(facts.slots * facts.slot_bytes)}
        """Values that do not change: sizes of what the node owns."""
        self._sessions: list[Session] = []
        self._handlers: dict[type[Any], Callable[[Session, Any], Any]] = {
            wire.Heartbeat: self._heartbeat,
            wire.Match: self._match,
            wire.Lease: self._lease,
            wire.LeaseLeading: self._lease_leading,
            wire.Promote: self._promote,
            wire.Release: self._release,
            wire.BeginPut: self._begin_put,
            wire.CommitPut: self._commit_put,
            wire.AbortPut: self._abort_put,
            wire.Drop: self._drop,
            wire.Pin: self._pin,
            wire.Unpin: self._unpin,
            wire.SetQuota: self._set_quota,
            wire.ListBlocks: self._list_blocks,
            wire.Announce: self._announce,
            wire.EventsRequest: self._events_since,
            StatusRequest: self._status,
            FlushRequest: self._flush,
        }

    def record(self, journal: Journal) -> None:
        """Write what happens from now on into `journal`, which the caller closes."""
        self._journal = journal
        self.tier.on_gone.append(journal.gone)

    # --- sessions ---------------------------------------------------------------------------------------------------

    def open(self, hello: Hello, peer: PeerProcess) -> tuple[Session, wire.Welcome]:
        """Raises IncompatiblePeer if the other side names blocks, weighs or lays out slabs differently. Who only looks
        may come without a fingerprint."""
        looks = hello.role in LOOKER_ROLES
        if hello.fingerprint != self.facts.fingerprint and (hello.fingerprint or not looks):
            raise IncompatiblePeer(
                f"{hello.name} has fingerprint {hello.fingerprint.hex()[:16]}, this node "
                f"{self.facts.fingerprint.hex()[:16]}: naming, weights or slab layout differ"
            )
        if any(s.stores and s.owner == hello.incarnation for s in self._sessions):
            raise IncompatiblePeer(f"{hello.name} {hello.incarnation} is attached twice")
        session = Session(hello.name, hello.role, hello.incarnation, peer, not looks)
        if session.stores:
            self.tier.attach(session.owner)
            if self._journal is not None:
                self._journal.member(session.name, session.role, joined=True)
        self._sessions.append(session)
        return session, wire.Welcome(**dataclasses.asdict(self.facts))

    def close(self, session: Session, *, clean: bool) -> None:
        """The connection ended; `clean` after a Goodbye. Its leases and its announcements end with it."""
        if not session.open:
            return
        session.open = False
        self._sessions.remove(session)
        if session.stores:
            self.tier.detach(session.owner, None if clean else self._writers(session))
            if self._journal is not None:
                self._journal.member(session.name, session.role, joined=False)
        others = any(s.place == session.place for s in self._sessions)
        if session.place and not others and self.events.end(session.place):
            self.on_change()

    def tick(self) -> list[Session]:
        """Regular upkeep; returns sessions whose lease ended: the server closes their connections."""
        self.pins.tick()
        if self.lower is not None:
            self.lower.tick()
        expired = set(self.tier.tick())
        self._publish()
        if self._journal is not None:
            self._journal.flush()
        return [s for s in self._sessions if s.stores and s.owner in expired]

    def handle(self, session: Session, request: Any) -> Any:
        """The reply to one request; errors of the tree become ErrorInfo."""
        handler = self._handlers.get(type(request))
        if handler is None:
            return ErrorInfo(kind=IncompatiblePeer.__name__, text=f"a node daemon takes no {type(request).__name__}")
        try:
            if session.stores:
                self.tier.renew(session.owner)
            reply = handler(session, request)
        except HeadraceError as error:
            return ErrorInfo(kind=error.kind, text=str(error))
        except ValueError as error:
            return ErrorInfo(kind=IncompatiblePeer.__name__, text=str(error))
        self._publish()
        return reply

    def values(self) -> dict[str, float]:
        """Gauges and counters by name; device tiers as far as ranks announced them."""
        values = {f"host_{name}": float(value) for name, value in self.tier.stats().items()}
        values |= {f"host_{name}": value for name, value in self.pins.stats().items()}
        values.update(self.constants)
        for place in self.events.places():
            if place != HOST_PLACE:
                values[f"device_blocks{{rank={place}}}"] = float(self.events.held(place))
        if self.lower is not None:
            values |= self.lower.values()
        values["events_total"] = float(self.events.last)
        values["sessions"] = float(len(self._sessions))
        return values

    def _writers(self, gone: Session) -> Callable[[], bool]:
        """Whether a process may still write into slots of a session that broke off: its own, or another rank of its
        group (same name), to which a leader deals writes. A process that has ended or dialled again may not."""
        attached = [s for s in self._sessions if s.name == gone.name and s.stores]
        watched = [peer.copy() for peer in {p.pid: p for p in (gone.peer, *(s.peer for s in attached))}.values()]
        before = set(map(id, attached))

        def may_write() -> bool:
            fresh = {s.peer.pid for s in self._sessions if s.name == gone.name and id(s) not in before}
            writing = [p for p in watched if p.pid not in fresh and p.alive()]
            if not writing:
                for process in watched:
                    process.close()
            return bool(writing)

        return may_write

    def _publish(self) -> None:
        news = False
        if self.tier.changes:
            added, removed = self.tier.changes.take()
            news = self.events.change(HOST_PLACE, added, removed)
        if self.lower is not None:
            news |= self.lower.publish(self.events)
        if news:
            self.on_change()

    # --- requests ---------------------------------------------------------------------------------------------------

    def _heartbeat(self, session: Session, request: wire.Heartbeat) -> wire.Done:
        return wire.Done()

    def _match(self, session: Session, request: wire.Match) -> wire.Count:
        names = wire.unpack_names(request.names)
        count = self.tier.match(names)
        self._note_read(session, names, count)
        return wire.Count(value=count)

    def _lease(self, session: Session, request: wire.Lease) -> wire.LeaseReply:
        names = wire.unpack_names(request.names)
        if request.touch:
            found = self.tier.lease(session.owner, names)
            self._note_read(session, names, len(found) - found.count(None))
        else:
            found = [self.tier.pin(session.owner, name) for name in names]
        return wire.LeaseReply(
            slots=wire.pack_ints([-1 if r is None else r.slot for r in found]),
            digests=b"".join([_NO_DIGEST if r is None else r.digest for r in found]),
            tiers=self._tiers(session, found),
        )

    def _lease_leading(self, session: Session, request: wire.LeaseLeading) -> wire.LeaseReply:
        names = wire.unpack_names(request.names)
        run = self.tier.lease_leading(session.owner, names)
        self._note_read(session, names, len(run))
        return wire.LeaseReply(
            slots=wire.pack_ints([r.slot for r in run]),
            digests=b"".join([r.digest for r in run]),
            tiers=self._tiers(session, run),
        )

    def _tiers(self, session: Session, leased: Sequence[Resident | None]) -> bytes:
        if self.lower is None:
            return b""
        names = [resident.name for resident in leased if resident is not None]
        came = self.lower.leased(names)
        if session.role != Role.DECODE:
            # A decode rank fetches what a prefill has just used.
            self._used(names)
        if not came:
            return b""
        return bytes(wire.TIERS.index(came.get(r.name, Tier.HOST) if r else Tier.HOST) for r in leased)

    def _used(self, names: list[BlockName]) -> None:
        """Tell the lower tiers once the reply is on its way: a long prompt takes them a millisecond."""
        assert self.lower is not None
        asyncio.get_running_loop().call_soon(self.lower.used, names)

    def _promote(self, session: Session, request: wire.Promote) -> wire.ComingReply:
        names = wire.unpack_names(request.names)
        if self.lower is None:
            return wire.ComingReply(ready=self.tier.match(names), coming=0)
        ready, coming = self.lower.promote(names, urgent=request.urgent)
        return wire.ComingReply(ready=ready, coming=coming)

    def _note_read(self, session: Session, names: list[BlockName], hit: int) -> None:
        if self._journal is not None and session.stores and names:
            self._journal.read(session.name, session.role, names, hit)

    def _release(self, session: Session, request: wire.Release) -> wire.Done:
        self.tier.release(session.owner, wire.unpack_names(request.names))
        return wire.Done()

    def _begin_put(self, session: Session, request: wire.BeginPut) -> wire.Slots:
        names, parents = wire.unpack_names(request.names), wire.unpack_names(request.parents)
        depths = wire.unpack_ints(request.depths)
        wire.same_length(names, parents, depths)
        _check_put(names, parents, depths, request.tenant)
        blocks: list[tuple[BlockName, BlockName | None, int]] = [
            (name, None if parent == wire.NO_NAME else parent, depth)
            for name, parent, depth in zip(names, parents, depths)
        ]
        slots = self.tier.begin_put(session.owner, blocks, request.tenant)
        return wire.Slots(slots=wire.pack_ints(slots), tickets=wire.pack_tickets(slots))

    def _commit_put(self, session: Session, request: wire.CommitPut) -> wire.Done:
        names, slots = wire.unpack_names(request.names), _write_slots(request)
        digests = wire.unpack_digests(request.digests)
        wire.same_length(names, slots, digests)
        writes: list[tuple[BlockName, SlotIndex, bytes]] = list(zip(names, slots, digests))
        self.tier.commit_put(session.owner, writes, keep_lease=request.keep_lease)
        if self._journal is not None and names:
            first = next((r for r in self.tier.find(names[:1]) if r is not None), None)
            self._journal.put(session.name, session.role, first.meta.parent if first else None, names)
        if self.lower is not None:
            self._used(names)
        return wire.Done()

    def _abort_put(self, session: Session, request: wire.AbortPut) -> wire.Done:
        names, slots = wire.unpack_names(request.names), _write_slots(request)
        wire.same_length(names, slots)
        self.tier.abort_put(session.owner, list(zip(names, slots)))
        return wire.Done()

    def _drop(self, session: Session, request: wire.Drop) -> wire.Done:
        names = wire.unpack_names(request.names)
        self.pins.unpin(names)
        self.tier.drop(names, corrupt=request.corrupt)
        if self.lower is not None:
            self.lower.drop(names)
        return wire.Done()

    def _pin(self, session: Session, request: wire.Pin) -> wire.Count:
        return wire.Count(value=self.pins.pin(wire.unpack_names(request.names), request.seconds))

    def _unpin(self, session: Session, request: wire.Unpin) -> wire.Count:
        return wire.Count(value=self.pins.unpin(wire.unpack_names(request.names)))

    def _set_quota(self, session: Session, request: wire.SetQuota) -> wire.Count:
        blocks = None if request.blocks < 0 else request.blocks
        return wire.Count(value=self.tier.set_quota(request.tenant, blocks))

    def _list_blocks(self, session: Session, request: wire.ListBlocks) -> wire.BlockList:
        above = (r for r in self.tier.blocks() if r.name > request.after)
        found = heapq.nsmallest(min(request.limit, MAX_LISTED), above, key=lambda r: r.name)
        return wire.BlockList(
            names=wire.pack_names(r.name for r in found),
            slots=wire.pack_ints([r.slot for r in found]),
            depths=wire.pack_ints([r.depth for r in found]),
            leases=wire.pack_ints([r.refs for r in found]),
            tenants=tuple(r.tenant for r in found),
        )

    def _announce(self, session: Session, request: wire.Announce) -> wire.Done:
        session.place = session.name
        if self.events.change(session.place, wire.unpack_names(request.added), wire.unpack_names(request.removed)):
            self.on_change()
        return wire.Done()

    def _events_since(self, session: Session, request: wire.EventsRequest) -> wire.Events:
        return self.events.since(request.incarnation, request.after)

    def _status(self, session: Session, request: StatusRequest) -> BoxStatus:
        return BoxStatus(name=self.facts.node, incarnation=self.facts.incarnation, ready=True, values=self.values())

    def _flush(self, session: Session, request: FlushRequest) -> FlushDone:
        flushed = self.tier.flush()
        return FlushDone(blocks=flushed + (self.lower.flush() if self.lower is not None else 0))


def _write_slots(request: wire.CommitPut | wire.AbortPut) -> list[SlotIndex]:
    return [SlotIndex(slot) for slot in wire.unpack_writes(request.slots, request.tickets)]


def _check_put(names: Sequence[BlockName], parents: Sequence[BlockName], depths: Sequence[int], tenant: bytes) -> None:
    """Raises ValueError for what no tier below, no other node and no eviction could deal with."""
    if len(tenant) not in (0, TENANT_BYTES):
        raise ValueError(f"a tenant is an id of {TENANT_BYTES} bytes or empty, not {len(tenant)} bytes")
    if depths and min(depths) < 0:
        raise ValueError(f"the depth of a block is 0 or more, not {min(depths)}")
    for name, parent in zip(names, parents):
        if name == parent:
            raise ValueError(f"block {name.hex()} names itself as its parent")
