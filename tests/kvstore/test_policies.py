"""Every policy against a naive model that recomputes its answer from scratch, and the registry."""

import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.kvstore.base import BatchPolicy, BlockMeta
from headrace.kvstore.host_tier import HostTier
from headrace.kvstore.policies import make_policy, policy_names


def name(i):
    return bytes([i]).ljust(32, b"\0")


class Naive:
    """Keeps the whole history; `key` says who goes first."""

    def __init__(self):
        self.blocks = {}
        self.evictable = set()
        self.clock = 0
        self.age = 0.0

    def insert(self, n, depth, size, now):
        self.clock += 1
        self.blocks[n] = {"uses": 1, "last": self.clock, "depth": depth, "size": size, "born": now, "count": self.clock}
        self.blocks[n]["age"] = self.age

    def hit(self, n):
        self.clock += 1
        self.blocks[n]["uses"] += 1
        self.blocks[n]["last"] = self.clock
        self.blocks[n]["age"] = self.age

    def forget(self, n):
        """The block leaves."""

    def victim(self):
        return min(self.evictable, key=lambda n: self.key(self.blocks[n]), default=None)


class NaiveLru(Naive):
    def key(self, b):
        return b["last"]


class NaiveLfu(Naive):
    def key(self, b):
        return (b["uses"], b["last"])


class NaiveTtl(Naive):
    def key(self, b):
        return (b["born"], b["count"])


class NaiveGdsf(Naive):
    def key(self, b):
        return (b["age"] + b["uses"] * ((1.0 + b["depth"] / 1024.0) / b["size"]), b["last"])


class NaiveS3Fifo(Naive):
    """Plain lists, oldest first. A block that leaves the small list as a victim is remembered."""

    def __init__(self, capacity=8):
        super().__init__()
        self.small, self.main, self.ghost = [], [], []
        self.small_size = max(1, capacity // 10)
        self.ghost_size = max(1, capacity - self.small_size)
        self.uses, self.asked = {}, None

    def insert(self, n, depth, size, now):
        super().insert(n, depth, size, now)
        (self.main if n in self.ghost else self.small).append(n)
        self.ghost = [g for g in self.ghost if g != n]
        self.uses[n] = 0

    def hit(self, n):
        super().hit(n)
        self.uses[n] = min(3, self.uses[n] + 1)

    def victim(self):
        self.asked = self.find()
        return self.asked

    def find(self):
        while True:
            small = next((n for n in self.small if n in self.evictable), None)
            main = next((n for n in self.main if n in self.evictable), None)
            if small is None and main is None:
                return None
            if small is not None and (main is None or len(self.small) > self.small_size):
                if self.uses[small] < 2:
                    return small
                self.uses[small] = 0
                self.small.remove(small)
                self.main.append(small)
            else:
                if self.uses[main] == 0:
                    return main
                self.uses[main] -= 1
                self.main.remove(main)
                self.main.append(main)

    def forget(self, n):
        if n in self.small and n == self.asked:
            self.ghost = [*self.ghost, n][-self.ghost_size :]
        self.small = [b for b in self.small if b != n]
        self.main = [b for b in self.main if b != n]


class NaiveArc(Naive):
    """Two lists by number of uses, each in order of last use, each with the names it lost last."""

    def __init__(self, capacity=8):
        super().__init__()
        self.capacity, self.target = capacity, 0.0
        self.once, self.again, self.lost_once, self.lost_again = [], [], [], []
        self.asked = None

    def insert(self, n, depth, size, now):
        super().insert(n, depth, size, now)
        if n in self.lost_once:
            self.target = min(self.capacity, self.target + max(1.0, len(self.lost_again) / len(self.lost_once)))
        elif n in self.lost_again:
            self.target = max(0.0, self.target - max(1.0, len(self.lost_once) / len(self.lost_again)))
        known = n in self.lost_once or n in self.lost_again
        self.lost_once = [g for g in self.lost_once if g != n]
        self.lost_again = [g for g in self.lost_again if g != n]
        (self.again if known else self.once).append(n)

    def hit(self, n):
        super().hit(n)
        self.once = [b for b in self.once if b != n]
        self.again = [*(b for b in self.again if b != n), n]

    def victim(self):
        once = next((n for n in self.once if n in self.evictable), None)
        again = next((n for n in self.again if n in self.evictable), None)
        from_once = once is not None and (again is None or len(self.once) > self.target)
        self.asked = once if from_once else again
        return self.asked

    def forget(self, n):
        if n == self.asked:
            if n in self.once:
                self.lost_once = [*self.lost_once, n][-self.capacity :]
            else:
                self.lost_again = [*self.lost_again, n][-self.capacity :]
        self.once = [b for b in self.once if b != n]
        self.again = [b for b in self.again if b != n]


MODELS = {
    "lru": NaiveLru, "lfu": NaiveLfu, "ttl": NaiveTtl, "gdsf": NaiveGdsf, "s3fifo": NaiveS3Fifo, "arc": NaiveArc
}  # fmt: skip
steps = st.lists(
    st.tuples(st.sampled_from(["insert", "hit", "hold", "free", "evict", "remove"]), st.integers(0, 7)), max_size=60
)
full = st.builds(lambda rest: [(a, i) for i in range(8) for a in ("insert", "free")] + rest, steps)
"""Scripts that begin with a full tier: evictions and returns are then frequent."""


def drive(policy, model, script):
    """Run the same script through both; compares victims after each step."""
    for now, (action, i) in enumerate(script):
        n, known = name(i), name(i) in model.blocks
        if action == "insert" and not known:
            model.insert(n, i, 100 + i % 3, float(now))
            policy.on_insert(BlockMeta(n, None, i, 100 + i % 3), float(now))
        elif action == "hit" and known:
            model.hit(n)
            policy.on_hit(n, float(now))
        elif action == "free" and known and n not in model.evictable:
            model.evictable.add(n)
            policy.add_evictable(n, float(now))
        elif action == "hold" and n in model.evictable:
            model.evictable.discard(n)
            policy.remove_evictable(n)
        elif action == "evict" and model.evictable:
            n = policy.victim(float(now))
            model.age = max(model.age, model.key(model.blocks[n])[0]) if isinstance(model, NaiveGdsf) else 0.0
            remove(policy, model, n)
        elif action == "remove" and known:
            remove(policy, model, n)
        yield now


def remove(policy, model, n):
    policy.on_remove(n)
    model.forget(n)
    del model.blocks[n]
    model.evictable.discard(n)


@pytest.mark.parametrize("kind", sorted(MODELS))
@given(script=st.one_of(steps, full))
@settings(max_examples=200, deadline=None)
def test_equals_the_naive_model(kind, script):
    policy, model = make_policy(kind, 8), MODELS[kind]()
    for now in drive(policy, model, script):
        if kind == "gdsf" and model.blocks:
            # An explicit removal of the block that was asked for last ages gdsf as an eviction does.
            policy._last_victim = None
        assert policy.victim(float(now)) == model.victim()


BATCHED = [kind for kind in policy_names() if isinstance(make_policy(kind, 8), BatchPolicy)]


@pytest.mark.parametrize("kind", BATCHED)
@given(script=steps, batch=st.lists(st.integers(0, 7), max_size=6))
@settings(max_examples=100, deadline=None)
def test_a_batch_of_hits_equals_hits_one_by_one(kind, script, batch):
    policy, model = make_policy(kind, 8), MODELS[kind]()
    for now in drive(policy, model, script):
        known = [name(i) for i in batch if name(i) in model.blocks]
        policy.on_hits(known, float(now))
        for n in known:
            model.hit(n)
        assert policy.victim(float(now)) == model.victim()


class Cache:
    """A flat cache of `size` unrelated blocks."""

    def __init__(self, kind, size):
        self.policy, self.size, self.held, self.now = make_policy(kind, size), size, set(), 0.0

    def access(self, i):
        self.now += 1.0
        n = i.to_bytes(32, "little")
        if n in self.held:
            self.policy.on_hit(n, self.now)
            return True
        if len(self.held) == self.size:
            victim = self.policy.victim(self.now)
            self.policy.on_remove(victim)
            self.held.remove(victim)
        self.policy.on_insert(BlockMeta(n, None, 0, 1), self.now)
        self.policy.add_evictable(n, self.now)
        self.held.add(n)
        return False


@pytest.mark.parametrize("kind", ["s3fifo", "arc"])
def test_a_scan_does_not_wash_out_what_is_used_often(kind):
    caches = {k: Cache(k, 50) for k in (kind, "lru")}
    hits = dict.fromkeys(caches, 0)
    for k, cache in caches.items():
        for i in range(6000):
            hits[k] += cache.access(10_000 + i) if i % 3 else cache.access(i // 3 % 30)
    assert hits[kind] > 1500
    assert hits["lru"] == 0


def test_s3fifo_brings_back_a_block_that_left_too_early():
    cache = Cache("s3fifo", 20)
    for i in range(40):
        cache.access(i)
    evicted = next(i for i in range(19, 40) if i.to_bytes(32, "little") not in cache.held or i > 30)
    cache.access(15)  # known to the ghost queue: goes to the main queue
    for i in range(100, 130):
        cache.access(i)
    assert (15).to_bytes(32, "little") in cache.held
    assert evicted.to_bytes(32, "little") not in cache.held


def test_gdsf_prefers_what_is_dear_to_recompute():
    policy = make_policy("gdsf:10", 4)
    for i, depth in enumerate([50, 0, 20]):
        policy.on_insert(BlockMeta(name(i), None, depth, 1000), 0.0)
        policy.add_evictable(name(i), 0.0)
    assert policy.victim(0.0) == name(1)
    policy.on_hit(name(1), 0.0)
    policy.on_hit(name(1), 0.0)
    policy.on_hit(name(1), 0.0)
    assert policy.victim(0.0) == name(2)


def test_ttl_expires_in_order_of_insertion():
    policy = make_policy("ttl:5", 4)
    for i in range(3):
        policy.on_insert(BlockMeta(name(i), None, 0, 1), float(i))
        policy.add_evictable(name(i), float(i))
    assert policy.expired(4.9) is None
    assert policy.expired(5.0) == name(0)
    policy.remove_evictable(name(0))
    assert policy.expired(6.5) == name(1)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ConfigError, match="'mru' is not known; known: arc, density, gdsf, lfu, lru, s3fifo, ttl"):
        make_policy("mru", 8)
    for bad in ("ttl:soon", "ttl:0", "gdsf:x", "gdsf:-1"):
        with pytest.raises(ConfigError, match="number"):
            make_policy(bad, 8)


def test_an_installed_package_adds_policies(tmp_path, monkeypatch):
    """A distribution as pip would install it: metadata with an entry point, and a module."""
    about = tmp_path / "their_policies-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: their-policies\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[headrace.eviction_policies]\nnewest = their_policies:Newest\nbroken = their_policies:Missing\n"
    )
    (tmp_path / "their_policies.py").write_text(
        "from headrace.kvstore.policies.lru import LruPolicy\n"
        "class Newest(LruPolicy):\n"
        "    def __init__(self, capacity_blocks, argument):\n"
        "        super().__init__(capacity_blocks)\n"
        "        self.given = capacity_blocks, argument\n"
        "    def victim(self, now_s):\n"
        "        return max(self._evictable._keys, key=self._evictable._keys.get, default=None)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert {"newest", "lru"} <= set(policy_names())
    policy = make_policy("newest:x", 8)
    assert policy.given == (8, "x")
    for i in range(3):
        policy.on_insert(BlockMeta(name(i), None, 0, 1), 0.0)
        policy.add_evictable(name(i), 0.0)
    assert policy.victim(0.0) == name(2)
    with pytest.raises(ConfigError, match=r"'broken' cannot be loaded: .*Missing"):
        make_policy("broken", 8)
    tier = HostTier(slots=2, slot_bytes=1, policy=make_policy("newest", 2), lease_s=1e9)
    tier.attach("me")
    for i in range(3):
        slots = tier.begin_put("me", [(name(i), None, 0)])
        tier.commit_put("me", [(name(i), slots[0], b"d" * 16)], keep_lease=False)
    assert [tier.match([name(i)]) for i in range(3)] == [1, 0, 1]


def lines_per_call(kind, size):
    """Average number of Python lines that one turn of a full cache of `size` blocks runs: insert, hit, evict."""
    policy, count = make_policy(kind, size), 0
    dice = random.Random(1)

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    held = []

    def turn(i):
        n = i.to_bytes(32, "little")
        policy.on_insert(BlockMeta(n, None, i % 7, 1), float(i))
        policy.add_evictable(n, float(i))
        held.append(n)
        policy.on_hit(held[dice.randrange(len(held))], float(i))

    def evict(now):
        victim = policy.victim(now)
        policy.on_remove(victim)
        at = held.index(victim)
        held[at] = held[-1]
        held.pop()

    for i in range(size):
        turn(i)
    sys.settrace(trace)
    try:
        for i in range(size, size + 400):
            evict(float(i))
            turn(i)
    finally:
        sys.settrace(None)
    return count / 400


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_a_call_costs_no_more_in_a_large_tier(kind):
    small, large = lines_per_call(kind, 500), lines_per_call(kind, 8000)
    assert large < 2.5 * small, (small, large)


def test_pure_half_imports_without_torch():
    import subprocess

    pure = "names layout base residents device_index host_tier arena client fake directory.memory daemon.box"
    code = "import sys;" + ";".join(f"import headrace.kvstore.{m}" for m in pure.split())
    code += ";assert not {'torch', 'triton', 'ray', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
