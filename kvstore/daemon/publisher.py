"""Carries a daemon's event log into Redis: registration, snapshot, stream. Runs on the daemon's loop beside the server
and can fail at any time without touching it.
"""

import asyncio
import logging
import time
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from headrace.kvstore.daemon.events import EventLog
from headrace.kvstore.directory.keys import FIELD, REGISTRATION_S, Keys, Registration
from headrace.messages import encode

log = logging.getLogger(__name__)
BATCH_S = 0.05
"""Events of this time travel together."""
UPKEEP_S = 0.25
RETRY_S = 0.5
TIMEOUT_S = 2.0
SNAPSHOT_EVENTS = 512
"""A new snapshot after so many events; the stream keeps only what came after it."""


class RedisPublisher:
    """`run` until cancelled, then `close`."""

    def __init__(self, url: str, node: str, fingerprint: bytes, events: EventLog) -> None:
        self._redis: Any = redis.asyncio.Redis.from_url(
            url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=None
        )
        self._node = node
        self._keys = Keys(fingerprint)
        self._events = events
        self._stream = self._keys.events(node, events.incarnation)
        self._sent = 0
        self._snapshot = -1
        """Event number of the snapshot in Redis; -1: there is none that we know of."""
        self._upkeep_s = 0.0
        self.failures = 0

    async def run(self) -> None:
        reported = ""
        while True:
            try:
                await self._cycle()
                reported = ""
                await asyncio.sleep(BATCH_S)
            except (RedisError, OSError, TimeoutError) as error:
                self.failures += 1
                # What arrived is not known: start again from a snapshot.
                self._snapshot, self._upkeep_s = -1, 0.0
                if str(error) != reported:
                    log.warning("directory in Redis: %s", error)
                    reported = str(error)
                await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """Deregister, if Redis answers, and close the connection."""
        try:
            await self._redis.delete(
                self._keys.node(self._node),
                self._keys.snapshot(self._node),
                self._keys.wanted(self._node),
                self._stream,
            )
            await self._redis.srem(self._keys.nodes, self._node)
        except (RedisError, OSError, TimeoutError):
            log.info("Redis does not answer; the registration of %s ends in %s s", self._node, REGISTRATION_S)
        await self._redis.aclose()

    async def _cycle(self) -> None:
        if time.monotonic() >= self._upkeep_s:
            if not await self._redis.exists(self._keys.snapshot(self._node)):
                self._snapshot = -1
            if await self._redis.getdel(self._keys.wanted(self._node)):
                self._snapshot = -1
        news = self._events.since(self._events.incarnation, self._sent)
        if self._snapshot < 0 or news.snapshot or news.last - self._snapshot >= SNAPSHOT_EVENTS:
            await self._write_snapshot()
        elif news.changes:
            pipe = self._redis.pipeline(transaction=True)
            for number, change in enumerate(news.changes, self._sent + 1):
                self._add(pipe, number, encode(change))
            await pipe.execute()
            self._sent = news.last
        if time.monotonic() >= self._upkeep_s:
            await self._register()
            self._upkeep_s = time.monotonic() + UPKEEP_S

    def _add(self, pipe: Any, number: int, change: bytes) -> None:
        pipe.xadd(self._stream, {FIELD: change}, id=f"{number}-0")

    async def _write_snapshot(self) -> None:
        whole = self._events.snapshot()
        pipe = self._redis.pipeline(transaction=True)
        pipe.set(self._keys.snapshot(self._node), encode(whole))
        pipe.delete(self._stream)
        await pipe.execute()
        self._sent = self._snapshot = whole.last
        self._upkeep_s = 0.0

    async def _register(self) -> None:
        entry = Registration(incarnation=self._events.incarnation, last=self._sent)
        life_ms = int(REGISTRATION_S * 1000)
        pipe = self._redis.pipeline(transaction=True)
        pipe.set(self._keys.node(self._node), encode(entry), px=life_ms)
        pipe.sadd(self._keys.nodes, self._node)
        # Streams of dead runs must not stay; the snapshot outlives the registration by as little.
        pipe.pexpire(self._stream, 2 * life_ms)
        pipe.pexpire(self._keys.snapshot(self._node), 2 * life_ms)
        await pipe.execute()
