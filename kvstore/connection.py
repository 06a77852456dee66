"""A blocking, framed connection to a node daemon: one request, one reply. Knows frames and greetings, no blocks."""

import contextlib
import select
import socket
from typing import Any

from headrace.errors import DaemonUnavailable, IncompatiblePeer, from_wire
from headrace.kvstore import wire
from headrace.messages import ErrorInfo, Hello, decode, encode


class Connection:
    """Not thread-safe. After any DaemonUnavailable it is of no further use; close it."""

    def __init__(self, path: str, hello: Hello, timeout_s: float) -> None:
        """Dial and greet. Raises DaemonUnavailable, or IncompatiblePeer if the two builds do not fit."""
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        try:
            self._connect()
            welcome = self.call(hello)
            fits = isinstance(welcome, wire.Welcome) and hello.fingerprint in (b"", welcome.fingerprint)
            if not fits:
                raise IncompatiblePeer(f"{path} answered the greeting with something else than a fitting welcome")
            self.welcome: wire.Welcome = welcome
        except BaseException:
            self._socket.close()
            raise

    def call(self, request: Any) -> Any:
        """Raises what the daemon reported, or DaemonUnavailable with the reason."""
        data = encode(request)
        try:
            self._socket.sendall(wire.LENGTH.pack(len(data)) + data)
            (size,) = wire.LENGTH.unpack(self._read(wire.LENGTH.size))
            if size > wire.MAX_FRAME_BYTES:
                raise DaemonUnavailable(f"{self._path}: a reply of {size} bytes is above {wire.MAX_FRAME_BYTES}")
            reply = decode(bytes(self._read(size)))
        except OSError as error:
            raise DaemonUnavailable(f"{self._path}: {type(request).__name__} failed: {error}") from error
        if isinstance(reply, ErrorInfo):
            raise from_wire(reply.kind, reply.text)
        return reply

    def is_alive(self) -> bool:
        """Whether the daemon still holds its end. Between calls it sends nothing, so anything to read is the end."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | select.POLLRDHUP)
        return not poll.poll(0)

    def shutdown(self) -> None:
        """Wake a thread that waits in `call`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _connect(self) -> None:
        try:
            self._socket.connect(self._path)
        except OSError as error:
            raise DaemonUnavailable(f"no node daemon at {self._path}: {error.strerror or error}") from error

    def _read(self, size: int) -> bytearray:
        buffer = bytearray(size)
        view, got = memoryview(buffer), 0
        while got < size:
            count = self._socket.recv_into(view[got:])
            if not count:
                raise ConnectionResetError(f"connection closed after {got} of {size} bytes")
            got += count
        view.release()
        return buffer


def socket_path(endpoint: str) -> str:
    """Path of a "unix:/..." endpoint. Raises DaemonUnavailable for any other kind."""
    kind, _, path = endpoint.partition(":")
    if kind != "unix" or not path:
        raise DaemonUnavailable(f"{endpoint!r} is not the Unix socket of a node daemon (unix:/path)")
    return path
