"""What tools see and do, against a real daemon; and the event log that a daemon writes."""

import json
import time

import pytest

from headrace.errors import ConfigError, DaemonUnavailable
from headrace.kvstore.daemon.events import HOST_PLACE
from headrace.kvstore.daemon.journal import Journal
from headrace.kvstore.legs import Legs
from headrace.kvstore.names import namespace, private_name, tenant_id
from headrace.kvstore.testing import FINGERPRINT, LAYOUT, DaemonFixture, blocks_of, put
from headrace.kvstore.tool import PAGE_BLOCKS, StoreTool


@pytest.fixture
def tool(daemon):
    made = StoreTool(f"unix:{daemon.socket}")
    yield made
    made.close()


def test_it_lists_what_is_there(daemon, tool, names):
    client = daemon.client("decode-0.0")
    put(client, names, 0, 3, keep_lease=True)
    client.lease(names[1:2])
    client.announce(names[:2], [])
    listed = {block.name: block for block in tool.blocks()}
    assert list(listed) == sorted(names[:3])
    assert [listed[name].depth for name in names[:3]] == [0, 1, 2]
    assert [listed[name].leases for name in names[:3]] == [1, 2, 1]
    assert tool.places() == {HOST_PLACE: sorted(names[:3]), "decode-0.0": sorted(names[:2])}
    assert tool.values()["host_ready"] == 3
    assert tool.values()["sessions"] == 2


def test_long_lists_come_in_pages(tmp_path):
    daemon = DaemonFixture(tmp_path, slots=2 * PAGE_BLOCKS + 5)
    client, tool = daemon.client(), StoreTool(f"unix:{daemon.socket}")
    blocks = [(i.to_bytes(32, "big"), None, 0) for i in range(1, 2 * PAGE_BLOCKS + 4)]
    slots = client.begin_put(blocks)
    client.commit_put([(b[0], s, b"d" * 16) for b, s in zip(blocks, slots)], keep_lease=False)
    assert [block.name for block in tool.blocks()] == [block[0] for block in blocks]
    tool.close()
    daemon.close()


def test_verify_finds_a_flipped_bit_drops_the_block_and_uses_nothing(daemon, tool, names):
    client = daemon.client()
    put(client, names, 0, 5)
    before = client.stats()
    (lease,) = client.lease(names[3:4])
    client.slot_view(lease.slot)[LAYOUT.payload_bytes - 1] ^= 1
    client.release(names[3:4])
    verdict = tool.verify()
    assert (verdict.checked, verdict.gone, verdict.corrupt) == (5, 0, [names[3]])
    assert verdict.bytes == 5 * LAYOUT.payload_bytes
    assert client.match(names) == 3
    after = client.stats()
    assert after["host_corrupt_total"] == 1
    assert after["host_hits_total"] == before["host_hits_total"] + 1, "the check counts as no use"
    assert after["host_leased"] == 0
    assert tool.verify().corrupt == []


def test_flush_pin_and_quota(daemon, tool, names):
    client = daemon.client()
    put(client, names, 0, 4)
    assert tool.pin(names[:2], 30.0) == 2
    assert tool.flush() == 2
    assert client.match(names) == 2
    assert tool.unpin(names[:2]) == 2
    tenant = tool.tenant(b"salt")
    assert tenant == tenant_id(namespace(FINGERPRINT, b"salt"))
    assert tool.set_quota(tenant, 1) == 0
    assert client.begin_put(blocks_of(names, 4, 5), tenant)[0] >= 0
    assert client.begin_put([(b"n" * 32, None, 0)], tenant) == [-2]


def test_a_tool_without_daemon_says_so(tmp_path):
    with pytest.raises(DaemonUnavailable, match="no node daemon at"):
        StoreTool(f"unix:{tmp_path}/none.sock")


# --- counters --------------------------------------------------------------------------------------------------------


def test_every_cause_has_its_counter(node, names):
    client = node.client()
    put(client, names, 0, 8, keep_lease=True)
    put(client, names, 8, 9)
    client.release(names[:8])
    put(client, names[20:], 0, 2)
    client.lease([*names[:6], names[7]])
    client.drop([names[20]])
    client.drop([names[0]], corrupt=True)
    stats = client.stats()
    got = {key.removeprefix("host_").removesuffix("_total"): value for key, value in stats.items() if "_total" in key}
    assert (got["hits"], got["misses"]) == (6, 1)
    assert (got["puts"], got["put_full"], got["evictions"]) == (10, 1, 2)
    assert (got["dropped"], got["corrupt"]) == (2, 1)


def test_the_age_of_the_oldest_lease(node, names):
    client = node.client()
    put(client, names, 0, 2)
    client.lease(names[:1])
    time.sleep(0.3)
    client.lease(names[:2])
    assert 0.3 <= client.stats()["host_oldest_lease_s"] < 2.0
    client.release(names[:1])
    client.release(names[:1])
    assert client.stats()["host_oldest_lease_s"] < 0.3
    client.release(names[1:2])
    assert client.stats()["host_oldest_lease_s"] == 0.0


def test_a_leg_that_fails_moved_nothing():
    legs = Legs()
    with legs.copy("host_to_device", 100):
        pass
    with pytest.raises(OSError, match="short"), legs.copy("host_to_device", 50):
        raise OSError("short copy")
    values = legs.values()
    assert values["leg_bytes_total{leg=host_to_device}"] == 100
    assert values["leg_failures_total{leg=host_to_device}"] == 1
    assert values["leg_seconds_total{leg=host_to_device}"] > 0


# --- the event log ---------------------------------------------------------------------------------------------------


def test_the_event_log_tells_who_read_what_and_why_it_went(tmp_path, names):
    path = tmp_path / "store.jsonl"
    daemon = DaemonFixture(tmp_path, slots=4, event_log=path)
    client = daemon.client("prefill-0", "prefill")
    client.lease(names[:3])
    put(client, names, 0, 3)
    client.lease(names[:3])
    client.release(names[:3])
    put(client, names[10:], 0, 2)
    client.drop([names[0]], corrupt=True)
    client.begin_put([(private_name(), None, 0)])
    client.close()
    daemon.close()
    header, *rows = map(json.loads, path.read_text().splitlines())
    assert header["headrace_store_log"] == 1
    assert (header["slots"], header["block_tokens"]) == (4, 64)
    ids = [name[:8].hex() for name in names]
    assert [row["op"] for row in rows] == ["joined", "read", "put", "read", "gone", "put", "gone", "left"]
    assert (rows[1]["hit"], rows[3]["hit"]) == (0, 3)
    assert rows[2] | {"s": 0} == {
        "s": 0, "op": "put", "who": "prefill-0", "role": "prefill", "parent": None, "blocks": ids[:3]
    }  # fmt: skip
    assert (rows[4]["why"], rows[4]["blocks"]) == ("evicted", [ids[2]])
    assert (rows[6]["why"], rows[6]["blocks"]) == ("corrupt", [ids[0]])
    assert [row["s"] for row in rows] == sorted(row["s"] for row in rows)


def test_an_event_log_ends_at_its_size_and_never_the_daemon(tmp_path, names, caplog):
    journal = Journal(tmp_path / "log", {}, 600, lambda: 0.0)
    for _ in range(20):
        journal.read("prefill-0", "prefill", names[:3], 0)
    journal.close()
    lines = (tmp_path / "log").read_text().splitlines()
    assert 3 <= len(lines) < 20
    assert all(json.loads(line) for line in lines)
    assert "ends: it would be larger than 600 bytes" in caplog.text
    with pytest.raises(ConfigError, match=r"store\.event_log: cannot write"):
        Journal(tmp_path / "none" / "log", {}, 600)


def test_a_full_disk_ends_the_event_log_alone(names, caplog):
    from pathlib import Path

    journal = Journal(Path("/dev/full"), {}, 1 << 20)
    for _ in range(3):
        journal.read("prefill-0", "prefill", names[:3], 0)
        journal.flush()
    journal.close()
    assert "No space left" in caplog.text
