"""DeviceIndex: ownership, naming, eviction order, and random operations against a plain dict model."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.kvstore.device_index import DeviceIndex
from headrace.kvstore.names import private_name
from headrace.kvstore.policies import make_policy, policy_names


def name(*path):
    """Name of the block at the end of a path in a small tree of chains."""
    return bytes(path).ljust(32, b"\xff")


def fill(index, *paths):
    """Put the chain of each path into the index, all released."""
    for path in paths:
        for depth in range(len(path)):
            if not index.match([name(*path[: depth + 1])]):
                slots = index.allocate(1)
                assert slots is not None
                parent = name(*path[:depth]) if depth else None
                index.release([index.name_slot(slots[0], name(*path[: depth + 1]), parent, depth)])


def chain_names(path):
    return [name(*path[: d + 1]) for d in range(len(path))]


@pytest.fixture
def index():
    made = DeviceIndex(4, make_policy("lru", 4))
    yield made
    assert made.check_integrity() == []


def test_leading_run_only(index):
    fill(index, (1, 2, 3))
    assert len(index.match(chain_names((1, 2, 3, 4)))) == 3
    assert index.match([name(9), *chain_names((1, 2))]) == []


def test_allocate_is_all_or_nothing_and_never_takes_what_is_held(index):
    held = index.allocate(3)
    assert index.allocate(2) is None
    assert index.free_count == 1
    index.release(held)
    assert len(index.allocate(4)) == 4


def test_children_go_before_parents_whatever_was_used_last(index):
    fill(index, (1, 2, 3), (7,))
    index.release(index.acquire([name(7)]))
    index.allocate(1)
    assert len(index.match(chain_names((1, 2, 3)))) == 2
    index.allocate(1)
    assert len(index.match(chain_names((1, 2, 3)))) == 1


def test_a_held_child_keeps_its_parents():
    index = DeviceIndex(3, make_policy("lru", 3))
    fill(index, (1, 2, 3))
    index.release(index.acquire(chain_names((1, 2, 3)))[:2])
    assert index.allocate(1) is None
    assert index.check_integrity() == []


def test_naming_twice_gives_the_first_slot_and_frees_the_duplicate(index):
    first, second = index.allocate(2)
    assert index.name_slot(first, name(1), None, 0) == first
    assert index.name_slot(second, name(1), None, 0) == first
    assert index.free_count == 3
    index.release([first, first])
    with pytest.raises(ValueError, match="released more often"):
        index.release([first])


def test_misuse_is_refused(index):
    with pytest.raises(ValueError, match="nothing holds"):
        index.release([0])
    with pytest.raises(ValueError, match="not an owned"):
        index.name_slot(0, name(1), None, 0)
    with pytest.raises(ValueError, match="not held"):
        index.retain([0])


def test_retain_adds_references(index):
    (slot,) = index.allocate(1)
    index.retain([slot])
    index.release([slot])
    assert index.free_count == 3
    index.name_slot(slot, name(1), None, 0)
    index.retain([slot])
    index.release([slot, slot])
    assert index.held_count == 0


def test_changes_are_net_and_never_private(index):
    fill(index, (1, 2))
    assert index.take_changes() == ([name(1), name(1, 2)], []) or sorted(index.names()) == sorted(chain_names((1, 2)))
    (slot,) = index.allocate(1)
    index.name_slot(slot, private_name(), None, 0)
    assert index.take_changes() == ([], [])
    index.release([slot])
    assert index.flush() == 3
    fill(index, (1,))
    assert index.take_changes() == ([], [name(1, 2)])


def test_flush_keeps_what_is_held(index):
    fill(index, (1, 2))
    slots = index.acquire(chain_names((1,)))
    assert index.flush() == 1
    assert index.match(chain_names((1, 2))) == slots
    index.release(slots)


class Model(RuleBasedStateMachine):
    """A dict of names to (path, refs) beside the real index; evictions are read off the index."""

    policy = "lru"
    SLOTS = 6
    paths = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.index = DeviceIndex(self.SLOTS, make_policy(self.policy, self.SLOTS), self._clock)
        self.named = {}
        self.owned = []
        self.held = []
        self.seen = set()

    def _clock(self):
        self.now += 1.0
        return self.now

    def _sync_evictions(self):
        here = {p for p in self.named if self.index.match([name(*p)])}
        gone = [p for p in self.named if p not in here]
        for path in gone:
            assert self.named[path] == 0, "a held block was evicted"
            assert not any(q[: len(path)] == path and len(q) == len(path) + 1 for q in here), "a parent went first"
            del self.named[path]

    @rule(count=st.integers(1, 4))
    def allocate(self, count):
        slots = self.index.allocate(count)
        held = len(self.owned) + sum(refs > 0 for refs in self.named.values())
        if slots is not None:
            assert len(set(slots)) == count
            assert not set(slots) & set(self.owned)
            self.owned += slots
        else:
            assert held + count > self.SLOTS or any(self.named.values())
        self._sync_evictions()

    @precondition(lambda self: self.owned)
    @rule(path=paths, data=st.data())
    def give_name(self, path, data):
        slot = self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1)))
        parent = name(*path[:-1]) if len(path) > 1 else None
        got = self.index.name_slot(slot, name(*path), parent, len(path) - 1)
        assert (got == slot) == (path not in self.named)
        self.named[path] = self.named.get(path, 0) + 1
        self.held.append((path, got))

    @rule(path=paths)
    def acquire(self, path):
        run = []
        for depth in range(len(path)):
            if path[: depth + 1] not in self.named:
                break
            run.append(path[: depth + 1])
        slots = self.index.acquire(chain_names(path))
        assert len(slots) == len(run)
        for prefix, slot in zip(run, slots):
            self.named[prefix] += 1
            self.held.append((prefix, slot))

    @precondition(lambda self: self.owned or self.held)
    @rule(data=st.data())
    def release(self, data):
        which = data.draw(st.integers(0, len(self.owned) + len(self.held) - 1))
        if which < len(self.owned):
            self.index.release([self.owned.pop(which)])
        else:
            path, slot = self.held.pop(which - len(self.owned))
            self.index.release([slot])
            self.named[path] -= 1

    @rule()
    def flush(self):
        idle = [p for p, refs in self.named.items() if not refs]
        assert self.index.flush() == len(idle)
        for path in idle:
            del self.named[path]

    @rule()
    def changes(self):
        added, removed = self.index.take_changes()
        self.seen = (self.seen | set(added)) - set(removed)
        assert self.seen == {name(*p) for p in self.named}

    @invariant()
    def sound(self):
        assert self.index.check_integrity() == []
        held = len(self.owned) + sum(refs > 0 for refs in self.named.values())
        assert self.index.held_count == held
        assert self.index.free_count == self.SLOTS - len(self.owned) - len(self.named)


@pytest.mark.parametrize("policy", policy_names())
def test_random_operations(policy):
    case = type(f"Model_{policy}", (Model,), {"policy": policy}).TestCase
    case.settings = settings(
        max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case().runTest()
