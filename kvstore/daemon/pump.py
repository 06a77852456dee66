"""Bounded, prioritised queues of transfers: what a waiting request needs goes first, then blocks on their way down,
then what may be needed later. Runs on the event loop."""

import asyncio
import enum
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)


class Lane(enum.IntEnum):
    """Smaller goes first."""

    RESTORE = 0
    DEMOTE = 1
    PREFETCH = 2


Job = Callable[[], Coroutine[Any, Any, None]]


class Pump:
    """Runs at most `depth` jobs at once. A job ends when nothing of it is running any more, given-up transfers
    included, so a device that hangs gets no more than `depth` of them."""

    def __init__(self, depth: int, limits: dict[Lane, int]) -> None:
        """`limits`: most jobs waiting in each lane."""
        self._depth = depth
        self._limits = limits
        self._waiting: dict[Lane, deque[Job]] = {lane: deque() for lane in Lane}
        self._running: set[asyncio.Task[None]] = set()
        self.refused = dict.fromkeys(Lane, 0)
        """Jobs that found their lane full."""

    def offer(self, lane: Lane, job: Job) -> bool:
        """Queue a job; False when the lane is full."""
        queue = self._waiting[lane]
        if len(queue) >= self._limits[lane]:
            self.refused[lane] += 1
            return False
        queue.append(job)
        self._fill()
        return True

    @property
    def idle(self) -> bool:
        return not self._running and not any(self._waiting.values())

    def waiting(self, lane: Lane) -> int:
        return len(self._waiting[lane])

    def room(self, lane: Lane) -> int:
        """How many more jobs the lane takes."""
        return self._limits[lane] - len(self._waiting[lane])

    def values(self) -> dict[str, float]:
        waiting = {f"waiting{{lane={lane.name.lower()}}}": float(len(jobs)) for lane, jobs in self._waiting.items()}
        refused = {f"refused_total{{lane={lane.name.lower()}}}": float(n) for lane, n in self.refused.items()}
        return {"running": float(len(self._running)), **waiting, **refused}

    async def close(self) -> None:
        """Forget what waits, cancel what runs."""
        for queue in self._waiting.values():
            queue.clear()
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _fill(self) -> None:
        while len(self._running) < self._depth:
            lane = next((lane for lane in Lane if self._waiting[lane]), None)
            if lane is None:
                return
            task = asyncio.ensure_future(self._waiting[lane].popleft()())
            self._running.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a transfer failed", exc_info=task.exception())
        if not task.cancelled():
            self._fill()
