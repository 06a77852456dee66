"""What a store must survive from outside: kills at bad moments, resets, requests that make no sense."""

import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.errors import IncompatiblePeer
from headrace.kvstore.arena import Arena
from headrace.kvstore.names import private_name
from headrace.kvstore.testing import DaemonFixture, put
from headrace.kvstore.testing_peer import PeerPair

SHM = Path("/dev/shm")
KILLED_WHILE_TAKING_PAGES = """
import os, signal, sys
from pathlib import Path
from headrace.kvstore import memory
from headrace.kvstore.arena import Arena
memory.populate = lambda mapping, fd: os.kill(os.getpid(), signal.SIGKILL)
Arena.create(Path(sys.argv[1]), "run", host_bytes=81920, slot_bytes=8192, owner="killed")
"""


def test_an_arena_whose_daemon_was_killed_while_it_took_pages_is_removed(tmp_path):
    directory = SHM / f"hrtest-{os.getpid()}-{tmp_path.name}"
    directory.mkdir()
    try:
        ended = subprocess.run([sys.executable, "-c", KILLED_WHILE_TAKING_PAGES, str(directory)], check=False)
        assert ended.returncode == -signal.SIGKILL
        assert [path.name for path in directory.iterdir()] == ["run-killed.arena"]
        arena = Arena.create(directory, "run", host_bytes=81920, slot_bytes=8192, owner="next")
        assert [path.name for path in directory.iterdir()] == ["run-next.arena"]
        arena.close()
    finally:
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()


async def test_an_owner_of_reset_data_connections_closes_in_order(tmp_path, names):
    pair = PeerPair(tmp_path, timeout_s=30.0)
    await pair.open()
    port = pair.service._listener.getsockname()[1]
    dialled = [socket.create_connection(("127.0.0.1", port)) for _ in range(24)]
    await pair.reader.settle_until(lambda: len(pair.service._open) == 24, 20.0)
    for connection in dialled:  # More than are served at once: the others still wait when they are reset.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    await pair.close()


async def test_data_connections_are_bounded_and_a_failed_accept_is_not_the_last(tmp_path, names, monkeypatch):
    from headrace.kvstore.peer import owner

    monkeypatch.setattr(owner, "MAX_OPEN", 3)
    pair = PeerPair(tmp_path, timeout_s=1.0)
    await pair.open()
    port = pair.service._listener.getsockname()[1]
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(12)]
    await pair.reader.settle_until(lambda: pair.service.streams == 3, 20.0)  # Served, and over for want of a word.
    assert len(pair.service._open) == 0
    for connection in silent:
        connection.close()
    pair.owner.put(names, 0, 4)
    await pair.known(4)
    assert await pair.reader.bring(names[:4], 20.0) == 4
    await pair.close()


@pytest.mark.parametrize(
    ("block", "tenant", "says"),
    [
        (lambda name: (name, None, -1), b"", "depth of a block is 0 or more"),
        (lambda name: (name, name, 1), b"", "names itself as its parent"),
        (lambda name: (name, None, 0), b"three", "8 bytes or empty, not 5"),
    ],
)
def test_a_put_that_no_tier_could_keep_is_refused_whole(node, names, block, tenant, says):
    client = node.client("prefill-0", "prefill")
    with pytest.raises(IncompatiblePeer, match=says):
        client.begin_put([(names[0], None, 0), block(names[1])], tenant)
    node.settle(lambda: node.client("watcher").stats()["host_writing"] == 0)


def test_garbage_on_the_socket_costs_only_its_own_connection(daemon, names):
    client = daemon.client()
    put(client, names, 0, 4)
    frames = [os.urandom(4096), b"\xff\xff\xff\xff", struct.pack("<I", 5) + b"hello", struct.pack("<I", 1 << 20) + b"x"]
    frames.append(struct.pack("<I", 1) + b"\xc1")
    for frame in frames * 5:
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(daemon.socket))
            raw.sendall(frame)
            raw.shutdown(socket.SHUT_WR)
            raw.settimeout(20)
            while raw.recv(4096):
                pass
    assert client.match(names[:4]) == 4
    assert client.stats()["sessions"] == 1


def test_an_arena_and_a_disk_that_do_not_fit_a_small_file_system(tmp_path):
    """The arena is refused with numbers; a disk tier that finds no room is off, and the daemon serves."""
    small = tmp_path / "small"
    small.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(small)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("no right to mount a file system")
    try:
        with pytest.raises(Exception, match="do not fit into"):
            Arena.create(small, "run", host_bytes=16 << 20, slot_bytes=1 << 20, owner="big")
        assert list(small.iterdir()) == []
        lines = [f"store.disk_dir={small}", f"store.disk_bytes={64 << 20}", "store.disk_retry_s=0.2"]
        node = DaemonFixture(tmp_path, settings=lines)
        client = node.client()
        assert client.stats()["disk_on"] == 0
        node.settle(lambda: client.match([private_name()]) == 0)
        assert sum(path.stat().st_blocks for path in small.iterdir()) * 512 < 1 << 20
        node.close()
    finally:
        subprocess.run(["umount", str(small)], check=True)
