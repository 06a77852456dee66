"""The owner's side: gives tickets over gRPC and streams slabs out of the arena. Runs on the daemon's loop; the streams
run on threads."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import Any

from headrace.errors import ConfigError, HeadraceError, IncompatiblePeer
from headrace.ids import BlockName
from headrace.kvstore import wire
from headrace.kvstore.checksum import digest
from headrace.kvstore.daemon.core import StoreCore
from headrace.kvstore.peer.control import EVENTS, REPORT, RESERVE, SERVICE, PeerEvents, Report, Reserve, Ticket
from headrace.kvstore.peer.stream import Pipe, SocketPipe, read_opening, send_slabs
from headrace.kvstore.peer.tickets import Tickets
from headrace.kvstore.workers import Workers
from headrace.messages import ErrorInfo
from headrace.rpc import server

log = logging.getLogger(__name__)
STREAMS = 8
"""Data connections that are served at once; more wait."""
BACKLOG = 64
MAX_OPEN = 256
"""Data connections that are served or wait; more are closed at once."""
ACCEPT_PAUSE_S = 0.1
POLL_S = 0.02
MAX_WAIT_S = 30.0
_NO_TENANT = bytes(8)
NO_TICKET = Ticket(ticket=b"", host="", port=0, parents=b"", depths=b"", digests=b"", tenants=b"")


class PeerOwner:
    """`start` and `close` on the loop that runs `core`."""

    def __init__(
        self,
        core: StoreCore,
        slot_view: Callable[[int], memoryview],
        *,
        listen: str,
        token: str,
        timeout_s: float,
        wrap: Callable[[Pipe], Pipe] = lambda pipe: pipe,
    ) -> None:
        """`listen`: "host:port" of the control service; the data connections get a free port of the same host.
        `timeout_s`: deadline of each send and receive. `wrap`: for faults."""
        self.port = 0
        self.streams = self.failures = self.sent_bytes = self.wrong = 0
        self._core, self._slot_view = core, slot_view
        self._payload_bytes = core.facts.payload_bytes
        self._host, _, self._wanted_port = listen.rpartition(":")
        self._timeout_s, self._wrap = timeout_s, wrap
        assert core.lower is not None
        self.tickets = Tickets(core.tier, core.lower.owner)
        handlers: dict[str, Any] = {EVENTS: self._events, RESERVE: self._reserve, REPORT: self._report}
        self._grpc = server(SERVICE, token, unary={name: _answering(handler) for name, handler in handlers.items()})
        self._workers = Workers(STREAMS, "peer-out")
        self._listener = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET)
        self._accepting: asyncio.Task[None] | None = None
        self._open: set[socket.socket] = set()

    async def start(self) -> None:
        """Raises ConfigError when the address cannot be had."""
        address = f"{self._host}:{self._wanted_port}"
        try:
            self.port = self._grpc.add_insecure_port(address)
            self._listener.bind((self._host.strip("[]"), 0))
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"store.peer_listen: cannot listen at {address}: {error}") from error
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        await self._grpc.start()
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
        self._listener.close()
        for connection in self._open:
            with contextlib.suppress(OSError):  # Reset by its other end, or closed by its thread just now.
                connection.shutdown(socket.SHUT_RDWR)
        await self._grpc.stop(0)
        self._workers.close()

    def tick(self) -> None:
        self.tickets.tick()

    def values(self) -> dict[str, float]:
        return {
            "peer_out_tickets": float(len(self.tickets)),
            "peer_out_tickets_expired_total": float(self.tickets.expired),
            "peer_out_streams_total": float(self.streams),
            "peer_out_failures_total": float(self.failures),
            "peer_out_bytes_total": float(self.sent_bytes),
            "peer_out_wrong_total": float(self.wrong),
        }

    # --- control ----------------------------------------------------------------------------------------------------

    async def _events(self, message: PeerEvents) -> Any:
        self._check(message.fingerprint)
        request, events = message.request, self._core.events
        end = asyncio.get_running_loop().time() + min(request.wait_s, MAX_WAIT_S)
        while (request.incarnation, request.after) == (events.incarnation, events.last):
            if asyncio.get_running_loop().time() >= end:
                break
            await asyncio.sleep(POLL_S)
        return events.since(request.incarnation, request.after)

    async def _reserve(self, message: Reserve) -> Ticket:
        self._check(message.fingerprint)
        names, lower = wire.unpack_names(message.names), self._core.lower
        assert lower is not None
        end = asyncio.get_running_loop().time() + min(message.wait_s, MAX_WAIT_S)
        while lower.promote(names, urgent=True, here_only=True).coming and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(POLL_S / 4)
        ticket, run = self.tickets.reserve(names)
        if not run:
            return NO_TICKET
        lower.leased([resident.meta.name for resident in run])
        metas = [resident.meta for resident in run]
        return Ticket(
            ticket=ticket,
            host="",
            port=self._listener.getsockname()[1],
            parents=wire.pack_names(meta.parent or wire.NO_NAME for meta in metas),
            depths=wire.pack_ints([meta.depth for meta in metas]),
            digests=b"".join(resident.digest for resident in run),
            tenants=b"".join(meta.tenant or _NO_TENANT for meta in metas),
        )

    async def _report(self, message: Report) -> wire.Done:
        """A reader got wrong bytes: if they are wrong here, nobody shall read them again."""
        self._check(message.fingerprint)
        name, lower, tier = BlockName(message.name), self._core.lower, self._core.tier
        assert lower is not None
        resident = tier.pin(lower.owner, name)
        if resident is not None:
            payload = self._slot_view(resident.slot)[: self._payload_bytes]
            true = await self._workers.start(lambda: digest(payload))
            tier.release(lower.owner, [name])
            if true != resident.digest and tier.find([name])[0] is resident:
                self.wrong += 1
                log.error("block %s is not what was written; it is dropped", name.hex()[:16])
                tier.drop([name], corrupt=True)
        return wire.Done()

    def _check(self, fingerprint: bytes) -> None:
        if fingerprint != self._core.facts.fingerprint:
            raise IncompatiblePeer(
                f"this node has fingerprint {self._core.facts.fingerprint.hex()[:16]}, the peer "
                f"{fingerprint.hex()[:16]}: naming, weights or slab layout differ"
            )

    # --- data -------------------------------------------------------------------------------------------------------

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                # No descriptors left, or the caller is gone already. The next one may fare better.
                log.warning("a data connection was not accepted: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if len(self._open) >= MAX_OPEN:
                connection.close()
                continue
            connection.setblocking(True)
            self._open.add(connection)
            self._workers.start(lambda taken=connection: self._stream(taken, loop))  # type: ignore[misc]

    def _stream(self, connection: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        """On a thread: one data connection from its opening to its end."""
        ticket, sent, failed = b"", 0, ""
        pipe = self._wrap(SocketPipe(connection, self._timeout_s))
        try:
            ticket, wanted = read_opening(pipe)
            claimed = asyncio.run_coroutine_threadsafe(self._claim(ticket), loop).result()
            if claimed is None or any(index >= len(claimed) for index in wanted):
                raise ConnectionError("unknown, used or expired ticket")
            views = [self._slot_view(resident.slot)[: self._payload_bytes] for resident in claimed]
            sent = send_slabs(pipe, wanted, views.__getitem__)
        except OSError as error:
            failed = str(error) or type(error).__name__
        finally:
            pipe.close()
            loop.call_soon_threadsafe(self._ended, connection, ticket, sent, failed)

    async def _claim(self, ticket: bytes) -> Any:
        return self.tickets.claim(ticket)

    def _ended(self, connection: socket.socket, ticket: bytes, sent: int, failed: str) -> None:
        self._open.discard(connection)
        self.tickets.finish(ticket)
        self.streams += 1
        self.sent_bytes += sent
        if failed:
            self.failures += 1
            log.info("a stream of slabs ended early: %s", failed)


def _answering(handler: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Errors of the tree become ErrorInfo, as on the Unix socket."""

    async def answer(message: Any, _context: Any) -> Any:
        try:
            return await handler(message)
        except HeadraceError as error:
            return ErrorInfo(kind=error.kind, text=str(error))
        except ValueError as error:
            return ErrorInfo(kind=IncompatiblePeer.__name__, text=str(error))

    return answer
