"""An asyncio connection to one node daemon, for those who only look: routers and tools."""

import asyncio
from typing import Any

from headrace.errors import DaemonUnavailable, IncompatiblePeer, from_wire
from headrace.ids import new_incarnation
from headrace.kvstore import wire
from headrace.kvstore.connection import socket_path
from headrace.messages import BoxStatus, ErrorInfo, FlushDone, FlushRequest, Hello, StatusRequest, decode, encode


class NodeStream:
    """Requests in order, one at a time. Dials on first use and again after a failure."""

    def __init__(self, endpoint: str, fingerprint: bytes, *, role: str = "router") -> None:
        self._path = socket_path(endpoint)
        self._hello = Hello(name=role, role=role, incarnation=new_incarnation(), fingerprint=fingerprint)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._turn = asyncio.Lock()

    async def call(self, request: Any, timeout_s: float) -> Any:
        """Raises DaemonUnavailable, IncompatiblePeer, or what the daemon reported."""
        async with self._turn:
            try:
                async with asyncio.timeout(timeout_s):
                    if self._writer is None:
                        await self._dial()
                    reply = await self._exchange(request)
            except (OSError, EOFError, TimeoutError) as error:
                await self._hang_up()
                raise DaemonUnavailable(f"{self._path}: {error or type(error).__name__}") from error
            except BaseException:
                # A reply may still be on its way; the next request must not get it.
                await self._hang_up()
                raise
        if isinstance(reply, ErrorInfo):
            raise from_wire(reply.kind, reply.text)
        return reply

    async def status(self, timeout_s: float) -> BoxStatus:
        status: BoxStatus = await self.call(StatusRequest(), timeout_s)
        return status

    async def flush(self, timeout_s: float) -> int:
        """Drop every block of the host tier that nothing holds; returns how many."""
        done: FlushDone = await self.call(FlushRequest(), timeout_s)
        return done.blocks

    async def close(self) -> None:
        await self._hang_up()

    async def _dial(self) -> None:
        self._reader, self._writer = await asyncio.open_unix_connection(self._path)
        welcome = await self._exchange(self._hello)
        if isinstance(welcome, ErrorInfo):
            raise from_wire(welcome.kind, welcome.text)
        if not isinstance(welcome, wire.Welcome):
            raise IncompatiblePeer(f"{self._path} answered the greeting with {type(welcome).__name__}")

    async def _exchange(self, request: Any) -> Any:
        assert self._reader is not None
        assert self._writer is not None
        data = encode(request)
        self._writer.write(wire.LENGTH.pack(len(data)) + data)
        await self._writer.drain()
        (size,) = wire.LENGTH.unpack(await self._reader.readexactly(wire.LENGTH.size))
        if size > wire.MAX_FRAME_BYTES:
            raise IncompatiblePeer(f"{self._path}: a frame of {size} bytes is above {wire.MAX_FRAME_BYTES}")
        return decode(await self._reader.readexactly(size))

    async def _hang_up(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None
