"""One suite of faults for every Directory: two routers follow a real node daemon that never rests. Whatever is lost on
the way, each router's index equals the truth within five seconds, and no lookup ever fails."""

import asyncio
import random
import threading
import time

import pytest

from headrace.config import DirectoryConfig
from headrace.errors import DaemonUnavailable, StoreError
from headrace.kvstore import wire
from headrace.kvstore.base import Placement
from headrace.kvstore.daemon.events import HOST_PLACE
from headrace.kvstore.directory import make_directory
from headrace.kvstore.directory.stream import NodeStream
from headrace.kvstore.testing import FINGERPRINT, DaemonFixture, put
from headrace.kvstore.testing_link import Link
from headrace.kvstore.testing_redis import RedisFixture

SETTLED_S = 5.0
RANK = "decode-0.0"


class Churn:
    """A rank that writes, drops and announces all the time, on a thread of its own."""

    def __init__(self, daemon, names):
        self.client, self.names, self.dice = daemon.client(RANK), names, random.Random(3)
        self.rounds = 0
        self._paused, self._ended = threading.Event(), threading.Event()
        self._idle = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while not self._ended.is_set():
            if self._paused.is_set():
                self._idle.set()
                time.sleep(0.005)
                continue
            self._idle.clear()
            try:
                self._round()
            except DaemonUnavailable:
                time.sleep(0.02)
                try:
                    self.client.reconnect()
                except StoreError:
                    continue

    def _round(self):
        start = self.dice.randrange(28)
        put(self.client, self.names, start, start + 3)
        if self.dice.random() < 0.5:
            self.client.drop([self.names[self.dice.randrange(32)]])
        self.client.announce(self.dice.sample(self.names[:32], 2), self.dice.sample(self.names[32:40], 1))
        self.rounds += 1
        time.sleep(0.003)

    def pause(self):
        self._paused.set()
        assert self._idle.wait(10.0)

    def go_on(self):
        self._idle.clear()
        self._paused.clear()

    def end(self):
        self._ended.set()
        self._thread.join(10.0)


class House:
    """Daemon, routers, and what lies between them. `kind`: in-process or redis."""

    def __init__(self, kind, tmp_path, names):
        self.kind = kind
        self.redis = self.node_link = None
        url = self.router_url = ""
        if kind == "redis":
            self.redis = RedisFixture(tmp_path)
            self.node_link = Link(self.redis.socket)
            url = f"redis://127.0.0.1:{self.node_link.port}/0"
        self.daemon = DaemonFixture(tmp_path, slots=32, redis_url=url)
        if kind == "redis":
            self.link = Link(self.redis.socket)
            self.router_url, endpoint = f"redis://127.0.0.1:{self.link.port}/0", ""
        else:
            self.link = Link(self.daemon.socket, tmp_path / "link.sock")
            endpoint = f"unix:{tmp_path / 'link.sock'}"
        config = DirectoryConfig(url=self.router_url, poll_s=0.01)
        self.routers = [make_directory(config, {"node-0": endpoint}, FINGERPRINT) for _ in range(2)]
        self.churn = Churn(self.daemon, names)
        self.names = names
        self.lookups = 0
        self.slowest_s = 0.0

    async def truth(self):
        node = NodeStream(f"unix:{self.daemon.socket}", FINGERPRINT, role="tool")
        events = await node.call(wire.EventsRequest(incarnation="", after=0, wait_s=0.0), 5.0)
        await node.close()
        assert events.snapshot
        return {change.place: set(wire.unpack_names(change.added)) for change in events.changes}

    async def equal(self):
        """The churn rests; every router must come to know exactly what the node has."""
        await asyncio.to_thread(self.churn.pause)
        truth = await self.truth()
        assert truth[HOST_PLACE]
        assert truth[RANK]
        try:
            async with asyncio.timeout(SETTLED_S):
                while any(
                    r._index.held(("node-0", place)) != held for r in self.routers for place, held in truth.items()
                ):
                    await asyncio.sleep(0.02)
        finally:
            self.churn.go_on()

    @staticmethod
    def knows(router, truth):
        return all(router._index.held(("node-0", place)) == held for place, held in truth.items())

    async def ask(self):
        """What requests do meanwhile: a lookup is answered from memory, at once."""
        while True:
            for router in self.routers:
                began = time.perf_counter()
                assert isinstance(router.lookup(self.names[:40]), Placement)
                self.slowest_s = max(self.slowest_s, time.perf_counter() - began)
                self.lookups += 1
            await asyncio.sleep(0.01)

    def run(self, scenario):
        async def whole():
            for router in self.routers:
                await router.start()
            asking = asyncio.create_task(self.ask())
            try:
                await self.equal()
                await scenario()
                await self.equal()
                assert not asking.done(), "a lookup failed"
                assert self.lookups > 10
            finally:
                asking.cancel()
                for router in self.routers:
                    await router.close()

        asyncio.run(whole())

    def total(self, counter):
        return sum(router.stats()[counter] for router in self.routers)

    def close(self):
        self.churn.end()
        self.daemon.close()
        for link in (self.link, self.node_link):
            if link is not None:
                link.close()
        if self.redis is not None:
            self.redis.stop()


@pytest.fixture(params=["in-process", "redis"])
def house(request, tmp_path, names):
    made = House(request.param, tmp_path, names)
    yield made
    made.close()


def lossy(router, share, dice):
    """Lose a share of all events on their way to this router; returns a list that counts them."""
    lost = []

    def keep(_event):
        if dice.random() < share:
            lost.append(1)
            return False
        return True

    if hasattr(router, "_redis"):
        read = router._redis.xread

        async def xread(streams, count):
            reply = await read(streams, count=count)
            pairs = reply.items() if isinstance(reply, dict) else reply
            return {key: [row for row in (rows[0] if rows and isinstance(rows[0], list) else rows) if keep(row)]
                    for key, rows in pairs}  # fmt: skip

        router._redis.xread = xread
    else:
        for stream in router._streams.values():
            call = stream.call

            async def lossy_call(request, timeout_s, call=call):
                events = await call(request, timeout_s)
                if events.snapshot:
                    return events
                kept = tuple(change for change in events.changes if keep(change))
                return wire.Events(incarnation=events.incarnation, last=events.last, snapshot=False, changes=kept)

            stream.call = lossy_call
    return lost


def test_five_of_a_hundred_events_are_lost(house):
    lost = [lossy(router, 0.05, random.Random(i)) for i, router in enumerate(house.routers)]

    async def scenario():
        async with asyncio.timeout(20.0):
            while any(len(one) < 5 for one in lost):
                await asyncio.sleep(0.05)
        for _ in range(3):
            await house.equal()

    house.run(scenario)
    assert house.total("gaps_total") >= 2


def test_a_node_that_is_killed_and_started_again(house):
    async def scenario():
        for _ in range(2):
            house.daemon.kill()
            await asyncio.sleep(0.3)
            await asyncio.to_thread(house.daemon.start)
            async with asyncio.timeout(SETTLED_S):  # until the rank has announced and written again
                while set(await house.truth()) != {HOST_PLACE, RANK} or not (await house.truth())[HOST_PLACE]:
                    await asyncio.sleep(0.05)
            await house.equal()

    house.run(scenario)


def test_a_flush_under_load(house):
    async def scenario():
        node = NodeStream(f"unix:{house.daemon.socket}", FINGERPRINT, role="tool")
        for _ in range(5):
            await node.flush(5.0)
            await asyncio.sleep(0.05)
        await node.close()

    house.run(scenario)


def test_routers_are_cut_off_for_ten_seconds(house):
    async def scenario():
        house.link.cut()
        await asyncio.sleep(10.0)
        before = house.lookups
        await asyncio.sleep(0.2)
        assert house.lookups > before
        house.link.heal()

    house.run(scenario)
    assert house.total("failures_total") >= 2
    assert house.slowest_s < 1.0


def test_the_link_is_cut_again_and_again(house):
    async def scenario():
        for _ in range(5):
            house.link.cut()
            await asyncio.sleep(0.1)
            house.link.heal()
            await asyncio.sleep(0.4)

    house.run(scenario)


@pytest.fixture
def through_redis(tmp_path, names):
    made = House("redis", tmp_path, names)
    yield made
    made.close()


def test_the_node_is_cut_off_from_redis_for_ten_seconds(through_redis):
    house = through_redis

    async def scenario():
        house.node_link.cut()
        await asyncio.sleep(10.0)
        # Its registration has ended: routers no longer send anybody there.
        assert house.routers[0].lookup(house.names[:4]) == Placement({}, {})
        house.node_link.heal()

    house.run(scenario)


def test_redis_comes_back_empty(through_redis):
    house = through_redis

    async def scenario():
        known = [dict(router._seen) for router in house.routers]
        house.redis.stop()
        await asyncio.sleep(2.0)
        assert all(known), "a lost Redis must not empty what routers know"
        await asyncio.to_thread(house.redis.start)

    house.run(scenario)


def test_redis_is_flushed_under_load(through_redis):
    house = through_redis

    async def scenario():
        import redis.asyncio

        client = redis.asyncio.Redis.from_url(house.redis.url)
        for _ in range(3):
            await client.flushall()
            await asyncio.sleep(0.7)
        await client.aclose()

    house.run(scenario)


def test_streams_stay_short(through_redis):
    """Trimmed at every snapshot: what a router must read after a pause is bounded."""
    house = through_redis

    async def scenario():
        import redis.asyncio

        from headrace.kvstore.daemon.publisher import SNAPSHOT_EVENTS

        client = redis.asyncio.Redis.from_url(house.redis.url)
        longest = 0
        async with asyncio.timeout(60.0):
            while house.churn.rounds < 900:
                (stream,) = await client.keys("*:events:*") or [b"none"]
                longest = max(longest, await client.xlen(stream))
                await asyncio.sleep(0.02)
        assert 0 < longest <= 2 * SNAPSHOT_EVENTS
        assert 0 < await client.pttl(stream) <= 6000
        await client.aclose()

    house.run(scenario)
