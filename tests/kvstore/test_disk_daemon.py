"""The disk tier of a real daemon process: blocks outlive it, whatever way it ends."""

import dataclasses
import time

import pytest

from headrace.errors import ConfigError
from headrace.ids import Tier
from headrace.kvstore.checksum import digest
from headrace.kvstore.testing import LAYOUT, DaemonFixture, content, put

SLOT = LAYOUT.slot_bytes


@pytest.fixture
def make(tmp_path):
    made = []

    def start(slots=8, disk_slots=400, **settings):
        wanted = {"disk_bytes": 8192 + disk_slots * (4096 + SLOT), "disk_dir": tmp_path / "disk", "disk_admit_uses": 1}
        lines = [f"store.{key}={value}" for key, value in {**wanted, **settings}.items()]
        made.append(DaemonFixture(tmp_path, slots=slots, settings=lines))
        return made[-1]

    yield start
    for node in made:
        node.close()


def bring(client, names, timeout_s=10.0):
    end = time.monotonic() + timeout_s
    while client.promote(names).coming:
        assert time.monotonic() < end
        time.sleep(0.003)
    return client.promote(names).ready


def check(client, names, first=0):
    """Every block of the run is what `put` wrote; returns the tiers they came from."""
    leases = client.lease(names)
    for depth, lease in enumerate(leases, first):
        view = client.slot_view(lease.slot)[: LAYOUT.payload_bytes]
        assert view == content(depth)
        assert digest(view) == lease.digest
    client.release(names)
    return [lease.tier for lease in leases]


def test_blocks_come_back_after_an_eviction_with_their_tier(make, names):
    node = make()
    client = node.client("prefill-0", "prefill")
    assert client.has_lower_tiers
    put(client, names, 0, 6)
    node.settle(lambda: client.stats()["disk_ready"] == 6)
    put(client, names[100:], 0, 8)
    assert client.match(names[:6]) == 0
    node.settle(lambda: client.stats()["disk_ready"] == 14)
    client.drop(names[100:108])
    assert bring(client, names[:6]) == 6
    assert check(client, names[:6]) == [Tier.DISK] * 6
    assert check(client, names[:6]) == [Tier.HOST] * 6
    stats = client.stats()
    assert stats["disk_reads_total"] == 6
    assert stats["promoted_total{from=disk}"] == 6


def test_a_killed_daemon_comes_back_with_at_least_99_percent_of_what_was_on_disk(make, names):
    """Rule 9. 300 blocks through a host tier of 8, the daemon killed while it goes on writing."""
    node = make()
    client = node.client("prefill-0", "prefill")
    for start in range(0, 300, 4):
        put(client, names, start, start + 4)
        node.settle(lambda wanted=start + 4: client.stats()["disk_ready"] >= wanted)
        if start + 4 < 300:
            node_free(client, names[: start + 4])
    durable = int(client.stats()["disk_ready"])
    put(client, names[310:], 0, 8)
    node.kill()
    node.start()
    client.reconnect()
    stats = client.stats()
    assert durable == 300
    assert stats["disk_recovered_total"] >= 0.99 * durable
    hit = 0
    for start in range(0, 300, 8):
        part = names[start : min(start + 8, 300)]
        ready = bring(client, part)
        check(client, part[:ready], start)
        hit += ready
        node_free(client, part)
    assert hit >= 0.99 * durable
    assert client.stats()["disk_checksum_failures_total"] <= 8


def node_free(client, names):
    """Push blocks out of the host tier without dropping them below: fill it with private ones."""
    from headrace.kvstore.names import private_name

    slots = int(client.stats()["host_slots"])
    fillers = [private_name() for _ in range(slots)]
    outcomes = client.begin_put([(name, None, 0) for name in fillers])
    client.abort_put([(name, slot) for name, slot in zip(fillers, outcomes) if slot >= 0])


def test_sigterm_keeps_everything(make, names):
    node = make()
    client = node.client("prefill-0", "prefill")
    put(client, names, 0, 8)
    node.settle(lambda: client.stats()["disk_ready"] == 8)
    node.process.terminate()
    assert node.process.wait(5) == 0
    node.start()
    client.reconnect()
    assert bring(client, names[:8]) == 8
    check(client, names[:8])


def test_a_flush_empties_the_disk_too(make, names):
    node = make()
    client = node.client("prefill-0", "prefill")
    put(client, names, 0, 4)
    node.settle(lambda: client.stats()["disk_ready"] == 4)
    from headrace.messages import FlushRequest

    assert client._call(FlushRequest()).blocks == 8
    node.settle(lambda: client.stats()["disk_free"] == 400)
    node.kill()
    node.start()
    client.reconnect()
    assert client.stats()["disk_recovered_total"] == 0


def test_a_node_without_a_disk_tier_says_so_and_promises_nothing(daemon, names):
    client = daemon.client("prefill-0", "prefill")
    assert not client.has_lower_tiers
    put(client, names, 0, 2)
    assert client.promote(names[:4]) == (2, 0)


def test_a_disk_tier_needs_a_directory():
    from headrace.config import StoreConfig
    from headrace.kvstore.daemon.disk import make_disk_side

    with pytest.raises(ConfigError, match=r"store\.disk_dir"):
        make_disk_side(dataclasses.replace(StoreConfig(), disk_bytes=1 << 20), "node-0", bytes(32), LAYOUT)
