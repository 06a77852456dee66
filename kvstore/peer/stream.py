"""What goes over a data connection, with blocking sockets: both ends run on threads, and every call has a deadline.

    reader -> owner   magic (8) | ticket (16) | u32 count | u32 indices of the ticket's blocks it wants, ascending
    reader -> owner   u32 credits, again and again: so many more slabs may be sent
    owner -> reader   u32 index | u32 zero | u64 payload bytes | payload, for each index in order
    either            closes: after the last slab it is the end, before it a cancellation or a failure

Integers are little-endian. The owner sends nothing without credit, so a reader never has more on the way than it has
slots for.
"""

import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Protocol

MAGIC = b"hrslabs1"
_OPENING = struct.Struct("<8s16sI")
_HEADER = struct.Struct("<IIQ")
_U32 = struct.Struct("<I")
WINDOW = 4
"""Slabs that may be on the way."""
_MAX_WANTED = 1 << 16


class Pipe(Protocol):
    """A byte stream with a deadline per call. Raises OSError."""

    def send(self, data: memoryview) -> None:
        """All of it."""
        ...

    def receive(self, into: memoryview) -> None:
        """Fill it. ConnectionError when the other end closes first."""
        ...

    def close(self) -> None: ...


class SocketPipe:
    """Implements Pipe. `timeout_s` is for a whole call, however many pieces it takes."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._timeout_s = timeout_s

    def send(self, data: memoryview) -> None:
        self._socket.settimeout(self._timeout_s)
        self._socket.sendall(data)

    def receive(self, into: memoryview) -> None:
        end, got = time.monotonic() + self._timeout_s, 0
        while got < into.nbytes:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{got} of {into.nbytes} bytes came within {self._timeout_s} s")
            self._socket.settimeout(left)
            count = self._socket.recv_into(into[got:])
            if not count:
                raise ConnectionResetError(f"the peer closed after {got} of {into.nbytes} bytes")
            got += count

    def close(self) -> None:
        self._socket.close()


def read_opening(pipe: Pipe) -> tuple[bytes, list[int]]:
    """(ticket, wanted indices). Raises ConnectionError for anything else."""
    magic, ticket, count = _OPENING.unpack(_take(pipe, _OPENING.size))
    if magic != MAGIC or count > _MAX_WANTED:
        raise ConnectionError("not a request for slabs")
    wanted = [number for (number,) in _U32.iter_unpack(_take(pipe, _U32.size * count))]
    return ticket, wanted


def send_slabs(pipe: Pipe, wanted: Sequence[int], payload_of: Callable[[int], memoryview]) -> int:
    """Owner's side, after the opening. Returns bytes sent; raises OSError when the reader goes or stops taking."""
    credit, sent = 0, 0
    for index in wanted:
        while not credit:
            credit += _U32.unpack(_take(pipe, _U32.size))[0]
        payload = payload_of(index)
        pipe.send(memoryview(_HEADER.pack(index, 0, payload.nbytes)))
        pipe.send(payload)
        credit -= 1
        sent += payload.nbytes
    return sent


def receive_slabs(
    pipe: Pipe,
    ticket: bytes,
    wanted: Sequence[int],
    into: Callable[[int], memoryview],
    arrived: Callable[[int], bool],
) -> int:
    """Reader's side. `into(index)` is where a slab goes, exactly as long as it is; `arrived(index)` is told when it is
    there, and says False to stop. Returns bytes received. Raises OSError; what had not arrived then has not."""
    pipe.send(memoryview(_OPENING.pack(MAGIC, ticket, len(wanted)) + b"".join(map(_U32.pack, wanted))))
    pipe.send(memoryview(_U32.pack(min(WINDOW, len(wanted)))))
    got = 0
    for place, index in enumerate(wanted):
        number, _, size = _HEADER.unpack(_take(pipe, _HEADER.size))
        target = into(index)
        if (number, size) != (index, target.nbytes):
            raise ConnectionError(f"slab {number} of {size} bytes came, wanted is {index} of {target.nbytes}")
        pipe.receive(target)
        got += size
        if not arrived(index):
            break
        if place + WINDOW < len(wanted):
            pipe.send(memoryview(_U32.pack(1)))
    return got


def _take(pipe: Pipe, size: int) -> bytes:
    buffer = bytearray(size)
    pipe.receive(memoryview(buffer))
    return bytes(buffer)
