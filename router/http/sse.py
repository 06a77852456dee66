"""Server-sent events as an ASGI response that notices a closed connection at once, also while idle."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.router.http.errors import json_bytes
from headrace.router.http.service import disconnected

DONE = b"data: [DONE]\n\n"


def event(data: Any, name: str = "") -> bytes:
    """One frame; `name` is the `event:` line that Anthropic's clients want."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + json_bytes(data) + b"\n\n"


class EventStream(Response):
    """Sends frames as they come. `on_close` runs exactly once at the end, whatever the end was; the frames' generator
    is closed after it. Frames are expected to report failures themselves (a typed error event)."""

    def __init__(self, frames: AsyncIterator[bytes], on_close: Callable[[bool], None], headers: dict[str, str]) -> None:
        """`on_close(finished)`: False when the client left first."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        self._frames = frames
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(send))
        watcher = asyncio.ensure_future(disconnected(Request(scope, receive)))
        try:
            await asyncio.wait({pump, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._on_close(pump.done() and pump.exception() is None)
            watcher.cancel()
            pump.cancel()
            await asyncio.gather(pump, watcher, return_exceptions=True)

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for frame in self._frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
