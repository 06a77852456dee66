"""The in-process directory: follows the event log of each node daemon over its own connection."""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from headrace.errors import HeadraceError
from headrace.ids import BlockName, Incarnation
from headrace.kvstore import wire
from headrace.kvstore.base import Placement
from headrace.kvstore.directory.index import PlaceIndex
from headrace.kvstore.directory.stream import NodeStream
from headrace.kvstore.directory.tasks import end

log = logging.getLogger(__name__)
LONG_POLL_S = 1.0
"""How long a daemon may hold a question to which there is no news yet."""
ANSWER_S = 5.0
RETRY_S = 0.25


class InProcessDirectory:
    """One follower task per node. A node that cannot be reached is forgotten (its host tier can be reached by nobody
    here, and its ranks announce again when it returns); the router goes on with the others.

    `poll_s` is the pause between two questions: events of that time travel together.
    """

    def __init__(self, nodes: Mapping[str, str], fingerprint: bytes, *, poll_s: float) -> None:
        self._streams = {node: NodeStream(endpoint, fingerprint) for node, endpoint in nodes.items()}
        self._poll_s = poll_s
        self._index = PlaceIndex()
        self._seen: dict[str, tuple[Incarnation, int]] = {}
        self._followers: list[asyncio.Task[None]] = []
        self._snapshots = 0
        self._gaps = 0
        self._failures = 0

    async def start(self) -> None:
        self._followers = [asyncio.create_task(self._follow(node)) for node in self._streams]

    async def close(self) -> None:
        for follower in self._followers:
            await end(follower)
        self._followers = []
        for stream in self._streams.values():
            await stream.close()

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

    async def _follow(self, node: str) -> None:
        reported = ""
        while True:
            try:
                await self._ask(node)
                reported = ""
                await asyncio.sleep(self._poll_s)
            except HeadraceError as error:
                self._failures += 1
                if str(error) != reported:
                    log.warning("directory: %s: %s", node, error)
                    reported = str(error)
                self._index.forget(node)
                self._seen.pop(node, None)
                await asyncio.sleep(RETRY_S)

    async def _ask(self, node: str) -> None:
        incarnation, after = self._seen.get(node, (Incarnation(""), 0))
        request = wire.EventsRequest(incarnation=incarnation, after=after, wait_s=LONG_POLL_S)
        events: wire.Events = await self._streams[node].call(request, LONG_POLL_S + ANSWER_S)
        if not events.snapshot and (events.incarnation != incarnation or after + len(events.changes) != events.last):
            self._gaps += 1
            self._seen[node] = (Incarnation(""), 0)  # What is known stays in use until the snapshot is here.
            return
        self._index.apply(node, events)
        self._snapshots += events.snapshot
        self._seen[node] = (events.incarnation, events.last)
