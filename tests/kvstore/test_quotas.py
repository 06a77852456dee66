"""Quotas of tenants and pins with deadlines: pure, then through a node."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import IncompatiblePeer
from headrace.kvstore.base import PutOutcome
from headrace.kvstore.host_tier import HostTier
from headrace.kvstore.names import chain, namespace, tenant_id
from headrace.kvstore.pins import MAX_SHARE, OWNER, Pins
from headrace.kvstore.policies import make_policy, policy_names
from headrace.kvstore.quotas import quotas_of
from headrace.kvstore.testing import FINGERPRINT, blocks_of, put

ROOTS = [namespace(FINGERPRINT, f"tenant {i}") for i in range(3)]
A, B, C = (tenant_id(root) for root in ROOTS)
CHAINS = {tenant_id(root): chain(root, range(64 * 40)) for root in ROOTS}
DIGEST = b"d" * 16


class World:
    def __init__(self, slots=10, policy="lru", share=1.0):
        self.now = 0.0
        whole = make_policy(policy, slots)
        self.tier = HostTier(
            slots=slots, slot_bytes=1, policy=whole, lease_s=1e9, grace_s=0.0, clock=lambda: self.now,
            quotas=quotas_of(whole, policy, slots, share),
        )  # fmt: skip
        self.tier.attach("me")

    def put(self, tenant, count, start=0, keep=False, names=None):
        """Blocks of the tenant's chain (or unrelated ones); how many were written."""
        names = names or CHAINS[tenant]
        blocks = blocks_of(names, start, start + count)
        slots = self.tier.begin_put("me", blocks, tenant)
        writes = [(block[0], slot, DIGEST) for block, slot in zip(blocks, slots) if slot >= 0]
        self.tier.commit_put("me", writes, keep_lease=keep)
        assert self.tier.check_integrity() == []
        return len(writes)

    def held(self, tenant):
        return [i for i, name in enumerate(CHAINS[tenant]) if self.tier.match([name])]


def test_a_tenant_at_its_limit_makes_room_by_its_own_blocks():
    world = World()
    world.put(B, 4)
    world.tier.set_quota(A, 3)
    assert world.put(A, 3) == 3
    assert world.held(A) == [0, 1, 2]
    unrelated = [bytes([i]) * 32 for i in range(200, 203)]
    blocks = [(name, None, 0) for name in unrelated]
    slots = world.tier.begin_put("me", blocks, A)
    assert all(slot >= 0 for slot in slots), "three slots of the tier are free, but the tenant is at its limit"
    assert world.held(A) == []
    assert world.held(B) == [0, 1, 2, 3]
    assert world.tier.stats()["quota_evictions_total"] == 3
    assert world.tier.check_integrity() == []


def test_a_tenant_that_holds_all_it_may_have_is_skipped_and_others_are_not():
    world = World()
    world.tier.set_quota(A, 2)
    assert world.put(A, 5, keep=True) == 2
    assert world.put(B, 5) == 5
    assert world.held(A) == [0, 1]
    stats = world.tier.stats()
    assert stats["put_full_total"] == 3
    assert stats["quota_refused_total"] == 1, "the other two follow from it: no block without its parent"
    assert stats[f"tenant_blocks{{tenant={A.hex()}}}"] == stats[f"tenant_limit_blocks{{tenant={A.hex()}}}"] == 2


def test_a_limit_that_is_set_later_evicts_children_before_parents():
    world = World()
    world.put(A, 6)
    world.put(B, 4)
    assert world.tier.set_quota(A, 2) == 2
    assert world.held(A) == [0, 1]
    assert world.held(B) == [0, 1, 2, 3]
    assert world.tier.set_quota(A, None) == 2
    assert world.put(A, 4, start=2) == 4
    assert world.tier.check_integrity() == []


def test_a_share_for_everybody_and_none_for_nobodys_blocks():
    world = World(slots=10, share=0.3)
    assert world.put(A, 5, keep=True) == 3
    assert world.put(B, 5, keep=True) == 3
    assert world.put(b"", 4, names=CHAINS[C]) == 4
    world.tier.set_quota(C, 1)
    assert world.put(C, 3, start=10) == 1


def test_a_block_without_tenant_belongs_to_its_parents():
    world = World()
    world.tier.set_quota(A, 4)
    world.put(A, 2)
    assert world.put(b"", 8, start=2, keep=True, names=CHAINS[A]) == 2
    assert world.held(A) == [0, 1, 2, 3]


def test_what_is_no_tenant_gets_no_quota():
    world = World()
    for wrong in (b"", b"x", bytes(9)):
        with pytest.raises(ValueError, match="id of 8 bytes"):
            world.tier.set_quota(wrong, 3)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from([A, B, C, b""]), st.integers(0, 30), st.booleans()),
        st.tuples(st.just("quota"), st.sampled_from([A, B, C]), st.sampled_from([None, 0, 1, 3, 6])),
        st.tuples(st.just("drop"), st.sampled_from([A, B, C]), st.integers(0, 30)),
        st.tuples(
            st.just("release"),
        ),
        st.tuples(st.just("hit"), st.sampled_from([A, B, C]), st.integers(0, 30)),
    ),
    max_size=40,
)


@pytest.mark.parametrize("policy", policy_names())
@given(script=steps)
@settings(max_examples=40, deadline=None)
def test_no_tenant_is_ever_above_its_limit_but_by_what_is_held(policy, script):
    world = World(slots=8, policy=policy)
    limits, leased = {}, []
    for step in script:
        world.now += 1.0
        if step[0] == "put":
            _, tenant, start, keep = step
            before = world.tier.stats()["quota_evictions_total"], world.tier.stats()["evictions_total"]
            names = CHAINS[tenant or C]
            blocks = [(names[start], None, 0)]
            slots = world.tier.begin_put("me", blocks, tenant)
            world.tier.commit_put("me", [(names[start], s, DIGEST) for s in slots if s >= 0], keep_lease=keep)
            if keep and slots[0] >= 0:
                leased.append(names[start])
            if slots[0] == PutOutcome.EXISTS:
                after = world.tier.stats()["quota_evictions_total"], world.tier.stats()["evictions_total"]
                assert before == after
        elif step[0] == "quota":
            limits[step[1]] = step[2]
            world.tier.set_quota(step[1], step[2])
        elif step[0] == "drop":
            world.tier.drop([CHAINS[step[1]][step[2]]])
        elif step[0] == "hit":
            world.tier.match([CHAINS[step[1]][step[2]]])
        else:
            world.tier.release("me", leased)
            leased = []
            world.tier.tick()
        assert world.tier.check_integrity() == []
        for tenant, limit in limits.items():
            used = world.tier._quotas.used(tenant)
            held = sum(name in CHAINS[tenant] for name in leased)
            assert limit is None or used <= max(limit, held)


# --- pins ------------------------------------------------------------------------------------------------------------


def test_pinned_blocks_outlive_pressure_until_their_deadline():
    world = World()
    pins = Pins(world.tier, lambda: world.now)
    world.put(A, 4)
    assert pins.pin(CHAINS[A][:3], 60.0) == 3
    assert world.put(B, 10) == 7
    assert world.held(A) == [0, 1, 2]
    world.now = 59.9
    pins.tick()
    assert len(pins) == 3
    world.now = 60.0
    pins.tick()
    assert len(pins) == 0
    assert world.tier.leases_of(OWNER) == 0
    assert world.put(C, 10) == 10
    assert world.tier.check_integrity() == []


def test_a_second_pin_never_shortens_the_first():
    world = World()
    pins = Pins(world.tier, lambda: world.now)
    world.put(A, 2)
    pins.pin(CHAINS[A][:2], 100.0)
    pins.pin(CHAINS[A][:2], 10.0)
    world.now = 50.0
    pins.tick()
    assert len(pins) == 2
    pins.pin(CHAINS[A][:1], 100.0)
    world.now = 101.0
    pins.tick()
    assert len(pins) == 1
    assert pins.unpin(CHAINS[A][:2]) == 1
    assert world.tier.check_integrity() == []


def test_pins_stop_at_their_share_and_at_the_first_hole():
    world = World(slots=10)
    pins = Pins(world.tier, lambda: world.now)
    world.put(A, 8)
    assert pins.pin(CHAINS[A][:8], 5.0) == 10 * MAX_SHARE
    pins.unpin(CHAINS[A])
    world.tier.drop([CHAINS[A][1]])
    assert pins.pin(CHAINS[A][:8], 5.0) == 1
    assert pins.pin(CHAINS[B][:8], 5.0) == 0
    for wrong in (0.0, -1.0, 1e9, float("nan")):
        with pytest.raises(ValueError, match="a pin lasts"):
            pins.pin(CHAINS[A][:1], wrong)


# --- through a node --------------------------------------------------------------------------------------------------


def test_quotas_and_pins_through_a_client(node, names):
    client, other = node.client(), node.client("decode-0.1")
    assert other.set_quota(A, 3) == 0
    mine = CHAINS[A]
    slots = client.begin_put(blocks_of(mine, 0, 3), A)
    client.commit_put([(n, s, DIGEST) for n, s in zip(mine, slots)], keep_lease=False)
    assert client.begin_put([(mine[3], mine[2], 3)], A) == [PutOutcome.FULL], "its only leaf is the parent itself"
    assert client.pin(mine[:2], 0.6) == 2
    other.close()
    put(client, names, 0, 8)
    assert client.match(mine[:2]) == 2
    assert client.stats()["host_pinned"] == 2
    node.settle(lambda: client.stats()["host_pinned"] == 0)
    assert client.pin(mine[:1], 60.0) == 1
    assert client.unpin(mine[:2]) == 1
    with pytest.raises(IncompatiblePeer, match="a pin lasts"):
        client.pin(mine[:1], -1.0)


def test_a_pinned_block_that_is_dropped_is_gone(node, names):
    client = node.client()
    put(client, names, 0, 2)
    client.pin(names[:2], 60.0)
    client.drop(names[:2])
    assert client.match(names) == 0
    stats = client.stats()
    assert (stats["host_pinned"], stats["host_free"]) == (0, 8)
