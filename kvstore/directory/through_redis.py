"""The directory through Redis: reads every node's registration, snapshot and stream into its own index. While Redis
does not answer, the index stays as it was.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from headrace.errors import IncompatiblePeer
from headrace.ids import BlockName, Incarnation
from headrace.kvstore.base import Placement
from headrace.kvstore.directory.index import PlaceIndex
from headrace.kvstore.directory.keys import FIELD, Keys, Registration
from headrace.kvstore.directory.tasks import end
from headrace.kvstore.wire import Events
from headrace.messages import decode

log = logging.getLogger(__name__)
TIMEOUT_S = 2.0
RETRY_S = 0.5
READ_EVENTS = 1000
WANTED_MS = 5000


class RedisDirectory:
    """One task. Nodes are found by their registrations, so routers need no list of them."""

    def __init__(self, url: str, fingerprint: bytes, *, poll_s: float) -> None:
        self._redis: Any = redis.asyncio.Redis.from_url(
            url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=None
        )
        self._keys = Keys(fingerprint)
        self._poll_s = poll_s
        self._index = PlaceIndex()
        self._seen: dict[str, tuple[Incarnation, int]] = {}
        self._task: asyncio.Task[None] | None = None
        self._snapshots = 0
        self._gaps = 0
        self._failures = 0

    async def start(self) -> None:
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        if self._task is not None:
            await end(self._task)
            self._task = None
        await self._redis.aclose()

    def lookup(self, names: Sequence[BlockName]) -> Placement:
        return self._index.lookup(names)

    def stats(self) -> dict[str, float]:
        return {
            **self._index.stats(),
            "nodes_followed": float(len(self._seen)),
            "snapshots_total": float(self._snapshots),
            "gaps_total": float(self._gaps),
            "failures_total": float(self._failures),
        }

    async def _follow(self) -> None:
        reported = ""
        while True:
            try:
                await self._cycle()
                reported = ""
                await asyncio.sleep(self._poll_s)
            except (RedisError, OSError, TimeoutError, IncompatiblePeer) as error:
                self._failures += 1
                if str(error) != reported:
                    log.warning("directory in Redis: %s; going on with what is known", error)
                    reported = str(error)
                await asyncio.sleep(RETRY_S)

    async def _cycle(self) -> None:
        live = await self._registrations()
        for node in [n for n in self._seen if n not in live]:
            self._index.forget(node)
            del self._seen[node]
        for node, entry in live.items():
            if self._seen.get(node, ("", 0))[0] != entry.incarnation:
                await self._resync(node, entry.incarnation)
        known = {n: e for n, e in live.items() if n in self._seen and self._seen[n][0] == e.incarnation}
        if known:
            await self._read(known)

    async def _registrations(self) -> dict[str, Registration]:
        nodes = sorted(name.decode() for name in await self._redis.smembers(self._keys.nodes))
        if not nodes:
            return {}
        raw = await self._redis.mget([self._keys.node(node) for node in nodes])
        return {node: decode(data) for node, data in zip(nodes, raw) if data is not None}

    async def _resync(self, node: str, incarnation: Incarnation) -> bool:
        """Take the node's snapshot, if it is of this run and newer than what is known."""
        raw = await self._redis.get(self._keys.snapshot(node))
        whole: Events | None = None if raw is None else decode(raw)
        seen = self._seen.get(node)
        if whole is None or whole.incarnation != incarnation:
            return False
        if seen is not None and seen[0] == incarnation and whole.last <= seen[1]:
            return False
        self._index.apply(node, whole)
        self._seen[node] = (incarnation, whole.last)
        self._snapshots += 1
        return True

    async def _read(self, known: dict[str, Registration]) -> None:
        streams = {self._keys.events(n, e.incarnation): f"{self._seen[n][1]}-0" for n, e in known.items()}
        reply: Any = await self._redis.xread(streams, count=READ_EVENTS)
        entries = {key.decode(): rows for key, rows in (reply.items() if isinstance(reply, dict) else reply or ())}
        for node, entry in known.items():
            rows = entries.get(self._keys.events(node, entry.incarnation), [])
            rows = rows[0] if rows and isinstance(rows[0], list) else rows
            whole = self._apply(node, entry.incarnation, rows)
            # The registration was read before the stream: what it counts must be in the stream, or is lost.
            if not whole or (len(rows) < READ_EVENTS and self._seen[node][1] < entry.last):
                self._gaps += 1
                if not await self._resync(node, entry.incarnation):
                    await self._redis.set(self._keys.wanted(node), b"1", px=WANTED_MS)

    def _apply(self, node: str, incarnation: Incarnation, rows: list[tuple[bytes, dict[bytes, bytes]]]) -> bool:
        """Apply events up to the first gap; False if there is one."""
        last, changes = self._seen[node][1], []
        for entry_id, fields in rows:
            number = int(entry_id.split(b"-")[0])
            if number != last + 1:
                break
            changes.append(decode(fields[FIELD]))
            last = number
        if changes:
            self._index.apply(node, Events(incarnation=incarnation, last=last, snapshot=False, changes=tuple(changes)))
            self._seen[node] = (incarnation, last)
        return len(changes) == len(rows)
