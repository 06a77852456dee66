"""Messages between a node daemon and its clients, and their framing: u32 little-endian length, then
`headrace.messages.encode`. One request, one reply, in order. The first request is `Hello`, its reply `Welcome`.

Lists of names, digests and slots travel as one byte string each: a call about 2,048 blocks stays well below a
millisecond. An error is answered as `ErrorInfo`.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np

from headrace.errors import IncompatiblePeer
from headrace.ids import BlockName, Incarnation, SlotIndex, Tier
from headrace.kvstore.base import WriteSlot, ticket_of
from headrace.kvstore.checksum import DIGEST_BYTES
from headrace.kvstore.names import NAME_BYTES
from headrace.messages import message

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 64 << 20
NO_NAME = BlockName(bytes(NAME_BYTES))
"""Stands for a parent that is None."""
NO_SLOT = b"\xff" * 4
"""Slot -1 in a packed reply."""


@message
class Welcome:
    """The daemon takes the client in: where the arena is and how long a lease lives."""

    node: str
    incarnation: Incarnation
    """The daemon's."""
    fingerprint: bytes
    lease_s: float
    arena: str
    """Path of the shared-memory file."""
    slots: int
    slot_bytes: int
    lower_tiers: bool
    """Whether blocks can come up from below."""
    payload_bytes: int = 0
    """Bytes of a slot that a digest covers."""


@message
class Done:
    pass


@message
class Heartbeat:
    pass


@message
class Goodbye:
    """The client leaves and has stopped writing: its slots need no quarantine."""


@message
class Match:
    names: bytes


@message
class Count:
    value: int


@message
class Lease:
    names: bytes
    touch: bool = True
    """False: it is no use of the blocks (a check of their bytes)."""


@message
class LeaseLeading:
    """Match and lease in one call. Answered by a LeaseReply with one entry for each block of the leading run."""

    names: bytes


@message
class LeaseReply:
    """One entry a name; slot -1 where there is nothing to lease (its digest is zero bytes)."""

    slots: bytes
    digests: bytes
    tiers: bytes = b""
    """Index into TIERS a name; empty: all from the host tier."""


TIERS = (Tier.HOST, Tier.DISK, Tier.PEER)


@message
class Promote:
    names: bytes
    urgent: bool
    """A request waits for it."""


@message
class ComingReply:
    ready: int
    coming: int


@message
class Release:
    names: bytes


@message
class BeginPut:
    names: bytes
    parents: bytes
    depths: bytes
    tenant: bytes = b""


@message
class Slots:
    slots: bytes
    """Slot or PutOutcome, one a block."""
    tickets: bytes
    """Which write of that slot it is; commit and abort must name it. 0 where no slot was given."""


@message
class CommitPut:
    names: bytes
    slots: bytes
    tickets: bytes
    digests: bytes
    keep_lease: bool


@message
class AbortPut:
    names: bytes
    slots: bytes
    tickets: bytes


@message
class Drop:
    names: bytes
    corrupt: bool = False
    """Their bytes are not what was written."""


@message
class Pin:
    """Answered with the Count of blocks that are kept."""

    names: bytes
    seconds: float


@message
class Unpin:
    """Answered with the Count of pins that ended."""

    names: bytes


@message
class SetQuota:
    """Answered with the Count of blocks the tenant has."""

    tenant: bytes
    blocks: int
    """-1: the configured default."""


@message
class ListBlocks:
    """Up to `limit` visible blocks of the host tier with a name above `after`, by name. Answered with BlockList."""

    after: bytes
    limit: int


@message
class BlockList:
    """Parallel lists, one entry a block."""

    names: bytes
    slots: bytes
    depths: bytes
    leases: bytes
    tenants: tuple[bytes, ...]


@message
class Announce:
    added: bytes
    removed: bytes


@message
class EventsRequest:
    """What happened after event `after` of daemon `incarnation`? Waits up to `wait_s` if nothing did. An unknown
    incarnation or a forgotten `after` is answered with a snapshot."""

    incarnation: Incarnation
    after: int
    wait_s: float


@message
class PlaceChange:
    """One place is the daemon's host tier ("host") or a rank's device tier (the rank's name)."""

    place: str
    added: bytes
    removed: bytes
    gone: bool = False
    """The place and all it held has ended."""


@message
class Events:
    incarnation: Incarnation
    last: int
    """Number of the newest event included."""
    snapshot: bool
    """True: `changes` is everything there is; forget the rest of this node."""
    changes: tuple[PlaceChange, ...]


def pack_names(names: Iterable[BlockName]) -> bytes:
    return b"".join(names)


def unpack_names(data: bytes) -> list[BlockName]:
    return cast(list[BlockName], _pieces(data, NAME_BYTES, "block names"))


def pack_ints(values: Sequence[int]) -> bytes:
    return np.asarray(values, dtype="<i4").tobytes()


def unpack_ints(data: bytes) -> list[int]:
    if len(data) % 4:
        raise IncompatiblePeer(f"{len(data)} bytes are not whole i32 numbers")
    numbers: list[int] = np.frombuffer(data, dtype="<i4").tolist()
    return numbers


def unpack_slots(data: bytes) -> list[SlotIndex]:
    return cast(list[SlotIndex], unpack_ints(data))


def pack_tickets(slots: Iterable[int]) -> bytes:
    return pack_ints([ticket_of(slot) for slot in slots])


def unpack_writes(slots: bytes, tickets: bytes) -> list[int]:
    """WriteSlots, and PutOutcomes as they are. Raises IncompatiblePeer if the lists have different lengths."""
    numbers, given = unpack_ints(slots), unpack_ints(tickets)
    same_length(numbers, given)
    return [slot if slot < 0 else WriteSlot(slot, ticket) for slot, ticket in zip(numbers, given)]


def unpack_digests(data: bytes) -> list[bytes]:
    return _pieces(data, DIGEST_BYTES, "digests")


def _pieces(data: bytes, size: int, what: str) -> list[bytes]:
    if len(data) % size:
        raise IncompatiblePeer(f"{len(data)} bytes are not whole {what}")
    # numpy cuts a long string five times as fast as slices do.
    pieces: list[bytes] = np.frombuffer(data, dtype=f"V{size}").tolist()
    return pieces


def same_length(*lists: Sequence[object]) -> None:
    """Raises IncompatiblePeer unless all parallel lists of a request have one length."""
    if len({len(items) for items in lists}) > 1:
        raise IncompatiblePeer(f"parallel lists of lengths {', '.join(str(len(items)) for items in lists)}")
