"""The local stream between leader and followers: plans down, acknowledgements up. Length-framed messages over TCP on
loopback; a follower proves itself with the nonce that the group agreed on when it formed.

Knows nothing of what is in a plan. A stream that ends, or an acknowledgement with an error, is a lost rank.
"""

import contextlib
import hmac
import queue
import secrets
import socket
import struct
import threading
import time
from typing import Any

from headrace.errors import IncompatiblePeer, RankLost
from headrace.messages import decode, encode
from headrace.prefill.plan import FollowerHello, StepAck, StoppedPlan

_FRAME = struct.Struct("<I")
MAX_FRAME_BYTES = 256 << 20
HELLO_TIMEOUT_S = 5.0


class Stream:
    """Messages over one connected socket. One reader and one writer at a time."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection

    def send(self, value: Any) -> None:
        """Raises OSError when the peer is gone."""
        data = encode(value)
        self._socket.sendall(_FRAME.pack(len(data)) + data)

    def receive(self) -> Any | None:
        """The next message, or None at the end of the stream. Raises IncompatiblePeer for anything else."""
        head = self._exactly(_FRAME.size)
        if head is None:
            return None
        (size,) = _FRAME.unpack(head)
        if size > MAX_FRAME_BYTES:
            raise IncompatiblePeer(f"a frame of {size} bytes; the limit is {MAX_FRAME_BYTES}")
        data = self._exactly(size)
        return None if data is None else decode(data)

    def set_timeout(self, seconds: float | None) -> None:
        self._socket.settimeout(seconds)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, size: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self._socket.recv(size - len(parts))
            except TimeoutError:
                raise
            except OSError:
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)


class LeaderLink:
    """The leader's end: one stream and one reader thread per follower."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.nonce = secrets.token_bytes(16)
        self._streams: dict[int, Stream] = {}
        self._acks: queue.SimpleQueue[StepAck | RankLost] = queue.SimpleQueue()
        self._readers: list[threading.Thread] = []
        self.lost: RankLost | None = None
        """Set by a reader as soon as a rank is gone, also while the leader is inside a collective."""

    def accept(self, followers: int, timeout_s: float) -> None:
        """Wait for all followers. Raises RankLost if they do not come in time; strangers are turned away."""
        deadline = time.monotonic() + timeout_s
        while len(self._streams) < followers:
            left = deadline - time.monotonic()
            if left <= 0:
                raise RankLost(f"{len(self._streams)} of {followers} followers connected within {timeout_s} s")
            self._listener.settimeout(left)
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            self._greet(Stream(connection), followers)
        self._listener.close()
        for rank, stream in self._streams.items():
            stream.set_timeout(None)
            reader = threading.Thread(target=self._read, args=(rank, stream), name=f"acks-{rank}", daemon=True)
            reader.start()
            self._readers.append(reader)

    def send(self, plan: Any) -> None:
        """Raises RankLost."""
        for rank, stream in self._streams.items():
            try:
                stream.send(plan)
            except OSError as error:
                raise RankLost(f"rank {rank} is gone: {error}") from error

    def collect(self, step: int, timeout_s: float) -> list[StepAck]:
        """One acknowledgement of this step from each follower. Raises RankLost."""
        acks: list[StepAck] = []
        deadline = time.monotonic() + timeout_s
        while len(acks) < len(self._streams):
            try:
                ack = self._acks.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                missing = sorted(set(self._streams) - {ack.rank for ack in acks})
                raise RankLost(f"ranks {missing} did not acknowledge step {step} within {timeout_s} s") from None
            if isinstance(ack, RankLost):
                raise ack
            if ack.step != step:
                raise RankLost(f"rank {ack.rank} acknowledged step {ack.step}, the group is at step {step}")
            acks.append(ack)
        return acks

    def close(self, reason: str) -> None:
        for stream in self._streams.values():
            with contextlib.suppress(OSError):  # gone already
                stream.send(StoppedPlan(reason=reason))
        # Followers close their end after the message; then the readers end by themselves.
        for reader in self._readers:
            reader.join(1.0)
        for stream in self._streams.values():
            stream.close()
        self._listener.close()

    def _greet(self, stream: Stream, followers: int) -> None:
        stream.set_timeout(HELLO_TIMEOUT_S)
        try:
            hello = stream.receive()
        except (IncompatiblePeer, TimeoutError):
            hello = None
        known = isinstance(hello, FollowerHello) and hmac.compare_digest(hello.nonce, self.nonce)
        if known and 1 <= hello.rank <= followers and hello.rank not in self._streams:
            self._streams[hello.rank] = stream
        else:
            stream.close()

    def _read(self, rank: int, stream: Stream) -> None:
        problem = "its stream ended"
        try:
            while isinstance(ack := stream.receive(), StepAck):
                if ack.error:
                    problem = ack.error
                    break
                self._acks.put(ack)
        except IncompatiblePeer as error:
            problem = str(error)
        self.lost = RankLost(f"rank {rank} is lost: {problem}")
        self._acks.put(self.lost)


def connect(port: int, rank: int, nonce: bytes) -> Stream:
    """A follower's end. Raises OSError."""
    stream = Stream(socket.create_connection(("127.0.0.1", port), timeout=HELLO_TIMEOUT_S))
    stream.set_timeout(None)
    stream.send(FollowerHello(rank=rank, nonce=nonce))
    return stream
