"""Messages between node daemons. The service is gRPC with the service's token; lists travel as in `kvstore.wire`."""

from headrace.kvstore.wire import EventsRequest
from headrace.messages import message

SERVICE = "headrace.Peer"
EVENTS, RESERVE, REPORT = "Events", "Reserve", "Report"
MAX_TICKET_BLOCKS = 64
"""Blocks of one ticket: so many slots of the owner are held for one reader at most."""
TICKET_BYTES = 16


@message
class PeerEvents:
    """As an EventsRequest over the Unix socket, from a node of this fingerprint."""

    fingerprint: bytes
    request: EventsRequest


@message
class Reserve:
    """Hold the leading run of these blocks for a transfer. What lies on the owner's disk is brought up first, as far as
    that takes no longer than `wait_s`."""

    fingerprint: bytes
    names: bytes
    wait_s: float


@message
class Ticket:
    """Good for one data connection within a few seconds. One entry a block in each list; none: the owner has not even
    the first."""

    ticket: bytes
    host: str
    """Where the data connection goes; empty: the host that was asked."""
    port: int
    parents: bytes
    depths: bytes
    digests: bytes
    tenants: bytes
    """8 bytes each, zero: nobody's."""


@message
class Report:
    """This block arrived with wrong bytes: check yours."""

    fingerprint: bytes
    name: bytes
