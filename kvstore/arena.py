"""The shared-memory file that holds a node's slabs: the daemon creates and removes it, ranks map it. Knows slots and
bytes, nothing of what lies in them.

The first page is a header; slot i begins at HEADER_BYTES + i * slot_bytes. The daemon keeps an flock on the file while
it lives, so a file that nobody locks was left by a dead daemon and is removed at the next start.
"""

import fcntl
import mmap
import os
import struct
from pathlib import Path
from typing import Self

from headrace.errors import ConfigError, IncompatiblePeer
from headrace.ids import Incarnation
from headrace.kvstore import memory

HEADER_BYTES = 4096
SUFFIX = ".arena"
_MAGIC = b"headrace arena 1"
_HEADER = struct.Struct("<16s16sQQ")  # magic, incarnation, slots, slot bytes


class Arena:
    """A mapped arena. `created` by the daemon (owns the file) or `attached` by a rank. Close it once."""

    def __init__(self, path: Path, fd: int, slots: int, slot_bytes: int, *, owned: bool) -> None:
        self.path = path
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._owned = owned
        self._fd = fd
        self._map = mmap.mmap(fd, HEADER_BYTES + slots * slot_bytes)
        self._bytes = memoryview(self._map)

    @classmethod
    def create(
        cls,
        directory: Path,
        prefix: str,
        *,
        host_bytes: int,
        slot_bytes: int,
        owner: Incarnation,
        numa: str = "auto",
    ) -> Self:
        """Allocate every page now, so that used memory is honest and no later write can fail. `numa` as in
        `memory.place`. Raises ConfigError with the numbers if it does not fit."""
        remove_stale(directory)
        slots = host_bytes // slot_bytes
        total = HEADER_BYTES + slots * slot_bytes
        _check_room(directory, host_bytes, slot_bytes, total)
        path = directory / f"{prefix}-{owner}{SUFFIX}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"store.shm_dir: cannot create a file in {directory}: {error.strerror}") from error
        arena = None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Before the pages are taken, which lasts: a daemon that is killed meanwhile leaves a file that is known.
            os.pwrite(fd, _HEADER.pack(_MAGIC, owner.encode(), slots, slot_bytes), 0)
            os.ftruncate(fd, total)
            arena = cls(path, fd, slots, slot_bytes, owned=True)
            memory.place(arena._map, numa)
            memory.populate(arena._map, fd)
            return arena
        except (OSError, ConfigError) as error:
            if arena is not None:
                arena.close()
            else:
                os.close(fd)
                path.unlink(missing_ok=True)
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"cannot allocate {total} bytes in {directory}: {error.strerror}") from error

    @classmethod
    def attach(cls, path: Path, *, slots: int, slot_bytes: int, owner: Incarnation) -> Self:
        """Map the arena of a running daemon. Raises IncompatiblePeer if the file is not the one it described,
        OSError if it is gone."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.pread(fd, _HEADER.size, 0)
            wanted = _HEADER.pack(_MAGIC, owner.encode(), slots, slot_bytes)
            if found != wanted or os.fstat(fd).st_size < HEADER_BYTES + slots * slot_bytes:
                raise IncompatiblePeer(f"{path} is not the arena of {slots} x {slot_bytes} bytes of daemon {owner}")
            arena = cls(path, fd, slots, slot_bytes, owned=False)
            memory.advise_huge(arena._map)
            return arena
        except BaseException:
            os.close(fd)
            raise

    def slot(self, index: int) -> memoryview:
        """Writable bytes of one slot. IndexError outside the arena."""
        if not 0 <= index < self.slots:
            raise IndexError(f"slot {index} is outside an arena of {self.slots} slots")
        start = HEADER_BYTES + index * self.slot_bytes
        return self._bytes[start : start + self.slot_bytes]

    def region(self) -> memoryview:
        """All slots, for pinning."""
        return self._bytes[HEADER_BYTES:]

    def huge_bytes(self) -> int:
        """How much of it lies in huge pages here."""
        return memory.huge_bytes(self.path)

    def close(self) -> None:
        """Unmap (later, if views are still alive) and, for the creator, remove the file."""
        if self._fd < 0:
            return
        if self._owned:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1
        try:
            self._bytes.release()
            self._map.close()
        except BufferError:
            pass  # A view is in use: the mapping ends with it.


def remove_stale(directory: Path) -> list[Path]:
    """Remove arenas that no living daemon locks; returns them. Files of other users are left alone."""
    removed = []
    for path in directory.glob(f"*{SUFFIX}"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if _is_abandoned(fd):
                path.unlink(missing_ok=True)
                removed.append(path)
        finally:
            os.close(fd)
    return removed


def _is_abandoned(fd: int) -> bool:
    # Without the magic it is either somebody else's file or one that its daemon is just creating.
    if os.fstat(fd).st_uid != os.getuid() or os.pread(fd, len(_MAGIC), 0) != _MAGIC:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _check_room(directory: Path, host_bytes: int, slot_bytes: int, total: int) -> None:
    if host_bytes < slot_bytes:
        raise ConfigError(f"store.host_bytes: {host_bytes} does not hold one block of {slot_bytes} bytes")
    try:
        disk = os.statvfs(directory)
    except OSError as error:
        raise ConfigError(f"store.shm_dir: {directory}: {error.strerror}") from error
    free = disk.f_bavail * disk.f_frsize
    if total > free:
        raise ConfigError(f"store.host_bytes: {total} bytes do not fit into {directory}, which has {free} free")
    available = memory.available_bytes()
    if total + memory.RESERVE_BYTES > available:
        raise ConfigError(
            f"store.host_bytes: {total} bytes plus a reserve of {memory.RESERVE_BYTES} exceed the {available} bytes of "
            "available memory"
        )
