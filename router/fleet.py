"""All boxes behind one router: start and close their clients, watch their status, flush them all.

The watcher keeps two things fresh: the capacities that admission reserves against, and which boxes can be used.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from headrace.errors import HeadraceError, RankLost
from headrace.messages import BoxStatus
from headrace.router.admission import Admission
from headrace.router.decode_client import DecodeClient
from headrace.router.peer import Peer
from headrace.router.placement import GroupLoad
from headrace.router.prefill_client import PrefillClient

WATCH_S = 1.0
STATUS_TIMEOUT_S = 1.0
FLUSH_TIMEOUT_S = 30.0

log = logging.getLogger(__name__)


class Box(Protocol):
    """What the fleet asks of any box: prefill group, decode rank, node daemon. Raises HeadraceError."""

    async def status(self, timeout_s: float) -> BoxStatus: ...

    async def flush(self, timeout_s: float) -> int: ...

    async def close(self) -> None: ...


class Fleet:
    def __init__(
        self, prefill: Mapping[str, PrefillClient], decode: Mapping[str, DecodeClient], nodes: Mapping[str, Box]
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.nodes = nodes
        self.boxes: dict[str, Box] = {
            **{name: client.peer for name, client in prefill.items()},
            **{name: client.peer for name, client in decode.items()},
            **nodes,
        }
        self._watcher: asyncio.Task[None] | None = None
        self._moved: Callable[[], dict[str, str]] = dict

    async def start(self, timeout_s: float) -> None:
        """Greet every pool's boxes. Raises the last HeadraceError if one did not answer in time."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        # Prefill first: a router that was told no fingerprint takes over theirs before it greets a decode rank.
        for client in self._clients():
            await self._greet(client.peer, deadline)
        for rank in self.decode.values():
            rank.start()
        while not all(client.connected for client in self.decode.values()):
            if asyncio.get_running_loop().time() > deadline:
                down = [name for name, client in self.decode.items() if not client.connected]
                raise RankLost(f"no stream to {', '.join(down)} within {timeout_s} s")
            await asyncio.sleep(0.01)

    @staticmethod
    async def _greet(peer: Peer, deadline: float) -> None:
        while True:
            try:
                await peer.ready()
                return
            except RankLost:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(0.1)

    def _clients(self) -> list[PrefillClient | DecodeClient]:
        return [*self.prefill.values(), *self.decode.values()]

    def follow(self, moved: Callable[[], dict[str, str]]) -> None:
        """`moved()` is asked once a second for new addresses of boxes that were started again."""
        self._moved = moved

    def watch(self, groups: Mapping[str, GroupLoad], admission: Admission) -> None:
        self._watcher = asyncio.create_task(self._watch(groups, admission), name="fleet watcher")

    async def _watch(self, groups: Mapping[str, GroupLoad], admission: Admission) -> None:
        while True:
            try:
                await self.refresh(groups, admission)
            except Exception:
                log.exception("watching the fleet failed; trying again")
            await asyncio.sleep(WATCH_S)

    async def refresh(self, groups: Mapping[str, GroupLoad], admission: Admission) -> None:
        """Follow moved boxes, read capacities, let waiting requests try."""
        moved = self._moved()
        for client in self._clients():
            client.peer.move(moved.get(client.name, client.peer.address))
        found, _ = await self.statuses()
        for name, status in found.items():
            blocks = int(status.values.get("device_blocks", 0))
            if blocks and name in groups:
                groups[name].blocks = blocks
            elif blocks and name in admission.rooms:
                admission.rooms[name].blocks = blocks
        admission.poke()

    async def statuses(self) -> tuple[dict[str, BoxStatus], list[str]]:
        """(status of each box that answered, names of the others)."""
        names = list(self.boxes)
        answers = await asyncio.gather(*(self._status(self.boxes[name]) for name in names))
        found = {name: status for name, status in zip(names, answers) if status is not None}
        return found, [name for name in names if name not in found]

    @staticmethod
    async def _status(box: Box) -> BoxStatus | None:
        try:
            return await box.status(STATUS_TIMEOUT_S)
        except HeadraceError:
            return None

    async def flush(self) -> tuple[dict[str, int], dict[str, str]]:
        """(blocks dropped by box, error text by box). Ranks first: a node cannot drop what a rank's copy keeps."""
        dropped: dict[str, int] = {}
        failed: dict[str, str] = {}
        for name, box in self.boxes.items():
            try:
                dropped[name] = await box.flush(FLUSH_TIMEOUT_S)
            except HeadraceError as error:
                failed[name] = f"{error.kind}: {error}"
        return dropped, failed

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        for client in self._clients():
            await client.close()
        for node in self.nodes.values():
            await node.close()
