"""Whether the process at the other end of a Unix socket is still alive: a pidfd, so a reused pid cannot fool us."""

import os
import select
import socket
import struct

_UCRED = struct.Struct("3i")


class PeerProcess:
    """The process that opened a connection. Close it once."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = -1
        self._known_dead = False
        if pid > 0 and pid != os.getpid():
            try:
                self._fd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._known_dead = True
            except OSError:
                pass  # Not allowed or not supported: only time can tell.

    @classmethod
    def of(cls, connection: socket.socket) -> "PeerProcess":
        """pid 0 (another pid namespace) gives a process of which nothing is known."""
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        return cls(_UCRED.unpack(raw)[0])

    def alive(self) -> bool:
        """False once it is known dead, and for a process that cannot be watched (this one, or one of another
        namespace): there the grace period alone protects its slots."""
        if self._fd >= 0 and not self._known_dead:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            self._known_dead = bool(poll.poll(0))
        return self._fd >= 0 and not self._known_dead

    def copy(self) -> "PeerProcess":
        """The same process, to be closed separately: it stays recognised even if its pid is given out again."""
        other = PeerProcess(0)
        other.pid, other._known_dead = self.pid, self._known_dead
        other._fd = os.dup(self._fd) if self._fd >= 0 else -1
        return other

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
