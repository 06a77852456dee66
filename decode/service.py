"""gRPC face of a decode rank: "headrace.Decode" with unary Hello, Status, Flush and the bidirectional Stream.

A stream is the lifetime of its requests: when it breaks, or the client ends its side, all are aborted within one
step. Its outbox is bounded; a reader that lets it fill loses its requests, the step loop never waits.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from headrace import rpc
from headrace.decode.base import StreamId
from headrace.decode.rank import DecodeRank
from headrace.ids import Role
from headrace.kvstore.legs import legs
from headrace.messages import (
    AbortRequest,
    BoxStatus,
    DecodeRequest,
    ErrorInfo,
    FlushDone,
    FlushRequest,
    Hello,
    StatusRequest,
)

SERVICE = "headrace.Decode"
OUTBOX_MESSAGES = 1024


class Outbox:
    """`decode.base.Sink` whose reader is a coroutine. Messages of step and Accepted count against `room`; last messages
    always get in, but the service reads no further requests while more than `room` messages wait."""

    def __init__(self, loop: asyncio.AbstractEventLoop, room: int = OUTBOX_MESSAGES) -> None:
        self._loop = loop
        self._room = room
        self._messages: deque[Any] = deque()
        self._lock = threading.Lock()
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()
        self._closed = False

    def put(self, message: Any) -> bool:
        with self._lock:
            if len(self._messages) >= self._room:
                return False
            self._append(message)
        return True

    def put_last(self, message: Any) -> None:
        with self._lock:
            self._append(message)

    def close(self) -> None:
        """No reader or writer any more: `get` returns None."""
        self._closed = True
        self._filled.set()

    async def get(self) -> Any:
        """The next message, or None after `close`."""
        while not self._closed:
            with self._lock:
                if self._messages:
                    message = self._messages.popleft()
                    self._emptied.set()
                    return message
                self._filled.clear()
            await self._filled.wait()
        return None

    async def has_room(self) -> None:
        while len(self._messages) >= self._room:
            self._emptied.clear()
            await self._emptied.wait()

    def _append(self, message: Any) -> None:
        self._messages.append(message)
        if len(self._messages) == 1:
            # The event loop is closed only after the server that owns this stream.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._filled.set)


class DecodeService:
    """Servicer around one rank. Build and use it on the event loop that serves."""

    def __init__(self, rank: DecodeRank, hello: Hello, *, outbox_messages: int = OUTBOX_MESSAGES) -> None:
        self._rank = rank
        self._hello = hello
        self._outbox_messages = outbox_messages

    def server(self, token: str) -> grpc.aio.Server:
        return rpc.server(
            SERVICE,
            token,
            unary={"Hello": self.hello, "Status": self.status, "Flush": self.flush},
            bidi={"Stream": self.stream},
        )

    async def hello(self, peer: Hello, _context: Any) -> Hello | ErrorInfo:
        if peer.fingerprint != self._hello.fingerprint:
            return ErrorInfo(
                kind="IncompatiblePeer",
                text=f"{peer.name} has fingerprint {peer.fingerprint.hex()[:16]}, "
                f"{self._hello.name} has {self._hello.fingerprint.hex()[:16]}: other weights, layout or naming",
            )
        return self._hello

    async def status(self, _request: StatusRequest, _context: Any) -> BoxStatus:
        return box_status(self._rank, self._hello)

    async def flush(self, _request: FlushRequest, _context: Any) -> FlushDone:
        return FlushDone(blocks=await asyncio.wrap_future(self._rank.flush()))

    async def stream(self, requests: AsyncIterator[Any], _context: Any) -> AsyncIterator[Any]:
        outbox = Outbox(asyncio.get_running_loop(), self._outbox_messages)
        stream = self._rank.open_stream(outbox)
        reader = asyncio.create_task(self._read(stream, requests, outbox))
        try:
            while (message := await outbox.get()) is not None:
                yield message
        finally:
            reader.cancel()
            self._rank.close_stream(stream)

    async def _read(self, stream: StreamId, requests: AsyncIterator[Any], outbox: Outbox) -> None:
        try:
            async for message in requests:
                if isinstance(message, DecodeRequest):
                    self._rank.submit(stream, message)
                elif isinstance(message, AbortRequest):
                    self._rank.abort(stream, message.request_id)
                await outbox.has_room()
        finally:
            outbox.close()


def box_status(rank: DecodeRank, hello: Hello) -> BoxStatus:
    return BoxStatus(
        name=hello.name, incarnation=hello.incarnation, ready=rank.alive(), values=rank.status() | legs.values()
    )


def decode_hello(name: str, incarnation: Any, fingerprint: bytes) -> Hello:
    return Hello(name=name, role=Role.DECODE.value, incarnation=incarnation, fingerprint=fingerprint)
