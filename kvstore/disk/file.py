"""One preallocated file of slabs, read and written with O_DIRECT where the file system takes it.

    page 0            who wrote the file (`record.pack_file`)
    page 1            scratch page of `probe`
    page 2 + ...      slot i: its record's page, then its slab

The file is locked while it is open, so two daemons never share one.
"""

import errno
import fcntl
import logging
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from headrace.errors import ConfigError
from headrace.kvstore.disk.base import Record
from headrace.kvstore.disk.record import (
    FILE_MAGIC,
    PAGE_BYTES,
    RECORD_BYTES,
    pack_file,
    pack_record,
    unpack_file,
    unpack_record,
)

log = logging.getLogger(__name__)
_DATA_START = 2 * PAGE_BYTES
SUFFIX = ".slabs"
_SCAN_THREADS = 8


class DirectSlabFile:
    """Implements `base.SlabFile`. Create it with `open_file`; close it once."""

    def __init__(self, fd: int, data_fd: int, slots: int, slot_bytes: int) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.direct = data_fd != fd
        self._fd, self._data_fd = fd, data_fd
        self._local = threading.local()

    def records(self) -> list[Record | None]:
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)

        def record(slot: int) -> Record | None:
            return unpack_record(os.pread(self._fd, RECORD_BYTES, self._start(slot)))

        with ThreadPoolExecutor(_SCAN_THREADS) as pool:
            return list(pool.map(record, range(self.slots), chunksize=256))

    def write(self, slot: int, record: Record, slab: memoryview) -> None:
        page, whole = self._page(), pack_record(record)
        page[: len(whole)] = whole
        aligned = self._aligned(slab)
        if aligned is not slab:
            aligned[:] = slab
        self._transfer(os.pwritev(self._data_fd, [page, aligned], self._start(slot)), PAGE_BYTES + self.slot_bytes)

    def read(self, slot: int, into: memoryview) -> Record | None:
        page, aligned = self._page(), self._aligned(into)
        self._transfer(os.preadv(self._data_fd, [page, aligned], self._start(slot)), PAGE_BYTES + self.slot_bytes)
        if aligned is not into:
            into[:] = aligned
        return unpack_record(page[:RECORD_BYTES])

    def erase(self, slot: int) -> None:
        page = self._page()
        page[:RECORD_BYTES] = bytes(RECORD_BYTES)
        self._transfer(os.pwritev(self._data_fd, [page], self._start(slot)), PAGE_BYTES)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def probe(self) -> None:
        page, mark = self._page(), os.urandom(32)
        page[:32] = mark
        self._transfer(os.pwritev(self._data_fd, [page], PAGE_BYTES), PAGE_BYTES)
        page[:32] = bytes(32)
        self._transfer(os.preadv(self._data_fd, [page], PAGE_BYTES), PAGE_BYTES)
        if page[:32] != mark:
            raise OSError(errno.EIO, "the probe page does not hold what was written to it")

    def close(self) -> None:
        for fd in {self._fd, self._data_fd}:
            os.close(fd)

    def _start(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} is outside a file of {self.slots} slots")
        return slot_start(slot, self.slot_bytes)

    def _page(self) -> mmap.mmap:
        """An aligned page of this thread."""
        if not hasattr(self._local, "page"):
            self._local.page = mmap.mmap(-1, PAGE_BYTES)
        page: mmap.mmap = self._local.page
        return page

    def _aligned(self, slab: memoryview) -> memoryview:
        """`slab` itself if the device can take it, else this thread's own buffer."""
        if slab.nbytes != self.slot_bytes:
            raise ValueError(f"a slab has {self.slot_bytes} bytes here, this view {slab.nbytes}")
        if not self.direct or np.frombuffer(slab, np.uint8).ctypes.data % PAGE_BYTES == 0:
            return slab
        if not hasattr(self._local, "bounce"):
            self._local.bounce = memoryview(mmap.mmap(-1, self.slot_bytes))
        bounce: memoryview = self._local.bounce
        return bounce

    @staticmethod
    def _transfer(got: int, wanted: int) -> None:
        if got != wanted:
            raise OSError(errno.EIO, f"{got} of {wanted} bytes were transferred")


def slot_start(slot: int, slot_bytes: int) -> int:
    """Offset of a slot's record in the file."""
    return _DATA_START + slot * (PAGE_BYTES + slot_bytes)


def slots_in(disk_bytes: int, slot_bytes: int) -> int:
    """Slabs that a file of `disk_bytes` holds. Raises ConfigError if it is not even one."""
    slots = (disk_bytes - _DATA_START) // (PAGE_BYTES + slot_bytes)
    if slots < 1:
        raise ConfigError(f"store.disk_bytes: {disk_bytes} does not hold one block of {slot_bytes} bytes")
    return slots


def open_file(path: Path, *, fingerprint: bytes, disk_bytes: int, slot_bytes: int) -> DirectSlabFile:
    """Open or create the file and allocate all of it. A slab file of other weights or another layout is emptied, with a
    line in the log. Raises ConfigError for a size that holds no block, a file that is no slab file, or one that another
    daemon has open; OSError when the file system cannot give it (no room, no rights)."""
    slots = slots_in(disk_bytes, slot_bytes)
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"store.disk_dir: another daemon uses {path}") from error
        _keep_or_empty(path, fd, fingerprint, slot_bytes)
        size = slot_start(slots, slot_bytes)
        os.ftruncate(fd, min(size, os.fstat(fd).st_size))
        os.posix_fallocate(fd, 0, size)
        os.pwrite(fd, pack_file(fingerprint, slot_bytes, slots), 0)
        os.fsync(fd)
        return DirectSlabFile(fd, _direct(path, fd), slots, slot_bytes)
    except BaseException:
        os.close(fd)
        raise


def _keep_or_empty(path: Path, fd: int, fingerprint: bytes, slot_bytes: int) -> None:
    if not os.fstat(fd).st_size:
        return
    page = os.pread(fd, PAGE_BYTES, 0)
    found = unpack_file(page)
    if found is None and page.strip(b"\0") and not page.startswith(FILE_MAGIC):
        raise ConfigError(f"store.disk_dir: {path} is no file of slabs and is left alone")
    if found is None:
        log.warning("disk tier: the head of %s is damaged; it starts empty", path)
        os.ftruncate(fd, 0)
    elif found[:2] != (fingerprint, slot_bytes):
        log.warning(
            "disk tier: %s is of fingerprint %s with slabs of %d bytes, wanted are %s and %d; it starts empty",
            path, found[0].hex()[:16], found[1], fingerprint.hex()[:16], slot_bytes,
        )  # fmt: skip
        os.ftruncate(fd, 0)


def _direct(path: Path, fd: int) -> int:
    """A descriptor that bypasses the page cache, or `fd` where the file system has none (tmpfs)."""
    direct = -1
    try:
        direct = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        os.preadv(direct, [mmap.mmap(-1, PAGE_BYTES)], PAGE_BYTES)
    except OSError:
        if direct >= 0:
            os.close(direct)
        log.info("disk tier: %s is on a file system without O_DIRECT; the page cache holds its blocks too", path)
        return fd
    return direct
