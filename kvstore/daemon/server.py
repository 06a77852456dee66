"""The daemon's Unix socket: frames in, frames out, one task per connection. All decisions are in `core.py`."""

import asyncio
import contextlib
import logging
import os
import socket
import stat
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, HeadraceError, IncompatiblePeer
from headrace.kvstore import wire
from headrace.kvstore.daemon.core import Session, StoreCore
from headrace.kvstore.daemon.peers import PeerProcess
from headrace.messages import ErrorInfo, Hello, decode, encode

log = logging.getLogger(__name__)
TICK_S = 0.2
HELLO_TIMEOUT_S = 5.0
MAX_SOCKET_PATH_BYTES = 100
"""Unix limits socket paths to 107 bytes."""


class StoreServer:
    """Serves one StoreCore. `start` and `stop` run on the loop that serves."""

    def __init__(self, core: StoreCore, path: Path) -> None:
        self._core = core
        self._path = path
        self._server: asyncio.Server | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._sessions: dict[Session, asyncio.StreamWriter] = {}

    def notify(self) -> None:
        """New events are in the log: answer whoever waits for them."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Raises ConfigError when the path is too long or another daemon answers there."""
        _check_path(self._path)
        # The umask keeps the socket private from its first moment on; chmod afterwards would leave a gap.
        mask = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._serve, path=str(self._path))
        finally:
            os.umask(mask)
        self._ticker = asyncio.create_task(self._tick())

    async def stop(self) -> None:
        """Stop listening, close every connection, remove the socket."""
        if self._ticker is not None:
            self._ticker.cancel()
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._path.unlink(missing_ok=True)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                for session in self._core.tick():
                    log.warning("%s %s did not renew its leases; they are over", session.name, session.owner)
                    self._core.close(session, clean=False)
                    self._sessions[session].close()
            except Exception:
                log.exception("upkeep failed")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        peer = PeerProcess.of(writer.get_extra_info("socket"))
        try:
            await self._converse(reader, writer, peer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # The peer is gone; the session was closed below it.
        except HeadraceError as error:
            log.warning("connection refused: %s", error)
            with contextlib.suppress(OSError):
                await _send(writer, ErrorInfo(kind=error.kind, text=str(error)))
        except TimeoutError:
            log.warning("a connection said nothing for %s s", HELLO_TIMEOUT_S)
        except asyncio.CancelledError:
            pass  # Only `stop` cancels; the task ends with this line anyway.
        finally:
            del self._connections[task]
            peer.close()
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: PeerProcess) -> None:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            hello = await _receive(reader)
        if not isinstance(hello, Hello):
            raise IncompatiblePeer(f"the first message must be Hello, got {type(hello).__name__}")
        session, welcome = self._core.open(hello, peer)
        self._sessions[session] = writer
        clean = False
        try:
            await _send(writer, welcome)
            while not clean:
                request = await _receive(reader)
                if not session.open:
                    raise IncompatiblePeer(f"the lease of {session.name} is over, dial again")
                clean = isinstance(request, wire.Goodbye)
                if clean:
                    self._core.close(session, clean=True)
                    await _send(writer, wire.Done())
                else:
                    await _send(writer, await self._reply(session, request))
        finally:
            self._core.close(session, clean=clean)
            del self._sessions[session]

    async def _reply(self, session: Session, request: Any) -> Any:
        if isinstance(request, wire.EventsRequest) and request.wait_s > 0:
            events = self._core.events
            if request.incarnation == events.incarnation and request.after == events.last:
                changed = self._changed
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(request.wait_s):
                        await changed.wait()
        return self._core.handle(session, request)


async def _receive(reader: asyncio.StreamReader) -> Any:
    (size,) = wire.LENGTH.unpack(await reader.readexactly(wire.LENGTH.size))
    if size > wire.MAX_FRAME_BYTES:
        raise IncompatiblePeer(f"a frame of {size} bytes is above the limit of {wire.MAX_FRAME_BYTES}")
    return decode(await reader.readexactly(size))


async def _send(writer: asyncio.StreamWriter, message: Any) -> None:
    data = encode(message)
    writer.write(wire.LENGTH.pack(len(data)) + data)
    await writer.drain()


def _check_path(path: Path) -> None:
    if len(str(path).encode()) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(f"deploy.run_dir: socket path {path} is longer than {MAX_SOCKET_PATH_BYTES} bytes")
    if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(f"{path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return
    raise ConfigError(f"another node daemon answers at {path}")
