"""One suite for every StoreClient: the fake and a real daemon process. The numbers are DESIGN section 5's rules."""

import pytest

from headrace.errors import DaemonUnavailable, LeaseExpired
from headrace.kvstore.base import PutOutcome
from headrace.kvstore.checksum import digest
from headrace.kvstore.names import private_name
from headrace.kvstore.testing import LAYOUT, blocks_of, content, put


def read(client, lease):
    return bytes(client.slot_view(lease.slot)[: LAYOUT.payload_bytes])


def free(client):
    return client.stats()["host_free"]


def test_put_then_read_back_by_another_client(node, names):
    writer, reader = node.client("prefill-0"), node.client("decode-0.0")
    put(writer, names, 0, 3)
    assert reader.match(names[:5]) == 3
    leases = reader.lease(names[:4])
    assert leases[3] is None
    for depth, lease in enumerate(leases[:3]):
        assert read(reader, lease) == content(depth)
        assert lease.digest == digest(content(depth))
    reader.release(names[:3])
    assert reader.stats()["host_leased"] == 0


def test_match_is_the_leading_run(node, names):
    client = node.client()
    put(client, names, 0, 1)
    put(client, names, 2, 4)
    assert client.match(names[:4]) == 1
    assert client.match(names[1:4]) == 0
    assert [lease is None for lease in client.lease(names[:4])] == [False, True, False, False]


def test_lease_leading_is_match_and_lease_in_one(node, names):
    client = node.client()
    put(client, names, 0, 2)
    put(client, names, 3, 4)
    leases = client.lease_leading(names[:5])
    assert [lease.name for lease in leases] == names[:2]
    assert [read(client, lease) for lease in leases] == [content(0), content(1)]
    assert client.stats()["host_leased"] == 2
    client.release(names[:2])
    assert client.lease_leading(names[4:]) == client.lease_leading([]) == []
    assert client.stats()["host_leased"] == 0


def test_a_block_named_twice_in_one_call_has_two_leases(node, names):
    client = node.client()
    put(client, names, 0, 2)
    client.lease([names[0], names[1], names[0]])
    client.release(names[:2])
    assert client.stats()["host_leased"] == 1
    client.release(names[:2])
    assert client.stats()["host_leased"] == 0
    assert client.stats()["host_stale_releases_total"] == 1


def test_rule_1_nothing_is_visible_before_commit_and_a_failed_batch_leaves_nothing(node, names):
    writer, reader = node.client("a"), node.client("b")
    slots = writer.begin_put(blocks_of(names, 0, 2))
    assert reader.match(names) == 0
    assert reader.lease(names[:1]) == [None]
    writes = [(names[0], slots[0], b"0" * 16), (names[1], slots[1] + 1, b"0" * 16)]
    with pytest.raises(LeaseExpired):
        writer.commit_put(writes, keep_lease=False)
    assert reader.match(names) == 0
    writer.abort_put([(names[0], slots[0]), (names[1], slots[1])])
    assert free(reader) == node.slots


def test_a_block_is_written_once(node, names):
    first, second = node.client("a"), node.client("b")
    (slot,) = first.begin_put(blocks_of(names, 0, 1))
    assert second.begin_put(blocks_of(names, 0, 1)) == [PutOutcome.EXISTS]
    first.commit_put([(names[0], slot, b"0" * 16)], keep_lease=False)
    assert second.begin_put(blocks_of(names, 0, 1)) == [PutOutcome.EXISTS]


def test_a_commit_counts_only_for_the_client_and_the_slot_that_began_it(node, names):
    first, second = node.client("a"), node.client("b")
    (slot,) = first.begin_put(blocks_of(names, 0, 1))
    for client, name in ((second, names[0]), (first, names[1])):
        with pytest.raises(LeaseExpired):
            client.commit_put([(name, slot, b"0" * 16)], keep_lease=False)
    second.abort_put([(names[0], slot)])
    first.commit_put([(names[0], slot, b"0" * 16)], keep_lease=False)
    with pytest.raises(LeaseExpired):
        first.commit_put([(names[0], slot, b"0" * 16)], keep_lease=False)


def test_a_late_commit_or_abort_of_an_earlier_begin_does_not_count_for_the_next(node, names):
    client = node.client()
    block = blocks_of(names, 0, 1)
    (early,) = client.begin_put(block)
    others = client.begin_put([(private_name(), None, 0) for _ in range(node.slots - 1)])
    client.abort_put([(names[0], early)])
    (late,) = client.begin_put(block)  # the only free slot: the same again
    assert late == early
    assert early not in others
    client.abort_put([(names[0], early)])
    for slot in (early, int(late)):
        with pytest.raises(LeaseExpired, match="ticket"):
            client.commit_put([(names[0], slot, b"0" * 16)], keep_lease=False)
    assert client.match(names) == 0
    client.commit_put([(names[0], late, b"1" * 16)], keep_lease=False)
    assert client.lease(names[:1])[0].digest == b"1" * 16


def test_keep_lease_pins_until_released(node, names):
    client = node.client()
    put(client, names, 0, node.slots, keep_lease=True)
    other = [(private_name(), None, 0)]
    assert client.begin_put(other) == [PutOutcome.FULL]
    client.release(names[node.slots - 1 : node.slots])
    assert client.begin_put(other)[0] >= 0


def test_leases_are_counted_and_belong_to_one_client(node, names):
    mine, other = node.client("a"), node.client("b")
    put(mine, names, 0, node.slots)
    mine.lease(names[: node.slots])
    mine.lease(names[: node.slots])
    other.release(names[: node.slots])
    mine.release(names[: node.slots])
    mine.release(names[: node.slots - 1])
    assert mine.stats()["host_leased"] == 1
    assert mine.begin_put([(private_name(), None, 0)]) == [PutOutcome.FULL]
    mine.release(names[: node.slots])
    assert mine.stats()["host_leased"] == 0
    assert mine.stats()["host_stale_releases_total"] > 0
    assert mine.begin_put([(private_name(), None, 0)])[0] >= 0


def test_rule_6_the_child_goes_before_its_parent(node, names):
    client = node.client()
    put(client, names, 0, node.slots)
    client.match(names[:1])
    client.begin_put([(private_name(), None, 0), (private_name(), None, 0)])
    assert client.match(names) == node.slots - 2


def test_rule_6_the_parent_of_a_block_being_written_makes_no_room_for_it(node, names):
    client = node.client()
    put(client, names, 0, node.slots)
    assert client.begin_put(blocks_of(names, node.slots, node.slots + 2)) == [PutOutcome.FULL] * 2
    assert client.match(names) == node.slots


def test_rule_8_a_full_tier_skips_the_write_and_a_block_without_its_parent(node, names):
    client = node.client()
    outcomes = put(client, names, 0, node.slots + 3, keep_lease=True)
    assert [slot >= 0 for slot in outcomes] == [True] * node.slots + [False] * 3
    assert outcomes[-3:] == [PutOutcome.FULL] * 3
    assert client.match(names) == node.slots


def test_rule_3_leases_and_writes_end_with_a_vanished_client(node, names):
    doomed, watcher = node.client("prefill-0"), node.client("watcher")
    put(doomed, names, 0, 2, keep_lease=True)
    doomed.begin_put(blocks_of(names, 2, 4))
    assert watcher.stats()["host_leased"] == 2
    node.vanish(doomed)
    node.settle(lambda: watcher.stats()["host_leased"] == 0, 2.0)
    assert watcher.stats()["host_writing"] == 0
    with pytest.raises(DaemonUnavailable):
        doomed.match(names)
    assert not doomed.lease_valid()
    assert watcher.match(names) == 2


def test_rule_4_slots_of_a_vanished_writer_are_quarantined_first(node, names):
    doomed, watcher = node.client("prefill-0"), node.client("watcher")
    slots = doomed.begin_put(blocks_of(names, 0, 3))
    node.vanish(doomed)
    node.settle(lambda: watcher.stats()["host_quarantined"] == 3)
    got = watcher.begin_put([(private_name(), None, 0) for _ in range(node.slots)])
    assert not set(got) & set(slots)
    with pytest.raises(DaemonUnavailable):
        doomed.match([])
    doomed.reconnect()  # its process lives: this says that it no longer writes
    node.settle(lambda: watcher.stats()["host_quarantined"] == 0)


def test_a_client_that_says_goodbye_needs_no_quarantine(node, names):
    leaving, watcher = node.client("prefill-0"), node.client("watcher")
    put(leaving, names, 0, 1, keep_lease=True)
    leaving.begin_put(blocks_of(names, 1, 3))
    leaving.close()
    stats = watcher.stats()
    assert stats["host_quarantined"] == stats["host_writing"] == stats["host_leased"] == 0
    assert stats["host_free"] == node.slots - 1


def test_reconnect_starts_afresh_under_a_new_incarnation(node, names):
    client = node.client()
    put(client, names, 0, 1, keep_lease=True)
    before = client.incarnation
    node.vanish(client)
    with pytest.raises(DaemonUnavailable):
        client.match(names)
    client.reconnect()
    assert client.incarnation != before
    assert client.lease_valid()
    assert client.match(names) == 1
    assert client.stats()["host_leased"] == 0


def test_drop_hides_at_once_and_frees_with_the_last_lease(node, names):
    reader, other = node.client("a"), node.client("b")
    name = private_name()
    (slot,) = other.begin_put([(name, None, 0)])
    other.commit_put([(name, slot, b"d" * 16)], keep_lease=False)
    (lease,) = reader.lease([name])
    other.drop([name])
    assert other.lease([name]) == [None]
    (again,) = other.begin_put([(name, None, 0)])
    assert again not in (lease.slot, PutOutcome.EXISTS)
    other.abort_put([(name, again)])
    assert free(other) == node.slots - 1
    reader.release([name])
    assert free(other) == node.slots


def test_big_batches_are_one_call(node, names):
    client = node.client()
    assert client.match(names) == 0
    assert client.lease(names) == [None] * len(names)
    assert len(client.begin_put(blocks_of(names))) == len(names)


def test_empty_calls_are_fine(node):
    client = node.client()
    assert client.match([]) == 0
    assert client.lease([]) == client.begin_put([]) == []
    client.release([])
    client.drop([])
    client.commit_put([], keep_lease=True)
    client.abort_put([])
    client.announce([], [])


def test_views_outside_the_arena_are_refused(node):
    client = node.client()
    for slot in (-1, node.slots):
        with pytest.raises(IndexError, match="outside"):
            client.slot_view(slot)
