"""Faults on the way between a rank's pool and the host tier: nothing half-copied becomes visible, no slot and no lease
stays behind, and the next try works."""

import threading

import pytest
import torch

from headrace.decode.mover import StoreMover
from headrace.kvstore import transfer
from headrace.kvstore.copiers import copier_for
from headrace.kvstore.fake import FakeNode
from headrace.kvstore.faults import Fault, FaultPlan, FaultyCopier
from headrace.kvstore.names import chain, namespace
from headrace.kvstore.pool import DevicePool
from headrace.kvstore.testing import LAYOUT

NAMES = chain(namespace(bytes(32), "tenant"), range(64 * 4))
BLOCKS = [(slot, NAMES[slot], NAMES[slot - 1] if slot else None, slot) for slot in range(4)]


class Rig:
    def __init__(self, monkeypatch):
        self.plan = FaultPlan()
        monkeypatch.setattr(transfer, "copier_for", lambda pool: FaultyCopier(copier_for(pool), self.plan))
        self.node = FakeNode(slots=8, slot_bytes=LAYOUT.slot_bytes)
        self.client = self.node.client()
        self.pool = DevicePool(LAYOUT, 8, "cpu")
        self.pool.latent.random_(0, 256)
        self.pool.index.random_(0, 256)
        self.mover = StoreMover(self.pool, self.client, 1.0)

    def restored_equal(self):
        """Blocks 0..3 brought back into slots 4..7 are what they were."""
        leases = self.client.lease(NAMES)
        self.mover.restore([4, 5, 6, 7], leases)
        self.client.release(NAMES)
        return torch.equal(self.pool.latent[:, :4], self.pool.latent[:, 4:]) and torch.equal(
            self.pool.index[:, :4], self.pool.index[:, 4:]
        )

    def idle(self):
        stats = self.node.tier.stats()
        return stats["writing"] == stats["leased"] == stats["quarantined"] == 0 and not self.node.tier.check_integrity()


@pytest.fixture
def rig(monkeypatch):
    return Rig(monkeypatch)


def test_published_blocks_are_counted_for_their_tenant_also_when_their_parent_is_gone(rig):
    rig.mover.publish(BLOCKS[:1])
    rig.client.drop([BLOCKS[0][1]])
    rig.mover.publish(BLOCKS[1:3], b"whose-it")
    found = {r.name: r.tenant for r in rig.node.tier.blocks()}
    assert found == {BLOCKS[1][1]: b"whose-it", BLOCKS[2][1]: b"whose-it"}


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.SHORT])
@pytest.mark.parametrize("good", [0, 2])
def test_a_store_that_fails_leaves_nothing_visible(rig, fault, good):
    """Rule 1: a failed batch leaves nothing visible, also when some of its copies had worked."""
    rig.plan.add("device.store", Fault.SLOW, times=good)
    rig.plan.add("device.store", fault, times=1)
    with pytest.raises(OSError, match=r"device\.store"):
        rig.mover.publish(BLOCKS)
    assert rig.client.match(NAMES) == 0
    assert rig.node.tier.stats()["free"] == 8
    assert rig.idle()
    assert rig.mover.publish(BLOCKS) == (4, 0)
    assert rig.restored_equal()


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.SHORT])
def test_a_load_that_fails_says_so_and_the_block_is_still_good(rig, fault):
    rig.mover.publish(BLOCKS)
    rig.plan.add("device.load", fault, times=1)
    leases = rig.client.lease(NAMES)
    with pytest.raises(OSError, match=r"device\.load"):
        rig.mover.restore([4, 5, 6, 7], leases)
    rig.client.release(NAMES)
    assert rig.idle()
    assert rig.restored_equal()


def test_a_copy_that_hangs_holds_its_slots_until_it_comes_back(rig):
    rig.plan.add("device.store", Fault.HANG, times=1)
    failed = []

    def publish():
        try:
            rig.mover.publish(BLOCKS)
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=publish)
    thread.start()
    while not rig.plan.injected:
        thread.join(0.01)
    assert rig.node.tier.stats()["writing"] == 4
    assert rig.node.tier.match(NAMES) == 0
    rig.plan.release()
    thread.join(5.0)
    assert failed
    assert rig.idle()


@pytest.mark.parametrize("fault", [Fault.SLOW, Fault.LATE])
def test_a_slow_copy_is_only_slow(rig, fault):
    rig.plan.add("device.*", fault, seconds=0.02)
    rig.mover.publish(BLOCKS)
    assert rig.restored_equal()
    assert rig.idle()
