"""A small HTTP/1.1 client on asyncio: POST a JSON body, read the answer, or its server-sent events as they come. One
connection a request, so a measured time never includes somebody else's."""

import asyncio
import contextlib
import json
import ssl
import urllib.parse
from collections.abc import AsyncIterator
from typing import Any

from headrace.errors import HeadraceError, InputError, from_wire

_LINE_LIMIT = 1 << 22


class Answer:
    """Status and headers have arrived; the body is read by one of the methods."""

    def __init__(self, status: int, headers: dict[str, str], reader: asyncio.StreamReader) -> None:
        self.status = status
        self.headers = headers
        self._reader = reader

    async def json(self) -> Any:
        data = b"".join([part async for part in self._parts()])
        return json.loads(data) if data else {}

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The JSON objects of `data:` lines until `[DONE]` or the end."""
        rest = b""
        async for part in self._parts():
            *whole, rest = (rest + part).split(b"\n")
            for line in whole:
                if line.startswith(b"data:"):
                    text = line[5:].strip()
                    if text == b"[DONE]":
                        return
                    yield json.loads(text)

    async def _parts(self) -> AsyncIterator[bytes]:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await self._reader.readline()).split(b";")[0] or b"0", 16):
                yield await self._reader.readexactly(size)
                await self._reader.readexactly(2)
        elif "content-length" in self.headers:
            yield await self._reader.readexactly(int(self.headers["content-length"]))
        else:
            yield await self._reader.read()


class Client:
    """`base_url` like http://127.0.0.1:8000; `api_key` may be empty."""

    def __init__(self, base_url: str, api_key: str = "") -> None:
        parts = urllib.parse.urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"{base_url!r} is not a URL like http://127.0.0.1:8000")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = parts.path.rstrip("/")
        self._key = api_key

    @contextlib.asynccontextmanager
    async def request(self, method: str, path: str, body: Any = None) -> AsyncIterator[Answer]:
        """Send one request. Leaving the context closes the connection, which aborts what still streams. Raises
        HeadraceError when nobody answers."""
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=_LINE_LIMIT)
        except OSError as error:
            raise HeadraceError(f"{self._host}:{self._port} does not answer: {error}") from error
        try:
            writer.write(self._head(method, path, body))
            await writer.drain()
            yield await _read_head(reader)
        except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
            raise HeadraceError(f"{self._host}:{self._port}: the answer broke off: {error}") from error
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """JSON for JSON. Raises HeadraceError with the service's message for a status of 400 and above."""
        async with self.request(method, path, body) as answer:
            content = await answer.json()
            if answer.status >= 400:
                raise refusal(answer.status, content)
            return content

    def _head(self, method: str, path: str, body: Any) -> bytes:
        data = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        lines = [
            f"{method} {self._path}{path} HTTP/1.1",
            f"Host: {self._host}:{self._port}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(data)}",
        ]
        if self._key:
            lines.append(f"Authorization: Bearer {self._key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode() + data


def refusal(status: int, content: Any) -> HeadraceError:
    """The service's own words for a status of 400 and above."""
    told = content.get("error", content) if isinstance(content, dict) else content
    message = told.get("message", told) if isinstance(told, dict) else told
    return from_wire("CapacityError" if status == 429 else "HeadraceError", f"HTTP {status}: {message}")


async def _read_head(reader: asyncio.StreamReader) -> Answer:
    first = (await reader.readline()).split(None, 2)
    if len(first) < 2:
        raise ConnectionError("no status line")
    headers: dict[str, str] = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return Answer(int(first[1]), headers, reader)
