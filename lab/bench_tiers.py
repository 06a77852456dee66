"""Speed of the disk and peer tiers beside yardsticks of the same run: suites of `lab.bench_store`.

The slabs are GLM-5.2's. Reads and writes of the disk tier go through `DiskStore` (bookkeeping, threads, digest check of
reads) into page-aligned memory; the yardstick is `fio` with the same block size, depth and O_DIRECT on the same file
system, or, without fio, a plain loop of threads. A peer fetch goes through tickets, data connection and digest check;
the yardstick is a raw TCP socket copy of the same bytes between two processes.
"""

import asyncio
import json
import mmap
import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from headrace.kvstore.base import BlockMeta
from headrace.kvstore.checksum import digest
from headrace.kvstore.disk.file import open_file, slot_start
from headrace.kvstore.disk.record import PAGE_BYTES
from headrace.kvstore.disk.store import DiskStore
from headrace.kvstore.disk.tier import DiskTier
from headrace.kvstore.layout import SlabLayout
from headrace.kvstore.names import chain, namespace
from headrace.kvstore.policies import make_policy
from headrace.kvstore.testing import DaemonFixture, put_bytes
from headrace.lab.report.rows import Row, row

GLM = SlabLayout(78, (0, 1, 2, *range(6, 78, 4)), True, "tile656")
ROOT = namespace(bytes(32), "bench")
DEPTH = 4
DISK_SLABS = 64
PEER_SLABS = 64
PORTS = 2


# --- disk -------------------------------------------------------------------------------------------------------------


def bench_disk(rounds: int, directory: Path | None = None) -> Iterator[Row]:
    """`directory`: on the file system to measure; default: the working directory."""
    rounds = max(3, rounds // 4)
    with tempfile.TemporaryDirectory(dir=directory or Path.cwd()) as home:
        tier: dict[str, list[float]] = {"write": [], "read": []}
        plain: dict[str, list[float]] = {"write": [], "read": []}
        yardstick = "fio" if shutil.which("fio") else "threads with O_DIRECT"
        for _ in range(rounds):
            for what, seconds in asyncio.run(_tier_round(Path(home))).items():
                tier[what].append(seconds)
            for what in plain:
                plain[what].append(_yardstick(Path(home), what))
    total = DISK_SLABS * GLM.slot_bytes / 1e9
    for what in ("write", "read"):
        ours, theirs = statistics.median(tier[what]), statistics.median(plain[what])
        yield row(f"{yardstick}, {what} of 3.5 MB at depth {DEPTH}", total / theirs, "GB/s")
        ratio = statistics.median(p / t for p, t in zip(plain[what], tier[what]))
        yield row(f"disk tier, {what}", total / ours, "GB/s", "≥ 0.8", yardstick, ratio)


async def _tier_round(home: Path) -> dict[str, float]:
    slabs = _aligned(DISK_SLABS)
    names = chain(ROOT, np.arange(64 * DISK_SLABS, dtype="<u4"))
    metas = [BlockMeta(name, names[i - 1] if i else None, i, GLM.slot_bytes) for i, name in enumerate(names)]
    digests = [digest(slab[: GLM.payload_bytes]) for slab in slabs]
    path, size = home / "tier.slabs", slot_start(DISK_SLABS, GLM.slot_bytes)
    disk = DiskStore(
        DiskTier(slots=DISK_SLABS, slot_bytes=GLM.slot_bytes, policy=make_policy("lru", DISK_SLABS)),
        lambda: open_file(path, fingerprint=bytes(32), disk_bytes=size, slot_bytes=GLM.slot_bytes),
        payload_bytes=GLM.payload_bytes,
        threads=DEPTH,
        timeout_s=60.0,
        retry_s=1.0,
    )
    disk.open()
    for name in list(disk.tier.names()):
        disk.drop(name)
    while disk.busy:
        await asyncio.sleep(0.001)
    gate = asyncio.Semaphore(DEPTH)

    async def write(i: int) -> None:
        async with gate:
            assert (await disk.write(metas[i], digests[i], slabs[i])).ok

    async def read(i: int) -> None:
        async with gate:
            assert (await disk.read(names[i], slabs[i])).ok

    seconds = {}
    for what, step in (("write", write), ("read", read)):
        began = time.perf_counter()
        await asyncio.gather(*(step(i) for i in range(DISK_SLABS)))
        seconds[what] = time.perf_counter() - began
    await disk.close()
    return seconds


def _aligned(count: int) -> list[memoryview]:
    memory = mmap.mmap(-1, count * GLM.slot_bytes)
    whole = np.frombuffer(memory, np.uint8)
    whole[:] = np.random.default_rng(1).integers(0, 256, whole.size, np.uint8)
    view = memoryview(memory)
    return [view[i * GLM.slot_bytes : (i + 1) * GLM.slot_bytes] for i in range(count)]


def _yardstick(home: Path, what: str) -> float:
    """Seconds for the same bytes."""
    path, size = home / "plain", DISK_SLABS * GLM.slot_bytes
    if not path.exists():
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            for slab in _aligned(DISK_SLABS):
                file.write(slab)
            os.fsync(file.fileno())
    if shutil.which("fio"):
        # Threads of their own share of the file, each with one synchronous transfer at a time: depth without an engine.
        command = ["fio", "--name=x", f"--filename={path}", f"--rw={what}", "--direct=1", f"--bs={GLM.slot_bytes}"]
        command += [f"--size={size // DEPTH}", f"--offset_increment={size // DEPTH}", f"--numjobs={DEPTH}", "--thread"]
        command += ["--ioengine=psync", "--group_reporting", "--output-format=json"]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        return size / found["jobs"][0][what]["bw_bytes"]
    return _threads(path, what)


def _threads(path: Path, what: str) -> float:
    fd, slabs = os.open(path, os.O_RDWR | os.O_DIRECT), _aligned(DISK_SLABS)
    move = os.pwritev if what == "write" else os.preadv
    began = time.perf_counter()
    with ThreadPoolExecutor(DEPTH) as pool:
        list(pool.map(lambda i: move(fd, [slabs[i]], i * GLM.slot_bytes), range(DISK_SLABS)))
    seconds = time.perf_counter() - began
    os.close(fd)
    return seconds


# --- peers ------------------------------------------------------------------------------------------------------------


def bench_peer(rounds: int) -> Iterator[Row]:
    rounds = max(3, rounds // 4)
    names = chain(ROOT, np.arange(64 * PEER_SLABS, dtype="<u4"))
    fetched, copied = [], []
    with tempfile.TemporaryDirectory() as home:
        nodes = _two_nodes(Path(home))
        try:
            owner, reader = (node.client("prefill-0", "prefill") for node in nodes)
            payload = np.random.default_rng(2).integers(0, 256, GLM.payload_bytes, np.uint8).tobytes()
            put_bytes(owner, names, payload)
            nodes[1].settle(lambda: reader.stats()["peer_known_blocks{peer=node-a}"] >= PEER_SLABS, 10.0)
            for _ in range(rounds):
                began = time.perf_counter()
                while reader.promote(names).ready < PEER_SLABS:
                    time.sleep(0.002)
                fetched.append(time.perf_counter() - began)
                reader.drop(names)
                time.sleep(2.2)  # what came up is held for a moment
                copied.append(_socket_copy(PEER_SLABS, GLM.payload_bytes))
        finally:
            for node in nodes:
                node.close()
    total = PEER_SLABS * GLM.payload_bytes / 1e9
    yield row("raw TCP socket copy, two processes", total / statistics.median(copied), "GB/s")
    ratio = statistics.median(c / f for c, f in zip(copied, fetched))
    yield row("peer fetch, digest checked", total / statistics.median(fetched), "GB/s", "≥ 0.6", "TCP copy", ratio)


def _two_nodes(home: Path) -> list[DaemonFixture]:
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(PORTS)]
    ports = [listener.getsockname()[1] for listener in taken]
    for listener in taken:
        listener.close()
    peers = f"store.peers=[node-a=127.0.0.1:{ports[0]},node-b=127.0.0.1:{ports[1]}]"
    nodes = []
    for name, port in zip(("node-a", "node-b"), ports):
        (home / name).mkdir()
        settings = [f"store.peer_listen=127.0.0.1:{port}", peers, "store.peer_token=bench", "store.peer_timeout_s=30"]
        nodes.append(
            DaemonFixture(home / name, slots=PEER_SLABS + 2, lease_s=10.0, name=name, layout=GLM, settings=settings)
        )
    return nodes


def _socket_copy(count: int, size: int) -> float:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = multiprocessing.get_context("spawn").Process(
            target=_send, args=(listener.getsockname()[1], count, size)
        )
        sender.start()
        connection, _ = listener.accept()
        into = memoryview(bytearray(count * size))
        into[::PAGE_BYTES] = bytes(len(range(0, len(into), PAGE_BYTES)))
        connection.sendall(b"go")
        began, got = time.perf_counter(), 0
        while got < len(into):
            got += connection.recv_into(into[got:])
        seconds = time.perf_counter() - began
        connection.close()
        sender.join()
    return seconds


def _send(port: int, count: int, size: int) -> None:
    data = os.urandom(size)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.recv(2)
        for _ in range(count):
            connection.sendall(data)
