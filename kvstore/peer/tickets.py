"""What this node holds for readers of other nodes. Pure: called on the daemon's loop, drives the host tier."""

import dataclasses
import secrets
import time
from collections.abc import Callable, Sequence

from headrace.ids import BlockName, Incarnation
from headrace.kvstore.host_tier import HostTier
from headrace.kvstore.peer.control import MAX_TICKET_BLOCKS, TICKET_BYTES
from headrace.kvstore.residents import Resident

UNUSED_S = 5.0
"""How long a ticket waits for its data connection."""


@dataclasses.dataclass(slots=True)
class Reservation:
    blocks: list[Resident]
    until_s: float
    streaming: bool = False


class Tickets:
    """Each ticket holds a read lease on its blocks from `reserve` to `finish`, or until its time is over unused."""

    def __init__(self, host: HostTier, owner: Incarnation, clock: Callable[[], float] = time.monotonic) -> None:
        """`owner`: an attached client of the host tier, renewed by the caller."""
        self._host = host
        self._owner = owner
        self._clock = clock
        self._open: dict[bytes, Reservation] = {}
        self.expired = 0

    def __len__(self) -> int:
        return len(self._open)

    def reserve(self, names: Sequence[BlockName]) -> tuple[bytes, list[Resident]]:
        """A ticket for the leading run of names (at most MAX_TICKET_BLOCKS); no ticket if that is empty."""
        run = self._host.lease_leading(self._owner, names[:MAX_TICKET_BLOCKS])
        if not run:
            return b"", []
        ticket = secrets.token_bytes(TICKET_BYTES)
        self._open[ticket] = Reservation(run, self._clock() + UNUSED_S)
        return ticket, run

    def claim(self, ticket: bytes) -> list[Resident] | None:
        """A data connection came with it; None if it is unknown, used or too old."""
        found = self._open.get(ticket)
        if found is None or found.streaming or found.until_s <= self._clock():
            return None
        found.streaming = True
        return found.blocks

    def finish(self, ticket: bytes) -> None:
        """Nothing reads its blocks any more."""
        gone = self._open.pop(ticket, None)
        if gone is not None:
            self._host.release(self._owner, [resident.meta.name for resident in gone.blocks])

    def tick(self) -> None:
        now = self._clock()
        for ticket in [t for t, r in self._open.items() if not r.streaming and r.until_s <= now]:
            self.expired += 1
            self.finish(ticket)
