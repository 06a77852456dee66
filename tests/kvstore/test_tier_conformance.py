"""One suite for every tier: device, host, disk and peer."""

import asyncio
import random

import pytest

from headrace.kvstore.names import chain, namespace
from headrace.kvstore.testing import FINGERPRINT
from headrace.kvstore.testing_lower import payload_of
from headrace.kvstore.testing_tiers import SLOTS, TIERS, make_tier

OTHER = chain(namespace(FINGERPRINT, "another tenant"), range(64 * 2 * SLOTS))
kinds = pytest.mark.parametrize("kind", TIERS)


async def closed(tier):
    assert tier.violations() == []
    await tier.close()
    assert tier.violations() == []


@kinds
async def test_what_was_put_is_got_and_nothing_else(kind, tmp_path, names):
    tier = await make_tier(kind, tmp_path)
    assert await tier.get(names[0]) is None
    await tier.put(names, 0, 5)
    assert [await tier.get(name) for name in names[:5]] == [payload_of(name) for name in names[:5]]
    assert await tier.get(names[5]) is None
    assert await tier.get(OTHER[0]) is None
    await closed(tier)


@kinds
async def test_a_block_put_twice_is_there_once(kind, tmp_path, names):
    tier = await make_tier(kind, tmp_path)
    for _ in range(3):
        await tier.put(names, 0, SLOTS)
    assert [tier.has(name) for name in names[: SLOTS + 1]] == [True] * SLOTS + [False]
    assert await tier.get(names[SLOTS - 1]) == payload_of(names[SLOTS - 1])
    await closed(tier)


@kinds
async def test_room_is_made_child_before_parent(kind, tmp_path, names):
    """Rule 6."""
    tier = await make_tier(kind, tmp_path)
    await tier.put(names, 0, SLOTS)
    for depth in range(5):
        await tier.put(OTHER, depth, depth + 1)
        for held in (names[:SLOTS], OTHER[:SLOTS]):
            there = [tier.has(name) for name in held]
            assert there == sorted(there, reverse=True), "a block without its parent"
    assert sum(tier.has(name) for name in [*names[:SLOTS], *OTHER[:SLOTS]]) == SLOTS
    assert [await tier.get(name) for name in OTHER[:5]] == [payload_of(name) for name in OTHER[:5]]
    await closed(tier)


@kinds
async def test_what_is_held_stays_and_a_full_tier_skips_the_write(kind, tmp_path, names):
    """Rule 8."""
    tier = await make_tier(kind, tmp_path)
    await tier.put(names, 0, SLOTS)
    holds = [await tier.hold(name) for name in names[:SLOTS]]
    await tier.put(OTHER, 0, 3)
    assert not any(tier.has(name) for name in OTHER[:3])
    assert [await tier.get(name) for name in names[:SLOTS]] == [payload_of(name) for name in names[:SLOTS]]
    for release in holds:
        release()
    await tier.put(OTHER, 0, 3)
    assert all(tier.has(name) for name in OTHER[:3])
    assert await tier.hold(names[SLOTS - 1]) is None
    await closed(tier)


@kinds
async def test_a_crash_loses_all_or_nothing_and_serves_nothing_wrong(kind, tmp_path, names):
    tier = await make_tier(kind, tmp_path)
    await tier.put(names, 0, SLOTS)
    await tier.crash()
    assert [tier.has(name) for name in names[:SLOTS]] == [tier.survives] * SLOTS
    expected = [payload_of(name) if tier.survives else None for name in names[:SLOTS]]
    assert [await tier.get(name) for name in names[:SLOTS]] == expected
    await tier.put(OTHER, 0, 4)
    assert [await tier.get(name) for name in OTHER[:4]] == [payload_of(name) for name in OTHER[:4]]
    await closed(tier)


@kinds
async def test_users_at_once_never_see_a_wrong_byte(kind, tmp_path, names):
    """Puts, gets and holds of six users under pressure: every answer is the block's bytes or None."""
    tier = await make_tier(kind, tmp_path)
    got = []

    async def user(number):
        dice = random.Random(number)
        for _ in range(12):
            where = dice.choice([names, OTHER])
            action = dice.randrange(3)
            if action == 0:
                await tier.put(where, 0, dice.randrange(1, 6))
            elif action == 1:
                name = where[dice.randrange(6)]
                data = await tier.get(name)
                assert data in (None, payload_of(name))
                got.append(data)
            else:
                release = await tier.hold(where[0])
                await asyncio.sleep(0.001)
                if release is not None:
                    release()
            assert tier.violations() == []

    await asyncio.gather(*map(user, range(6)))
    assert any(got)
    await closed(tier)


@kinds
async def test_a_crash_in_the_middle_of_use_is_survived(kind, tmp_path, names):
    tier = await make_tier(kind, tmp_path)
    dice = random.Random(3)
    for round_ in range(4):
        await tier.put(names, 0, dice.randrange(1, SLOTS))
        await tier.put(OTHER, 0, dice.randrange(1, SLOTS))
        if round_ % 2:
            await tier.crash()
        for name in [*names[:SLOTS], *OTHER[:SLOTS]]:
            assert await tier.get(name) in (None, payload_of(name))
        assert tier.violations() == []
    await closed(tier)
