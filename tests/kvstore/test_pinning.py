"""What a rank tells the GPU driver of the mapped host tier. The driver here records; test_transfer pins for real."""

import logging

import pytest

from headrace.errors import DaemonUnavailable
from headrace.kvstore.client import NodeClient
from headrace.kvstore.copiers import map_watcher_for, pinning
from headrace.kvstore.copiers.pinning import Pinning
from headrace.kvstore.copiers.runtime import GpuError
from headrace.kvstore.testing import LAYOUT, DaemonFixture


class Driver:
    """Remembers what is registered; refuses from the `limit`-th registration on."""

    def __init__(self, limit=1 << 30):
        self.limit, self.registered, self.seen = limit, {}, []

    def register(self, address, size):
        if len(self.registered) >= self.limit:
            raise GpuError("pinning failed: error 2")
        assert address % 4096 == 0
        assert address not in self.registered
        self.registered[address] = size
        self.seen.append(size)

    def unregister(self, address):
        del self.registered[address]


@pytest.fixture
def node(tmp_path):
    made = DaemonFixture(tmp_path, slots=5)
    yield made
    made.close()


def connect(node, watcher):
    return NodeClient(f"unix:{node.socket}", node.hello("decode-0.0", "decode"), LAYOUT, watcher)


def test_the_whole_arena_is_registered_in_chunks_and_nothing_stays(node, monkeypatch):
    monkeypatch.setattr(pinning, "CHUNK_BYTES", 2 * LAYOUT.slot_bytes)
    driver = Driver()
    watcher = Pinning(driver)
    client = connect(node, watcher)
    assert driver.seen == [2 * LAYOUT.slot_bytes, 2 * LAYOUT.slot_bytes, LAYOUT.slot_bytes]
    assert watcher.pinned_bytes == 5 * LAYOUT.slot_bytes
    assert sum(driver.registered.values()) == watcher.pinned_bytes
    client.close()
    assert driver.registered == {}


def test_no_slot_lies_across_two_registrations(node, monkeypatch):
    """The driver refuses a copy from memory that was registered in two pieces."""
    monkeypatch.setattr(pinning, "CHUNK_BYTES", 2 * LAYOUT.slot_bytes + 4096)
    driver = Driver()
    client = connect(node, Pinning(driver))
    assert [size // LAYOUT.slot_bytes for size in driver.seen] == [2, 2, 1]
    assert all(size % LAYOUT.slot_bytes == 0 for size in driver.seen)
    monkeypatch.setattr(pinning, "CHUNK_BYTES", 1)
    other = Driver()
    connect(node, Pinning(other)).close()
    assert other.seen == [LAYOUT.slot_bytes] * 5
    client.close()


def test_a_new_daemon_gets_the_old_arena_unpinned_first(node):
    driver = Driver(limit=1)  # two arenas at once would be refused
    watcher = Pinning(driver)
    client = connect(node, watcher)
    node.kill()
    node.start()
    with pytest.raises(DaemonUnavailable):
        client.match([])
    client.reconnect()
    assert len(driver.registered) == 1
    assert watcher.pinned_bytes == 5 * LAYOUT.slot_bytes
    client.reconnect()
    assert len(driver.seen) == 2
    client.close()
    assert driver.registered == {}


def test_a_driver_that_refuses_costs_speed_not_service(node, monkeypatch, caplog):
    monkeypatch.setattr(pinning, "CHUNK_BYTES", 2 * LAYOUT.slot_bytes)
    driver = Driver(limit=2)
    watcher = Pinning(driver)
    with caplog.at_level(logging.WARNING):
        client = connect(node, watcher)
    assert "ulimit -l" in caplog.text
    assert (driver.registered, watcher.pinned_bytes) == ({}, 0)
    client.slot_view(4)[:3] = b"abc"
    client.close()


def test_pinning_that_takes_longer_than_a_lease_keeps_the_session(node, monkeypatch):
    import time

    monkeypatch.setattr(pinning, "CHUNK_BYTES", LAYOUT.slot_bytes)

    class Slow(Driver):
        def register(self, address, size):
            time.sleep(0.4)  # five chunks of a lease of one second
            super().register(address, size)

    client = connect(node, Pinning(Slow()))
    assert client.match([]) == 0
    assert client.lease_valid()
    client.close()


def test_plain_memory_is_as_good_on_a_cpu():
    assert map_watcher_for("cpu") is None
    assert isinstance(map_watcher_for("cuda:1"), Pinning)
