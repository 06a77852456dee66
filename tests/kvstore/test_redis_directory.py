"""What only the Redis directory can suffer: lost events, an emptied or unreachable Redis, a stale registration."""

import asyncio
import random

import pytest

from headrace.kvstore.base import Placement
from headrace.kvstore.daemon import publisher as publishing
from headrace.kvstore.daemon.events import HOST_PLACE, EventLog
from headrace.kvstore.daemon.publisher import RedisPublisher
from headrace.kvstore.directory.tasks import end
from headrace.kvstore.directory.through_redis import RedisDirectory
from headrace.kvstore.testing import FINGERPRINT
from headrace.kvstore.testing_redis import RedisFixture

NAMES = [bytes([i]) * 32 for i in range(200)]


@pytest.fixture
def server(tmp_path):
    made = RedisFixture(tmp_path)
    yield made
    made.stop()


class Lossy(RedisPublisher):
    """Loses a share of its events on the way."""

    share = 0.05
    dice = random.Random(7)
    lost = 0

    def _add(self, pipe, number, change):
        if self.dice.random() < self.share:
            self.lost += 1
        else:
            super()._add(pipe, number, change)


async def settled(truth, *directories, timeout_s=5.0):
    """Wait until each directory's index equals the truth."""
    async with asyncio.timeout(timeout_s):
        while any(d._index.held(("node-0", HOST_PLACE)) != truth for d in directories):
            await asyncio.sleep(0.02)


async def churn(log, truth, dice, steps, pause_s=0.002):
    for _ in range(steps):
        added = set(dice.sample(NAMES, 3))
        removed = set(dice.sample(NAMES, 2)) - added
        log.change(HOST_PLACE, added, removed)
        truth -= removed
        truth |= added
        await asyncio.sleep(pause_s)


def scenario(server, body, publisher=RedisPublisher, routers=2):
    """Run `body(log, truth, routers)` with one publishing node and some routers around it."""

    async def whole():
        log, truth = EventLog("run1"), set()
        sender = publisher(server.url, "node-0", FINGERPRINT, log)
        made = [RedisDirectory(server.url, FINGERPRINT, poll_s=0.01) for _ in range(routers)]
        task = asyncio.create_task(sender.run())
        for directory in made:
            await directory.start()
        try:
            await body(log, truth, made, sender)
        finally:
            await end(task)
            await sender.close()
            for directory in made:
                await directory.close()

    asyncio.run(whole())


def test_lost_events_are_noticed_and_made_good(server):
    async def body(log, truth, routers, sender):
        await churn(log, truth, random.Random(1), 300)
        await settled(truth, *routers)
        assert sender.lost > 5
        assert all(router.stats()["gaps_total"] > 0 for router in routers)

    scenario(server, body, Lossy)


def test_a_lost_last_event_is_noticed_without_a_later_one(server):
    class LosesAll(Lossy):
        share = 1.0

    async def body(log, truth, routers, sender):
        log.change(HOST_PLACE, NAMES[:1], [])
        await settled({NAMES[0]}, *routers)
        log.change(HOST_PLACE, NAMES[1:2], [])
        await settled(set(NAMES[:2]), *routers)

    scenario(server, body, LosesAll)


def test_an_emptied_redis_is_filled_again(server):
    async def body(log, truth, routers, sender):
        await churn(log, truth, random.Random(2), 30)
        await settled(truth, *routers)
        server.stop()
        held = set(truth)
        await churn(log, truth, random.Random(3), 30)
        assert routers[0]._index.held(("node-0", HOST_PLACE)) == held, "a lost Redis must not empty the index"
        await asyncio.to_thread(server.start)
        await settled(truth, *routers)

    scenario(server, body)


def test_a_partition_ends_in_the_truth(server, monkeypatch):
    async def body(log, truth, routers, sender):
        await churn(log, truth, random.Random(4), 30)
        await settled(truth, *routers)
        server.freeze()
        await churn(log, truth, random.Random(5), 100, pause_s=0.04)
        assert routers[0].lookup(NAMES[:1]) is not None
        server.thaw()
        await settled(truth, *routers)

    scenario(server, body)


def test_many_events_between_two_looks_arrive_through_snapshots(server, monkeypatch):
    monkeypatch.setattr(publishing, "SNAPSHOT_EVENTS", 10)

    async def body(log, truth, routers, sender):
        for router in routers:
            router._poll_s = 0.3
        await churn(log, truth, random.Random(6), 200, pause_s=0.01)
        await settled(truth, *routers)
        assert await sender._redis.xlen(sender._stream) <= 10

    scenario(server, body)


def test_a_node_that_ends_without_a_word_is_forgotten_when_its_registration_ends(server):
    async def whole():
        log = EventLog("run1")
        sender = RedisPublisher(server.url, "node-0", FINGERPRINT, log)
        router = RedisDirectory(server.url, FINGERPRINT, poll_s=0.01)
        await router.start()
        task = asyncio.create_task(sender.run())
        log.change(HOST_PLACE, NAMES[:2], [])
        await settled(set(NAMES[:2]), router)
        await end(task)
        await asyncio.sleep(1.0)
        assert router.lookup(NAMES) == Placement({"node-0": 2}, {})
        await settled(set(), router)
        await sender._redis.aclose()
        await router.close()

    asyncio.run(whole())


def test_an_orderly_end_leaves_nothing_in_redis(server):
    async def body(log, truth, routers, sender):
        await churn(log, truth, random.Random(8), 20)
        await settled(truth, *routers)

    scenario(server, body)

    async def leftovers():
        import redis.asyncio

        client = redis.asyncio.Redis.from_url(server.url)
        keys = await client.keys("*")
        await client.aclose()
        return keys

    assert asyncio.run(leftovers()) == []
