"""The disk tier behind a host tier, in one process: who goes down when, what comes up, what survives, and what happens
when the device misbehaves."""

import asyncio
import os

import pytest

from headrace.errors import ConfigError
from headrace.kvstore.checksum import digest
from headrace.kvstore.disk.file import slot_start
from headrace.kvstore.faults import Fault
from headrace.kvstore.names import private_name
from headrace.kvstore.policies.write import make_write_policy
from headrace.kvstore.testing_lower import PAYLOAD_BYTES, SLOT_BYTES, LowerFixture, LowerSettings, payload_of


def on_disk(node, names):
    return [node.disk.has(name) for name in names]


async def filled(node, names, count):
    """`count` blocks of the chain are on disk and nothing is in the host tier."""
    for number in range(count):
        node.put(names, number, number + 1)
        await node.settle()
        node.evict_host()
    assert on_disk(node, names[:count]) == [True] * count
    assert node.host.names() == []


# --- write policies and admission -------------------------------------------------------------------------------------


async def test_through_writes_at_once_and_the_filter_wants_a_second_use(tmp_path, names):
    node = LowerFixture(tmp_path, LowerSettings(admit_uses=2))
    node.put(names, 0, 2)
    await node.settle()
    assert on_disk(node, names[:2]) == [False, False]
    node.lower.used(names[:1])
    await node.settle()
    assert on_disk(node, names[:2]) == [True, False]
    await node.close()


async def test_through_selective_waits_for_its_hits(tmp_path, names):
    node = LowerFixture(tmp_path, LowerSettings(write_policy="through_selective:3"))
    node.put(names, 0, 1)
    for hits in range(3):
        await node.settle()
        assert on_disk(node, names[:1]) == [False], hits
        node.lower.used(names[:1])
    await node.settle()
    assert on_disk(node, names[:1]) == [True]
    await node.close()


async def test_back_writes_what_the_host_tier_lets_go_ahead_of_need(tmp_path, names):
    node = LowerFixture(tmp_path, LowerSettings(write_policy="back", host_slots=4))
    node.put(names, 0, 3)
    await node.settle()
    assert on_disk(node, names[:3]) == [False] * 3
    node.put(names, 3, 4)
    await node.settle(lambda: node.host.free > 0)
    # The tail of the chain went, child before parent, and its bytes are below.
    assert on_disk(node, names[:4]) == [False, False, False, True]
    assert node.host.free == 1
    for i in range(4, 12):
        node.put(names, i, i + 1)
        await node.settle(lambda: node.host.free > 0)
    reachable = [node.disk.has(name) or node.host.find([name])[0] is not None for name in names[:12]]
    assert reachable == [True] * 12
    assert node.host.counters.evictions >= 8
    await node.close()


async def test_back_lets_go_without_writing_what_the_filter_declines(tmp_path, names):
    node = LowerFixture(tmp_path, LowerSettings(write_policy="back", admit_uses=2, host_slots=2))
    node.put(names, 0, 2)
    await node.settle(lambda: node.host.free > 0)
    assert on_disk(node, names[:2]) == [False, False]
    assert node.lower.values()["demotion_declined_total"] == 1
    await node.close()


async def test_private_blocks_never_go_to_disk(tmp_path):
    for policy in ("through", "back"):
        node = LowerFixture(tmp_path, LowerSettings(write_policy=policy, host_slots=2))
        node.put([private_name()])
        node.put([private_name()])
        node.tick()
        await node.settle()
        assert node.tier.stats()["ready"] == node.tier.stats()["writes_total"] == 0
        await node.close()


@pytest.mark.parametrize("name", ["sideways", "through:1", "through_selective", "through_selective:0", "back:2", ""])
def test_an_unknown_write_policy_names_the_known_ones(name):
    with pytest.raises(ConfigError, match="through_selective:<hits>"):
        make_write_policy(name)


# --- coming up --------------------------------------------------------------------------------------------------------


async def test_blocks_come_up_with_their_bytes_and_their_tier(tmp_path, names):
    node = LowerFixture(tmp_path, LowerSettings(host_slots=8))
    await filled(node, names, 6)
    assert node.lower.promote(names[:8], urgent=True) == (0, 6)
    assert await node.bring(names[:8]) == 6
    for name in names[:6]:
        assert node.read(name) == payload_of(name)
    assert node.lower.values()["promoted_total{from=disk}"] == 6
    await node.close()


async def test_a_block_that_comes_up_still_counts_for_its_tenant(tmp_path, names):
    node = LowerFixture(tmp_path)
    await filled(node, names, 1)
    (slot,) = node.host.begin_put(node.owner, [(names[1], names[0], 1)], b"somebody")
    node.view(slot)[:PAYLOAD_BYTES] = payload_of(names[1])
    node.host.commit_put(node.owner, [(names[1], slot, digest(payload_of(names[1])))], keep_lease=False)
    node.lower.used([names[1]])
    await node.settle()
    await node.crash()
    assert await node.bring(names[:2]) == 2
    assert [node.host.find([name])[0].meta.tenant for name in names[:2]] == [b"", b"somebody"]
    await node.close()


async def test_a_gap_ends_the_wait_at_the_gap(tmp_path, names):
    node = LowerFixture(tmp_path, LowerSettings(host_slots=8))
    await filled(node, names, 6)
    node.disk.drop(names[3])
    assert node.lower.promote(names[:6], urgent=True) == (0, 3)
    assert await node.bring(names[:6]) == 3
    await node.close()


async def test_a_host_tier_that_is_held_gives_up_on_what_does_not_fit(tmp_path, names):
    node = LowerFixture(tmp_path, LowerSettings(host_slots=4))
    await filled(node, names, 6)
    assert await node.bring(names[:6]) == 4
    for name in names[:4]:
        assert node.lease(name) is not None
    node.lower.promote(names[:6], urgent=True)
    await node.settle()
    assert node.lower.promote(names[:6], urgent=True).coming == 0
    for name in names[:4]:
        node.release(name)
    await node.close()


async def test_what_came_up_is_kept_until_it_is_leased(tmp_path, names):
    """A second prompt must not push out what was just brought for the first."""
    node = LowerFixture(tmp_path, LowerSettings(host_slots=2, disk_slots=16))
    await filled(node, names, 2)
    assert await node.bring(names[:2]) == 2
    assert node.put(names, 5, 7) == []
    assert node.lease(names[0]) is not None
    assert node.lease(names[1]) is not None
    node.release(names[0])
    node.release(names[1])
    assert len(node.put(names, 5, 7)) == 2
    await node.close()


async def test_restores_overtake_demotions_and_prefetches_come_last(tmp_path, names):
    node = LowerFixture(tmp_path, LowerSettings(host_slots=24, disk_slots=64, depth=1))
    await filled(node, names, 6)
    node.plan.add("disk.*", Fault.SLOW, seconds=0.01)
    order = []
    real_read, real_write = node.disk.read, node.disk.write

    async def read(name, into):
        order.append(names.index(name))
        return await real_read(name, into)

    async def write(meta, digest, slab):
        order.append(names.index(meta.name))
        return await real_write(meta, digest, slab)

    node.disk.read, node.disk.write = read, write
    node.put(names, 20, 24)
    node.lower.promote(names[:3], urgent=False)
    node.lower.promote(names[3:6], urgent=True)
    await node.settle()
    # The first write was running already.
    assert order == [20, 3, 4, 5, 21, 22, 23, 0, 1, 2]
    await node.close()


async def test_the_queues_are_bounded_and_what_finds_them_full_is_only_skipped(tmp_path, names, monkeypatch):
    from headrace.kvstore.daemon import lower
    from headrace.kvstore.daemon.pump import Lane

    monkeypatch.setattr(lower, "QUEUE_BLOCKS", {Lane.RESTORE: 2, Lane.DEMOTE: 2, Lane.PREFETCH: 1})
    node = LowerFixture(tmp_path, LowerSettings(host_slots=12, depth=1))
    node.plan.add("disk.write", Fault.SLOW, seconds=0.01)
    assert len(node.put(names, 0, 8)) == 8
    assert node.lower.values()["disk_queue_refused_total{lane=demote}"] == 5
    await node.settle()
    assert sum(on_disk(node, names[:8])) == 3
    assert node.host.stats()["leased"] == 0
    node.evict_host()
    # One is read at once, two wait; the third finds the lane full and is asked for again.
    node.plan.clear()
    assert await node.bring(names[:3]) == 3
    await node.close()


# --- room -------------------------------------------------------------------------------------------------------------


async def test_a_full_disk_evicts_children_before_parents(tmp_path, names):
    node = LowerFixture(tmp_path, LowerSettings(host_slots=4, disk_slots=4))
    await filled(node, names, 4)
    other = names[100:103]
    node.put(other)
    await node.settle()
    assert on_disk(node, other) == [True] * 3
    assert on_disk(node, names[:4]) == [True, False, False, False]
    assert node.tier.counters.evictions == 3
    await node.close()


async def test_a_block_that_is_being_read_is_not_evicted_and_the_write_is_skipped(tmp_path, names):
    node = LowerFixture(tmp_path, LowerSettings(host_slots=8, disk_slots=1))
    await filled(node, names, 1)
    held = node.tier.begin_read(names[0])
    node.put(names[50:51])
    await node.settle()
    assert on_disk(node, [names[0], names[50]]) == [True, False]
    assert node.tier.counters.full == 1
    node.tier.end_read(held)
    await node.close()


# --- restart ----------------------------------------------------------------------------------------------------------


async def test_a_crash_loses_nothing_that_was_written(tmp_path, names):
    """Rule 9."""
    node = LowerFixture(tmp_path, LowerSettings(host_slots=8, disk_slots=64))
    await filled(node, names, 40)
    await node.crash()
    assert node.tier.counters.recovered == 40
    for start in range(0, 40, 8):
        part = names[start : start + 8]
        assert await node.bring(part) == 8
        assert [node.read(name) for name in part] == [payload_of(name) for name in part]
        node.evict_host()
    await node.close()


async def test_a_torn_write_is_found_after_a_restart_and_never_served(tmp_path, names):
    """Rule 9, second half: the record is whole, half of the slab is not."""
    node = LowerFixture(tmp_path, LowerSettings(host_slots=8))
    await filled(node, names, 3)
    node.plan.add("disk.write", Fault.TORN, times=1)
    node.put(names, 3, 4)
    await node.settle()
    await node.crash()
    assert on_disk(node, names[:4]) == [True] * 4
    assert await node.bring(names[:4]) == 3
    await node.settle()
    assert node.read(names[3]) is None
    assert on_disk(node, names[:4]) == [True, True, True, False]
    assert node.disk.totals.checksum_failures == 1
    await node.crash()
    assert on_disk(node, names[:4]) == [True, True, True, False]
    await node.close()


async def test_the_newer_of_two_records_of_a_block_wins(tmp_path, names):
    """A dropped block whose record could not be erased, then written again elsewhere."""
    node = LowerFixture(tmp_path)
    await filled(node, names, 2)
    node.plan.add("disk.erase", Fault.ERROR, times=1)
    old = node.tier.get(names[0]).slot
    node.disk.drop(names[0])
    await node.settle()
    node.put(names, 0, 1)
    await node.settle()
    new = node.tier.get(names[0]).slot
    assert new != old
    await node.crash()
    assert node.tier.get(names[0]).slot == new
    assert node.tier.counters.recovered == 2
    await node.crash()
    assert node.tier.get(names[0]).slot == new
    await node.close()


async def test_dropped_and_flushed_blocks_stay_gone_after_a_restart(tmp_path, names):
    node = LowerFixture(tmp_path)
    await filled(node, names, 4)
    node.lower.drop([names[3]])
    await node.settle()
    await node.crash()
    assert on_disk(node, names[:4]) == [True, True, True, False]
    assert node.lower.flush() == 3
    await node.settle()
    assert node.tier.stats()["free"] == 16
    await node.crash()
    assert on_disk(node, names[:4]) == [False] * 4
    await node.close()


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.SHORT, Fault.CORRUPT, Fault.TORN])
async def test_a_read_that_fails_brings_nothing_up_and_leaves_nothing_behind(tmp_path, names, fault):
    """Rule 5 for the disk: wrong bytes are noticed when they are loaded. Without the check of the digest a corrupt or
    torn read would be served."""
    node = LowerFixture(tmp_path)
    await filled(node, names, 2)
    node.plan.add("disk.read", fault, times=1)
    assert await node.bring(names[:1]) == 0
    await node.settle()
    assert node.read(names[0]) is None
    assert node.host.stats()["free"] == 4
    wrong = fault in (Fault.CORRUPT, Fault.TORN)
    assert node.disk.totals.checksum_failures == wrong
    # A block of wrong bytes is gone; after a mere error it is there to be tried again.
    assert node.disk.has(names[0]) is not wrong
    await node.close()


@pytest.mark.parametrize("fault", [Fault.CORRUPT, Fault.TORN])
async def test_wrong_bytes_on_disk_are_noticed_when_they_are_loaded(tmp_path, names, fault):
    node = LowerFixture(tmp_path)
    node.plan.add("disk.write", fault, times=1)
    await filled(node, names, 2)
    assert await node.bring(names[:2]) == 0
    await node.settle()
    assert node.read(names[0]) is None
    await node.close()


async def test_bytes_in_the_wrong_place_are_noticed(tmp_path, names):
    """Two slots exchanged behind our back: each is whole in itself."""
    node = LowerFixture(tmp_path)
    await filled(node, names, 2)
    first, second = (node.tier.get(name).slot for name in names[:2])
    fd = os.open(node.path, os.O_RDWR)
    size = SLOT_BYTES + 4096
    a, b = (os.pread(fd, size, slot_start(slot, SLOT_BYTES)) for slot in (first, second))
    os.pwrite(fd, b, slot_start(first, SLOT_BYTES))
    os.pwrite(fd, a, slot_start(second, SLOT_BYTES))
    os.close(fd)
    assert await node.bring(names[:2]) == 0
    await node.settle()
    assert node.disk.totals.checksum_failures == 2
    await node.close()


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.SHORT])
async def test_a_write_that_fails_is_not_there_not_even_after_a_restart(tmp_path, names, fault):
    node = LowerFixture(tmp_path)
    node.plan.add("disk.write", fault, times=1)
    node.put(names, 0, 1)
    await node.settle()
    assert on_disk(node, names[:1]) == [False]
    await node.crash()
    assert on_disk(node, names[:1]) == [False]
    await node.close()


async def test_a_late_read_quarantines_its_host_slot_until_it_has_ended(tmp_path, names):
    """Rule 4 on this leg: the thread may still write into the slot."""
    node = LowerFixture(tmp_path, LowerSettings(timeout_s=0.05))
    await filled(node, names, 1)
    node.plan.add("disk.read", Fault.HANG, times=1)
    assert await node.bring(names[:1]) == 0
    node.tick()
    assert node.host.stats()["quarantined"] == 1
    assert node.disk.totals.late == 1
    node.plan.release()
    await node.settle(lambda: node.host.stats()["quarantined"] == 0)
    assert node.host.stats()["free"] == 4
    await node.close()


async def test_a_late_completion_is_not_counted_and_cannot_hit_the_next_user_of_the_slot(tmp_path, names):
    node = LowerFixture(tmp_path, LowerSettings(timeout_s=0.03, host_slots=1))
    await filled(node, names, 1)
    node.plan.add("disk.read", Fault.LATE, seconds=0.2, times=1)
    assert await node.bring(names[:1]) == 0
    assert node.put(names, 7, 8) == []  # the only slot is quarantined
    await node.settle(lambda: node.host.stats()["quarantined"] == 0)
    assert node.put(names, 7, 8) == [names[7]]
    await asyncio.sleep(0.25)
    assert node.read(names[7]) == payload_of(names[7])
    await node.close()


async def test_a_late_write_pins_its_host_slot_and_quarantines_its_disk_slot(tmp_path, names):
    node = LowerFixture(tmp_path, LowerSettings(timeout_s=0.05))
    node.plan.add("disk.write", Fault.HANG, times=1)
    node.put(names, 0, 1)
    await asyncio.sleep(0.1)
    assert node.host.stats()["leased"] == 1
    assert node.tier.stats()["quarantined"] == 1
    assert node.violations() == []
    node.plan.release()
    await node.settle(lambda: node.tier.stats()["quarantined"] == 0)
    assert node.host.stats()["leased"] == 0
    await node.close()


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.CORRUPT, Fault.HANG])
async def test_a_disk_that_keeps_failing_is_switched_off_and_on_again(tmp_path, names, caplog, fault):
    node = LowerFixture(tmp_path, LowerSettings(timeout_s=0.05, host_slots=8, depth=4))
    await filled(node, names, 8)
    node.plan.add("disk.read", fault)
    node.plan.add("disk.probe", Fault.ERROR)
    await node.bring(names[:4])
    for _ in range(3):
        node.lower.promote(names[4:8], urgent=True)
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)
    assert not node.disk.on
    assert node.lower.values()["disk_on"] == 0
    assert node.lower.values()["disk_switched_off_total"] == 1
    assert "is off" in caplog.text
    # Off: nothing is found there, nothing is written, nothing waits for it.
    assert node.lower.promote(names[:8], urgent=True).coming == 0
    assert len(node.put(names[60:61])) == 1
    node.tick()
    await asyncio.sleep(0.1)
    assert not node.disk.on, "the probe fails too"
    node.plan.clear()
    await node.settle(lambda: node.disk.on)
    assert "on again" in caplog.text
    left = [name for name in names[:8] if node.disk.has(name)]
    assert left
    node.disk._timeout_s = 5.0  # A busy machine may need more for an honest read than the faults above did.
    await asyncio.sleep(1.05)  # what could not be brought up is not tried again at once
    node.tick()
    assert await node.bring(left[:1]) == 1
    assert node.read(left[0]) == payload_of(left[0])
    await node.close()


async def test_a_directory_that_cannot_be_written_gives_a_tier_that_is_off_until_it_can(tmp_path, names, monkeypatch):
    from headrace.kvstore import testing_lower

    def no_room(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(testing_lower, "open_file", no_room)
    node = LowerFixture(tmp_path)
    assert not node.disk.on
    node.put(names, 0, 1)
    assert node.lower.promote(names[:1], urgent=True) == (1, 0)
    monkeypatch.undo()
    await node.settle(lambda: node.disk.on)
    node.lower.used(names[:1])
    await node.settle()
    assert on_disk(node, names[:1]) == [True]
    await node.close()


def test_payloads_leave_room_for_padding():
    assert PAYLOAD_BYTES < SLOT_BYTES
