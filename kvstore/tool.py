"""What tools do with a node daemon: look, check digests, flush, pin, limit. Blocking; one user at a time; no torch."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from headrace.errors import DaemonUnavailable
from headrace.ids import BlockName, Incarnation, SlotIndex, new_incarnation
from headrace.kvstore import wire
from headrace.kvstore.arena import Arena
from headrace.kvstore.checksum import digest
from headrace.kvstore.connection import Connection, socket_path
from headrace.kvstore.names import namespace, tenant_id
from headrace.messages import BoxStatus, FlushDone, FlushRequest, Hello, StatusRequest

CALL_TIMEOUT_S = 30.0
PAGE_BLOCKS = 1024
VERIFY_BLOCKS = 32
"""Blocks that are leased at once while their bytes are checked."""


@dataclasses.dataclass(frozen=True, slots=True)
class ListedBlock:
    name: BlockName
    slot: SlotIndex
    depth: int
    leases: int
    tenant: bytes


@dataclasses.dataclass(slots=True)
class Verdict:
    """What `verify` found. A corrupt block has been dropped: whoever needs it recomputes it."""

    checked: int = 0
    bytes: int = 0
    gone: int = 0
    """Blocks that left the tier before their turn came."""
    corrupt: list[BlockName] = dataclasses.field(default_factory=list)


class StoreTool:
    """One connection to one daemon. Close it. Raises DaemonUnavailable like a client."""

    def __init__(self, endpoint: str) -> None:
        self._path = socket_path(endpoint)
        self._looks = self._dial("tool", b"")
        self.welcome = self._looks.welcome

    def values(self) -> dict[str, float]:
        """Gauges and counters of the daemon."""
        status: BoxStatus = self._looks.call(StatusRequest())
        return status.values

    def blocks(self) -> Iterator[ListedBlock]:
        """Visible blocks of the host tier, by name. What comes and goes meanwhile may be missing."""
        after = b""
        while True:
            page: wire.BlockList = self._looks.call(wire.ListBlocks(after=after, limit=PAGE_BLOCKS))
            names = wire.unpack_names(page.names)
            yield from map(
                ListedBlock, names, wire.unpack_slots(page.slots), wire.unpack_ints(page.depths),
                wire.unpack_ints(page.leases), page.tenants,
            )  # fmt: skip
            if len(names) < PAGE_BLOCKS:
                return
            after = names[-1]

    def places(self) -> dict[str, list[BlockName]]:
        """What the node told directories: place ("host", "disk", a rank's name) -> its blocks, by name."""
        request = wire.EventsRequest(incarnation=Incarnation(""), after=0, wait_s=0.0)
        events: wire.Events = self._looks.call(request)
        return {change.place: sorted(wire.unpack_names(change.added)) for change in events.changes}

    def flush(self) -> int:
        """Drop every block that nothing holds; how many."""
        done: FlushDone = self._looks.call(FlushRequest())
        return done.blocks

    def verify(self) -> Verdict:
        """Check the digest of every block of the host tier. Blocks are leased meanwhile, which is no use of them."""
        verdict = Verdict()
        # Only who may lease can keep a slot from being reused under the check.
        reader = self._dial("verifier", self.welcome.fingerprint)
        arena = None
        try:
            welcome = reader.welcome
            try:
                arena = Arena.attach(
                    Path(welcome.arena), slots=welcome.slots, slot_bytes=welcome.slot_bytes, owner=welcome.incarnation
                )
            except OSError as error:
                raise DaemonUnavailable(f"cannot map {welcome.arena}: {error.strerror}") from error
            batch: list[BlockName] = []
            for block in self.blocks():
                batch.append(block.name)
                if len(batch) == VERIFY_BLOCKS:
                    _verify(reader, arena, batch, verdict)
                    batch = []
            _verify(reader, arena, batch, verdict)
            reader.call(wire.Goodbye())
        finally:
            reader.close()
            if arena is not None:
                arena.close()
        return verdict

    def pin(self, names: Sequence[BlockName], seconds: float) -> int:
        count: int = self._looks.call(wire.Pin(names=wire.pack_names(names), seconds=seconds)).value
        return count

    def unpin(self, names: Sequence[BlockName]) -> int:
        count: int = self._looks.call(wire.Unpin(names=wire.pack_names(names))).value
        return count

    def set_quota(self, tenant: bytes, blocks: int | None) -> int:
        count: int = self._looks.call(wire.SetQuota(tenant=tenant, blocks=-1 if blocks is None else blocks)).value
        return count

    def tenant(self, salt: bytes) -> bytes:
        """Id of the tenant with this salt in the accounts of this daemon's model."""
        return tenant_id(namespace(self.welcome.fingerprint, salt))

    def close(self) -> None:
        self._looks.close()

    def _dial(self, role: str, fingerprint: bytes) -> Connection:
        hello = Hello(name=role, role=role, incarnation=new_incarnation(), fingerprint=fingerprint)
        return Connection(self._path, hello, CALL_TIMEOUT_S)


def _verify(reader: Connection, arena: Arena, names: list[BlockName], verdict: Verdict) -> None:
    if not names:
        return
    reply: wire.LeaseReply = reader.call(wire.Lease(names=wire.pack_names(names), touch=False))
    held, corrupt = [], []
    for name, slot, wanted in zip(names, wire.unpack_slots(reply.slots), wire.unpack_digests(reply.digests)):
        if slot < 0:
            verdict.gone += 1
            continue
        held.append(name)
        payload = arena.slot(slot)[: reader.welcome.payload_bytes]
        verdict.checked += 1
        verdict.bytes += payload.nbytes
        if digest(payload) != wanted:
            corrupt.append(name)
    if corrupt:
        reader.call(wire.Drop(names=wire.pack_names(corrupt), corrupt=True))
        verdict.corrupt += corrupt
    reader.call(wire.Release(names=wire.pack_names(held)))
