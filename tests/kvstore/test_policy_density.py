"""The density policy: offers only what it may, keeps its books small, learns who comes back, in every mix of calls."""

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.ids import BlockName
from headrace.kvstore.base import BlockMeta
from headrace.kvstore.policies import density, make_policy, policy_names
from headrace.kvstore.policies.density import DensityPolicy, ReuseCounts, age_bin, block_class


def name(number: int) -> BlockName:
    return BlockName(number.to_bytes(8, "little"))


def test_it_is_registered() -> None:
    assert "density" in policy_names()
    assert isinstance(make_policy("density", 10), DensityPolicy)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ihaerv"), st.integers(0, 7), st.floats(0, 400)), max_size=120))
def test_the_victim_is_always_an_evictable_block(calls: list[tuple[str, int, float]]) -> None:
    """Any order of calls a tier may make, against a plain set."""
    policy = DensityPolicy(4)
    here: set[BlockName] = set()
    offered: set[BlockName] = set()
    now_s = 0.0
    for what, number, wait_s in calls:
        block, now_s = name(number), now_s + wait_s
        if what == "i" and block not in here:
            parent = name(number - 1) if number % 4 else None
            policy.on_insert(BlockMeta(block, parent, number % 4, 1), now_s)
            here.add(block)
        elif what == "h" and block in here:
            policy.on_hit(block, now_s)
        elif what == "a" and block in here - offered:
            policy.add_evictable(block, now_s)
            offered.add(block)
        elif what == "e" and block in offered:
            policy.remove_evictable(block)
            offered.discard(block)
        elif what == "r" and block in here:
            policy.on_remove(block)
            here.discard(block)
            offered.discard(block)
        victim = policy.victim(now_s)
        assert (victim in offered) if offered else (victim is None)


def test_age_bins_cover_all_ages_in_order() -> None:
    ages = [0.0, 0.49, 0.5, 0.6, 1.0, 60.0, 3600.0, 1e6, 1e9]
    bins = [age_bin(age) for age in ages]
    assert bins == sorted(bins)
    assert (bins[0], bins[1], bins[2], bins[-1]) == (0, 0, 1, density._BINS - 1)


def test_classes_are_distinct_and_in_range() -> None:
    classes = {block_class(turns, pause) for turns in (1, 2, 4, 8) for pause in (1.0, 10.0, 30.0, 100.0, 1000.0)}
    assert classes == set(range(1, density._NUM_CLASSES))
    assert block_class(0, 5.0) == 0


def test_index_prefers_the_age_at_which_blocks_come_back() -> None:
    """Blocks of class 0 are used 60 s after their last use or never: just before that they are worth most."""
    counts = ReuseCounts()
    counts.used[0, age_bin(60.0)] = 500
    counts.given_up[0, age_bin(10_000.0)] = 500
    waiting = counts.used * 0
    index = counts.index(waiting)[0]
    assert index[age_bin(58.0)] > index[age_bin(5.0)] > index[age_bin(2_000.0)]


def test_chains_that_come_back_are_kept_and_single_shots_go() -> None:
    """Ten conversations return every 50 s among a stream of prompts that never do, six times the capacity."""
    policy, capacity = DensityPolicy(60), 60
    cached: set[BlockName] = set()
    hits = asked = 0

    def use(block: BlockName, now_s: float) -> bool:
        if block in cached:
            policy.on_hit(block, now_s)
            return True
        if len(cached) == capacity:
            victim = policy.victim(now_s)
            assert victim is not None
            policy.on_remove(victim)
            cached.discard(victim)
        policy.on_insert(BlockMeta(block, None, 0, 1), now_s)
        policy.add_evictable(block, now_s)
        cached.add(block)
        return False

    fresh = 1000
    for step in range(4000):
        now_s = step * 0.5
        for _ in range(4):
            fresh += 1
            use(name(fresh), now_s)
        if step % 10 == 0:
            found = use(name(step // 10 % 10), now_s)
            if step > 2000:
                hits, asked = hits + found, asked + 1
    # 400 blocks pass between two uses, so LRU with 60 never hits.
    assert hits > 0.8 * asked


def test_memory_of_evicted_blocks_is_bounded() -> None:
    policy = DensityPolicy(8)
    for number in range(300_000):
        block = name(number)
        policy.on_insert(BlockMeta(block, None, 0, 1), number * 0.01)
        policy.on_remove(block)
    assert len(policy._ghosts) <= policy._max_ghosts + policy._round
