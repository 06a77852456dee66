"""What a rank uses to reach its node daemon: `base.StoreClient` over a Unix socket, with the arena mapped."""

import contextlib
import logging
import threading
import time
from pathlib import Path
from typing import Any

from headrace.errors import DaemonUnavailable, HeadraceError, IncompatiblePeer
from headrace.ids import Incarnation, SlotIndex, new_incarnation
from headrace.kvstore import wire
from headrace.kvstore.arena import Arena
from headrace.kvstore.base import MapWatcher
from headrace.kvstore.connection import Connection, socket_path
from headrace.kvstore.layout import SlabLayout
from headrace.kvstore.operations import StoreOperations
from headrace.messages import Hello

log = logging.getLogger(__name__)
CALL_TIMEOUT_S = 5.0
HEARTBEATS_PER_LEASE = 4


class NodeClient(StoreOperations):
    """Thread-safe: calls take turns on one connection. One heartbeat thread. Close it once.

    After DaemonUnavailable every call fails at once until `reconnect`, and nothing leased may be read any more.
    """

    def __init__(
        self,
        endpoint: str,
        hello: Hello,
        layout: SlabLayout,
        watcher: MapWatcher | None = None,
    ) -> None:
        """`endpoint` is "unix:/path". The incarnation of `hello` is used for the first connection only: each later
        one draws its own. `watcher` sees every mapped arena come and go (to pin it). Raises DaemonUnavailable and
        IncompatiblePeer."""
        super().__init__()
        self.incarnation: Incarnation = hello.incarnation
        self._path = socket_path(endpoint)
        self._hello = hello
        self._layout = layout
        self._watcher = watcher
        self._lock = threading.RLock()
        self._connection: Connection | None = None
        self._arena: Arena | None = None
        self._lost = "not connected yet"
        self._renewed_s = 0.0
        self._lease_s = 0.0
        self._closed = threading.Event()
        self._dial(hello)
        self._heart = threading.Thread(target=self._beat, name="store-heartbeat", daemon=True)
        self._heart.start()

    def slot_view(self, slot: SlotIndex) -> memoryview:
        arena = self._arena
        if arena is None:
            raise DaemonUnavailable(f"{self._path}: no arena is mapped")
        return arena.slot(slot)

    @property
    def arena(self) -> str:
        arena = self._arena
        return "" if arena is None else str(arena.path)

    @property
    def has_lower_tiers(self) -> bool:
        connection = self._connection
        return connection is not None and connection.welcome.lower_tiers

    def lease_valid(self) -> bool:
        return self._connection is not None and time.monotonic() - self._renewed_s < self._lease_s

    def reconnect(self) -> None:
        with self._lock:
            if self._closed.is_set():
                raise DaemonUnavailable(f"{self._path}: this client is closed")
            if self._connection is not None:
                if self._connection.is_alive():
                    return
                # The daemon ended and no call has noticed yet: to keep this connection would fail the next one.
                self._drop_connection("the daemon ended")
            hello = self._hello
            again = Hello(
                name=hello.name, role=hello.role, incarnation=new_incarnation(), fingerprint=hello.fingerprint
            )
            self._dial(again)
            self._announce_all()

    def follow(self, arena: str) -> None:
        with self._lock:
            if self.arena == arena:
                return
            self._drop_connection("another daemon took over")
            self.reconnect()
            if self.arena != arena:
                raise DaemonUnavailable(f"{self._path}: the daemon has {self.arena}, wanted is {arena}")

    def hang_up(self) -> None:
        """Break the connection without a word, as the end of this process would. For tests and for tear-down of a rank
        that is lost."""
        connection = self._connection
        if connection is not None:
            connection.shutdown()

    def close(self) -> None:
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            with contextlib.suppress(HeadraceError):  # It is gone already, and with it all we held.
                self._call(wire.Goodbye())
            self._drop_connection("closed")
            self._unmap()
        if threading.current_thread() is not self._heart:
            self._heart.join(CALL_TIMEOUT_S)

    def _call(self, request: Any) -> Any:
        with self._lock:
            if self._connection is None:
                raise DaemonUnavailable(f"{self._path}: {self._lost}")
            # The daemon counts from when it reads the request, which is later: our clock ends first.
            sent_s = time.monotonic()
            try:
                reply = self._connection.call(request)
            except (DaemonUnavailable, IncompatiblePeer) as error:
                self._drop_connection(str(error))
                raise
            self._renewed_s = sent_s
            return reply

    def _dial(self, hello: Hello) -> None:
        connection = Connection(self._path, hello, CALL_TIMEOUT_S)
        try:
            self._map(connection)
        except BaseException:
            connection.close()
            raise
        self._renewed_s = time.monotonic()
        self._lease_s = connection.welcome.lease_s
        self._connection, self._lost = connection, ""
        self.incarnation = hello.incarnation

    def _map(self, connection: Connection) -> None:
        """Map the arena of this daemon, if it is not the one that is mapped. The old one goes before the watcher sees
        the new: a host has memory to pin one."""
        welcome = connection.welcome
        path = Path(welcome.arena)
        if self._arena is not None and self._arena.path == path:
            return
        if welcome.slot_bytes != self._layout.slot_bytes:
            raise IncompatiblePeer(
                f"slots of {welcome.node} have {welcome.slot_bytes} bytes, this layout needs {self._layout.slot_bytes}"
            )
        try:
            arena = Arena.attach(path, slots=welcome.slots, slot_bytes=welcome.slot_bytes, owner=welcome.incarnation)
        except OSError as error:
            raise DaemonUnavailable(f"cannot map {path}: {error.strerror}") from error
        self._unmap()
        if self._watcher is not None:
            try:
                # Pinning some hundred GB takes longer than a lease lives.
                self._watcher.mapped(arena.region(), arena.slot_bytes, lambda: connection.call(wire.Heartbeat()))
            except BaseException:
                arena.close()
                raise
        self._arena = arena

    def _unmap(self) -> None:
        arena, self._arena = self._arena, None
        if arena is not None:
            if self._watcher is not None:
                self._watcher.unmapping(arena.region())
            arena.close()

    def _drop_connection(self, reason: str) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._lost = reason

    def _beat(self) -> None:
        while not self._closed.wait(self._lease_s / HEARTBEATS_PER_LEASE):
            if self._connection is None:
                continue
            try:
                self._call(wire.Heartbeat())
            except HeadraceError as error:
                log.warning("heartbeat: %s", error)
