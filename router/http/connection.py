"""One client connection: uvicorn's HTTP protocol with bounds on what an unfinished request may hold and for how long.

A request's head must be complete within `HEAD_S` and `HEAD_BYTES`; a connection that sends nothing is closed like an
idle one. What is not HTTP gets an OpenAI-shaped 400 and the connection ends.
"""

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 << 10
"""Request line and headers."""
HEAD_S = 20.0
"""From a head's first byte to its end."""

_REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


class GuardedProtocol(HttpToolsProtocol):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._in_head = True
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._arm(self.timeout_keep_alive, 0)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            if not self._head_bytes:
                self._arm(HEAD_S, 408)
            self._head_bytes += len(data)
        super().data_received(data)
        # A body that came with its head does not count: then the head is complete.
        if self._in_head and self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, f"the headers have more than {HEAD_BYTES} bytes")

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        self._disarm()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg.rstrip("."))

    def _arm(self, seconds: float, status: int) -> None:
        self._disarm()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._late, status)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self, status: int) -> None:
        if self.transport.is_closing():
            return
        if status:
            self._refuse(status, f"the headers did not arrive within {HEAD_S:g} s")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        body = json.dumps({"error": error}).encode()
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
