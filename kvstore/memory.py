"""Pages of a shared mapping: how much memory there is, where it comes from, and how it is taken. Linux only; pure of
torch. Knows nothing of slots.

Pages are taken now, not at the first write: a write into a full memory file system would end the process with SIGBUS.
They are taken in chunks, and before each chunk it is looked again whether memory is left: the machine may have other
plans for it than when the preflight was made.
"""

import ctypes
import errno
import mmap
import os
import re
import sys
from pathlib import Path

import psutil

from headrace.errors import ConfigError

CHUNK_BYTES = 1 << 30
RESERVE_BYTES = 256 << 20
"""Memory that must stay available after everything is allocated."""
_MADV_POPULATE_WRITE = 23
_MPOL_BIND, _MPOL_INTERLEAVE = 2, 3
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
_NODES = Path("/sys/devices/system/node/has_memory")
_CGROUPS = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """What may still be allocated: MemAvailable, or what the cgroup leaves where that is less."""
    available: int = psutil.virtual_memory().available
    for limit, used in (
        (_CGROUPS / "memory.max", _CGROUPS / "memory.current"),
        (_CGROUPS / "memory/memory.limit_in_bytes", _CGROUPS / "memory/memory.usage_in_bytes"),
    ):
        try:
            available = min(available, max(0, int(limit.read_text()) - int(used.read_text())))
        except (OSError, ValueError):  # no such controller, or "max"
            continue
    return available


def numa_nodes() -> list[int]:
    """Numbers of the nodes that have memory, ascending; [0] where the kernel does not say."""
    try:
        return expand_ranges(_NODES.read_text())
    except (OSError, ValueError):
        return [0]


def expand_ranges(text: str) -> list[int]:
    """ "0-2,5" -> [0, 1, 2, 5]"""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def place(mapping: mmap.mmap, nodes: str) -> None:
    """Say from which NUMA nodes the pages of a mapping come. `nodes`: "auto" deals pages over all nodes with memory
    (every rank's link then reads from all of them alike) and does nothing on a machine with one; "0-1,3" deals over
    those. Before the first page is taken. Raises ConfigError for nodes that are not there."""
    there = numa_nodes()
    if nodes == "auto":
        if len(there) == 1:
            return
        wanted = there
    else:
        try:
            wanted = expand_ranges(nodes)
        except ValueError:
            wanted = []
        if not wanted or not set(wanted) <= set(there):
            names = ", ".join(map(str, there))
            raise ConfigError(f"store.numa: {nodes!r} is neither `auto` nor of the nodes with memory ({names})")
    call = _SYS_MBIND.get(os.uname().machine)
    if call is None or not sys.platform.startswith("linux"):
        raise ConfigError(f"store.numa: not known how to place pages on {os.uname().machine}")
    bits = max(wanted) + 1
    mask = (ctypes.c_ulong * (bits // 64 + 1))()
    for node in wanted:
        mask[node // 64] |= 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(mapping)))
    mode = _MPOL_BIND if len(wanted) == 1 else _MPOL_INTERLEAVE
    # The kernel reads one bit less than it is told.
    if libc.syscall(call, address, ctypes.c_size_t(len(mapping)), mode, mask, ctypes.c_ulong(len(mask) * 64 + 1), 0):
        raise ConfigError(f"store.numa: cannot place memory on {nodes!r}: {os.strerror(ctypes.get_errno())}")


def populate(mapping: mmap.mmap, fd: int) -> None:
    """Take every page of a shared mapping of `fd`, from huge pages where the file system gives them. Raises ConfigError
    with what was taken and what is missing; the pages go with the file."""
    total = len(mapping)
    advise_huge(mapping)
    for start in range(0, total, CHUNK_BYTES):
        size = min(CHUNK_BYTES, total - start)
        left = available_bytes()
        if size + RESERVE_BYTES > left:
            raise ConfigError(
                f"store.host_bytes: after {start} of {total} bytes only {left} bytes of memory are available; "
                f"{size} more and a reserve of {RESERVE_BYTES} do not fit"
            )
        try:
            _take(mapping, fd, start, size)
        except OSError as error:
            why = os.strerror(error.errno or 0)
            raise ConfigError(f"store.host_bytes: cannot allocate {total} bytes, {start} were taken: {why}") from error


def advise_huge(mapping: mmap.mmap) -> None:
    """Map in huge pages what lies in huge pages; nothing where kernel or file system has none."""
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def huge_bytes(path: Path) -> int:
    """Bytes of this process's mappings of a file that lie in huge pages."""
    found, inside = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                inside = line.rstrip().endswith(str(path))
            elif inside and line.startswith("ShmemPmdMapped:"):
                found += int(line.split()[1]) * 1024
    return found


def _take(mapping: mmap.mmap, fd: int, start: int, size: int) -> None:
    try:
        mapping.madvise(_MADV_POPULATE_WRITE, start, size)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Before Linux 5.14: take the file's pages, then touch each, so that they count as this process's.
        os.posix_fallocate(fd, start, size)
        for page in range(start, start + size, mmap.PAGESIZE):
            mapping[page] = mapping[page]
