"""kill -9 of clients and of the daemon under load: no wrong byte, nothing left behind, all comes back in time."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.errors import DaemonUnavailable
from headrace.kvstore.checksum import digest
from headrace.kvstore.client import NodeClient
from headrace.kvstore.testing import LAYOUT, DaemonFixture, blocks_of, content, put

CHURN = Path(__file__).parent / "workers" / "churn.py"


class Churn:
    def __init__(self, daemon, name, seed):
        command = [sys.executable, str(CHURN), f"unix:{daemon.socket}", name, str(seed)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "ready\n"

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        out, _ = self.process.communicate(timeout=10)
        assert self.process.returncode == 0, out
        return json.loads(out)


@pytest.fixture
def node(tmp_path):
    made = DaemonFixture(tmp_path, slots=12)
    yield made
    made.close()


def check_every_visible_block(client, chains):
    for names in chains:
        for lease in client.lease(names):
            if lease is not None:
                assert digest(client.slot_view(lease.slot)[: LAYOUT.payload_bytes]) == lease.digest
        client.release(names)


def test_killed_clients_leave_no_lease_no_slot_and_no_wrong_byte(node):
    watcher = node.client("watcher")
    steady = Churn(node, "steady", 99)
    for seed in range(10):
        victim = Churn(node, "victim", seed)
        time.sleep(0.1 + 0.03 * seed)
        victim.kill()
    tally = steady.end()
    assert tally["reads"] > 0
    assert tally["puts"] > 0
    idle = ("host_leased", "host_writing", "host_quarantined")
    node.settle(lambda: all(watcher.stats()[key] == 0 for key in idle), 2.0)
    stats = watcher.stats()
    assert stats["host_free"] + stats["host_ready"] == 12
    assert stats["host_clients"] == 1
    check_every_visible_block(watcher, _chains())


def test_a_stopped_writer_keeps_its_slots_quarantined_until_it_is_dead(node, names):
    """SIGSTOP in mid-write: the lease ends, the process may go on writing any time, so its slots wait for its end."""
    watcher = node.client("watcher")
    code = (
        "import sys, time; from headrace.kvstore.client import NodeClient; from headrace.kvstore.testing import *;"
        "from headrace.kvstore.names import private_name;"
        "c = NodeClient(sys.argv[1], Hello(name='w', role='decode', incarnation='i', fingerprint=FINGERPRINT), LAYOUT);"
        "print(c.begin_put([(private_name(), None, 0)])[0], flush=True); time.sleep(60)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, f"unix:{node.socket}"], stdout=subprocess.PIPE, text=True)
    slot = int(writer.stdout.readline())
    writer.send_signal(signal.SIGSTOP)
    node.settle(lambda: watcher.stats()["host_quarantined"] == 1)
    time.sleep(1.5)  # longer than the grace
    assert watcher.stats()["host_quarantined"] == 1
    got = [s for s in put(watcher, names, 0, 12) if s >= 0]
    assert slot not in got
    assert len(got) == 11
    writer.kill()
    writer.wait()
    node.settle(lambda: watcher.stats()["host_quarantined"] == 0)


def test_a_killed_daemon_is_survived_and_leaves_nothing(node):
    workers = [Churn(node, f"decode-0.{i}", i) for i in range(2)]
    for _ in range(10):
        time.sleep(0.3)
        node.kill()
        assert len(node.files()) == 1
        time.sleep(0.1)
        node.start()
        assert len(node.files()) == 1, "the dead daemon's arena was not removed"
    time.sleep(0.5)
    tallies = [worker.end() for worker in workers]
    assert all(t["lost"] > 0 and t["reads"] > 0 and t["puts"] > 0 for t in tallies), tallies
    watcher = node.client("watcher")
    stats = watcher.stats()
    assert stats["host_clients"] == 1
    assert stats["host_free"] + stats["host_ready"] == 12
    check_every_visible_block(watcher, _chains())


def test_a_dead_daemon_is_an_error_at_once_and_leases_are_over(node, names):
    client = node.client()
    put(client, names, 0, 2, keep_lease=True)
    view = client.slot_view(0)
    node.kill()
    with pytest.raises(DaemonUnavailable):
        client.match(names)
    assert not client.lease_valid()
    with pytest.raises(DaemonUnavailable):
        client.reconnect()
    assert bytes(view[:8]) == bytes(8)  # the old mapping is still there: no SIGBUS, no other block's bytes
    node.start()
    client.reconnect()
    assert client.match(names) == 0
    assert put(client, names, 0, 2) == [0, 1]


def test_reconnect_leaves_a_daemon_that_ended_before_any_call_noticed(node, names):
    client = node.client()
    for end in (node.kill, lambda: (node.process.terminate(), node.process.wait(5))):
        end()
        node.start()
        client.reconnect()
        assert put(client, names, 0, 2) == [0, 1]
    kept = client.incarnation
    client.reconnect()
    assert client.incarnation == kept, "a connection that works is kept"


def test_a_client_that_was_told_of_the_new_arena_reads_and_writes_that_one(node, names):
    leader, follower = node.client("prefill-0"), node.client("prefill-0")
    node.kill()
    node.start()
    with pytest.raises(DaemonUnavailable):
        leader.match(names)
    leader.reconnect()
    slots = put(leader, names, 0, 1)
    follower.follow(leader.arena)  # it has made no call that could have told it
    assert bytes(follower.slot_view(slots[0])[:8]) == bytes(leader.slot_view(slots[0])[:8]) == content(0)[:8]
    assert follower.arena == leader.arena == str(node.files()[0])
    with pytest.raises(DaemonUnavailable, match="wanted is"):
        follower.follow("the arena of a daemon that has ended since")


def test_heartbeats_keep_leases_of_an_idle_client(node, names):
    client = node.client()
    put(client, names, 0, 2, keep_lease=True)
    time.sleep(2.5)  # lease_s is 1
    assert client.lease_valid()
    assert client.stats()["host_leased"] == 2


def test_announcements_come_back_with_the_client(node, names):
    client = node.client("decode-0.0")
    client.announce(names[:3], [])
    node.kill()
    with pytest.raises(DaemonUnavailable):
        client.announce([names[3]], [names[0]])
    node.start()
    client.reconnect()
    assert client.stats()["device_blocks{rank=decode-0.0}"] == 3


def test_a_second_daemon_at_the_same_socket_is_refused(node, tmp_path):
    with pytest.raises(AssertionError, match="ended with 1"):
        DaemonFixture(tmp_path)
    assert node.client().match([]) == 0
    assert len(node.files()) == 1


def test_many_threads_share_one_client(node, names):
    from concurrent.futures import ThreadPoolExecutor

    client = node.client()

    def work(i):
        for _ in range(30):
            put(client, names, i % 3, i % 3 + 3)
            client.lease(names[:6])
            client.release(names[:6])

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    stats = client.stats()
    assert stats["host_leased"] == stats["host_writing"] == 0
    check_every_visible_block(client, [names[:12]])


def test_a_daemon_that_is_told_to_end_at_once_ends_in_order(tmp_path):
    for round in range(3):
        directory = tmp_path / str(round)
        directory.mkdir()
        made = DaemonFixture(directory, slots=1)
        made.close()  # asserts exit code 0 and no file left


def test_an_incompatible_client_is_refused(node):
    from headrace.errors import IncompatiblePeer
    from headrace.messages import Hello

    hello = Hello(name="x", role="decode", incarnation="i", fingerprint=b"\x01" * 32)
    with pytest.raises(IncompatiblePeer, match="fingerprint"):
        NodeClient(f"unix:{node.socket}", hello, LAYOUT)
    assert blocks_of([]) == []


def _chains():
    import importlib.util

    spec = importlib.util.spec_from_file_location("churn", CHURN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.CHAINS
