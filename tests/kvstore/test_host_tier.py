"""HostTier: what the client suite cannot reach (clocks, quarantine predicates, ttl), and random operations against a
plain model with an integrity check after each."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.errors import LeaseExpired
from headrace.kvstore.base import PutOutcome
from headrace.kvstore.host_tier import HostTier
from headrace.kvstore.policies import make_policy, policy_names

DIGEST = b"d" * 16


def name(*path):
    return bytes(path).ljust(32, b"\xff")


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def tier_of(slots=4, policy="lru", clock=None):
    return HostTier(
        slots=slots,
        slot_bytes=100,
        policy=make_policy(policy, slots),
        lease_s=10.0,
        grace_s=1.0,
        clock=clock or Clock(),
    )


def write(tier, owner, path, keep_lease=False):
    parent = name(*path[:-1]) if len(path) > 1 else None
    (slot,) = tier.begin_put(owner, [(name(*path), parent, len(path) - 1)])
    if slot >= 0:
        tier.commit_put(owner, [(name(*path), slot, DIGEST)], keep_lease=keep_lease)
    return slot


def test_rule_3_an_owner_that_is_not_renewed_loses_everything():
    clock = Clock()
    tier = tier_of(clock=clock)
    tier.attach("a")
    tier.attach("b")
    write(tier, "a", (1,), keep_lease=True)
    clock.now = 9.0
    tier.renew("b")
    assert tier.tick() == []
    clock.now = 10.0
    assert tier.tick() == ["a"]
    tier.detach("a", lambda: False)
    assert tier.stats()["leased"] == 0
    for call in (lambda: tier.lease("a", [name(1)]), lambda: tier.renew("a"), lambda: tier.begin_put("a", [])):
        with pytest.raises(LeaseExpired):
            call()
    assert tier.check_integrity() == []


def test_rule_4_quarantine_lasts_for_the_grace_and_while_the_writer_may_write():
    clock, alive = Clock(), True
    tier = tier_of(clock=clock)
    tier.attach("a")
    tier.begin_put("a", [(name(1), None, 0), (name(2), None, 0)])
    tier.detach("a", lambda: alive)
    for now, living, quarantined in ((0.9, False, 2), (1.5, True, 2), (60.0, True, 2), (60.0, False, 0)):
        clock.now, alive = now, living
        tier.tick()
        assert tier.stats()["quarantined"] == quarantined
    assert tier.stats()["free"] == 4
    assert tier.check_integrity() == []


def test_ttl_drops_without_pressure_but_never_what_is_read():
    clock = Clock()
    tier = tier_of(policy="ttl:5", clock=clock)
    tier.attach("a")
    write(tier, "a", (1,), keep_lease=True)
    write(tier, "a", (2,))
    clock.now = 6.0
    tier.tick()
    assert tier.match([name(2)]) == 0
    assert tier.match([name(1)]) == 1
    tier.release("a", [name(1)])
    tier.tick()
    assert tier.match([name(1)]) == 0
    assert tier.counters.expirations == 2


def test_a_wrong_digest_length_commits_nothing():
    tier = tier_of()
    tier.attach("a")
    slots = tier.begin_put("a", [(name(1), None, 0), (name(2), None, 0)])
    with pytest.raises(ValueError, match="digest"):
        tier.commit_put("a", [(name(1), slots[0], DIGEST), (name(2), slots[1], b"short")], keep_lease=False)
    assert tier.match([name(1)]) == 0


def test_a_slot_committed_twice_in_one_call_commits_nothing():
    tier = tier_of()
    tier.attach("a")
    (slot,) = tier.begin_put("a", [(name(1), None, 0)])
    with pytest.raises(LeaseExpired, match="twice"):
        tier.commit_put("a", [(name(1), slot, DIGEST)] * 2, keep_lease=False)
    assert tier.check_integrity() == []


def test_flush_spares_what_is_held_or_being_written():
    tier = tier_of()
    tier.attach("a")
    write(tier, "a", (1,), keep_lease=True)
    write(tier, "a", (2,))
    tier.begin_put("a", [(name(3), None, 0)])
    assert tier.flush() == 1
    assert tier.changes.take() == ([name(1)], [])
    assert tier.stats()["writing"] == 1


class Model(RuleBasedStateMachine):
    """Three clients; a dict of visible blocks with their lease counts, and of writes, beside the real tier."""

    policy = "lru"
    SLOTS = 6
    OWNERS = ("a", "b", "c")
    paths = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)
    owners = st.sampled_from(OWNERS)

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.tier = tier_of(self.SLOTS, self.policy, self.clock)
        self.visible = {}
        self.leases = {owner: {} for owner in self.OWNERS}
        self.writes = {owner: {} for owner in self.OWNERS}
        self.quarantined = 0
        self.seen = set()
        for owner in self.OWNERS:
            self.tier.attach(owner)

    def evictions(self):
        here = {p for p in self.visible if self.tier.match([name(*p)])}
        for path in [p for p in self.visible if p not in here]:
            assert not any(self.visible[path] in leases.get(path, []) for leases in self.leases.values()), "held"
            children = [q for q in here if q[:-1] == path]
            writing = [q for writes in self.writes.values() for q in writes if q[:-1] == path]
            assert not children, "a parent went before its child"
            assert not writing, "a parent went before a child that is being written"
            del self.visible[path]

    @rule(owner=owners, path=paths)
    def begin(self, owner, path):
        parent = name(*path[:-1]) if len(path) > 1 else None
        (slot,) = self.tier.begin_put(owner, [(name(*path), parent, len(path) - 1)])
        known = path in self.visible or any(path in writes for writes in self.writes.values())
        assert (slot == PutOutcome.EXISTS) == known
        if slot >= 0:
            self.writes[owner][path] = slot
        self.evictions()

    @precondition(lambda self: any(self.writes.values()))
    @rule(data=st.data(), commit=st.booleans(), keep=st.booleans())
    def finish(self, data, commit, keep):
        owner = data.draw(st.sampled_from([o for o in self.OWNERS if self.writes[o]]))
        path = data.draw(st.sampled_from(sorted(self.writes[owner])))
        slot = self.writes[owner].pop(path)
        if commit:
            self.tier.commit_put(owner, [(name(*path), slot, DIGEST)], keep_lease=keep)
            self.visible[path] = object()
            if keep:
                self.leases[owner].setdefault(path, []).append(self.visible[path])
        else:
            self.tier.abort_put(owner, [(name(*path), slot)])

    @rule(owner=owners, path=paths)
    def lease(self, owner, path):
        (found,) = self.tier.lease(owner, [name(*path)])
        assert (found is not None) == (path in self.visible)
        if found is not None:
            self.leases[owner].setdefault(path, []).append(self.visible[path])

    @rule(owner=owners, path=paths)
    def release(self, owner, path):
        self.tier.release(owner, [name(*path)])
        held = self.leases[owner].get(path)
        if held:
            held.pop(0)

    @rule(path=paths)
    def drop(self, path):
        self.tier.drop([name(*path)])
        self.visible.pop(path, None)

    @rule(owner=owners, clean=st.booleans())
    def leave(self, owner, clean):
        self.tier.detach(owner, None if clean else lambda: False)
        self.quarantined += 0 if clean else len(self.writes[owner])
        self.writes[owner], self.leases[owner] = {}, {}
        self.tier.attach(owner)

    @rule()
    def wait_out_the_quarantine(self):
        self.clock.now += 2.0
        for owner in self.OWNERS:
            self.tier.renew(owner)
        assert self.tier.tick() == []
        self.quarantined = 0

    @rule()
    def flush(self):
        held = {id(block) for leases in self.leases.values() for blocks in leases.values() for block in blocks}
        idle = [p for p, block in self.visible.items() if id(block) not in held]
        assert self.tier.flush() == len(idle)
        for path in idle:
            del self.visible[path]

    @rule()
    def changes(self):
        added, removed = self.tier.changes.take()
        self.seen = (self.seen | set(added)) - set(removed)
        assert self.seen == {name(*p) for p in self.visible}

    @invariant()
    def sound(self):
        assert self.tier.check_integrity() == []
        stats = self.tier.stats()
        assert stats["ready"] == len(self.visible)
        assert stats["quarantined"] == self.quarantined
        assert stats["writing"] == sum(map(len, self.writes.values()))


@pytest.mark.parametrize("policy", policy_names())
def test_random_operations(policy):
    case = type(f"Model_{policy}", (Model,), {"policy": policy}).TestCase
    case.settings = settings(
        max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case().runTest()


@pytest.mark.slow
def test_tens_of_thousands_of_random_operations():
    case = type("ModelSlow", (Model,), {}).TestCase
    case.settings = settings(
        max_examples=400, stateful_step_count=100, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case().runTest()


def test_a_block_that_comes_and_goes_leaves_no_memory_behind():
    import tracemalloc

    tier = HostTier(slots=4, slot_bytes=1, policy=make_policy("lru", 4), lease_s=1e9)
    tier.attach("me")

    def come_and_go(rounds):
        for i in range(rounds):
            name = i.to_bytes(32, "big")
            (slot,) = tier.begin_put("me", [(name, None, 0)])
            tier.commit_put("me", [(name, slot, b"d" * 16)], keep_lease=True)
            tier.release("me", [name])
            if i % 2:
                tier.drop([name])
            tier.changes.take()

    come_and_go(2000)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    come_and_go(5000)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 20_000, f"{grown} bytes after 5,000 blocks"


def test_a_parent_that_comes_after_its_child_is_kept_for_it():
    """Also when it leaves and comes back while the child is there."""
    tier = HostTier(slots=4, slot_bytes=1, policy=make_policy("lru", 4), lease_s=1e9)
    tier.attach("me")
    parent, child = b"p" * 32, b"c" * 32

    def put(name, above):
        slots = tier.begin_put("me", [(name, above, int(above is not None))])
        tier.commit_put("me", [(name, slots[0], b"d" * 16)], keep_lease=False)
        assert tier.check_integrity() == []

    put(child, parent)
    put(parent, None)
    assert tier.stats()["evictable"] == 1
    tier.drop([parent])
    assert tier.check_integrity() == []
    put(parent, None)
    assert tier.stats()["evictable"] == 1
    tier.drop([child])
    assert tier.check_integrity() == []
    assert tier.stats()["evictable"] == 1
