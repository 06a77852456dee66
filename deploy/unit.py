"""One unit under supervision: boxes that start, die and restart as one. Knows its launcher, not the other units.

    idle -> starting -> ready -> (lost) idle, after a pause that grows -> starting ...

Launching happens on the caller's thread; starting and status calls, which wait for boxes, on the given pool.
"""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from enum import StrEnum

from headrace.deploy.base import BoxHandle, BoxSpec, Launcher
from headrace.deploy.plan import UnitPlan
from headrace.errors import HeadraceError, RankLost

log = logging.getLogger(__name__)

STATUS_PERIOD_S = 1.0
STATUS_TIMEOUT_S = 60.0
"""A box that answers no status for this long hangs. Generous: a busy core is no reason to kill a rank."""
NOT_READY_LIMIT = 3
"""Status answers in a row that say "not ready" before a box that was ready counts as lost."""
_PAUSES_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
_STABLE_S = 60.0


class UnitState(StrEnum):
    IDLE = "idle"
    STARTING = "starting"
    READY = "ready"


class Unit:
    """Drive it with `begin` and then `poll` from one thread."""

    def __init__(self, plan: UnitPlan, launcher: Launcher, pool: Executor) -> None:
        self.plan = plan
        self.state = UnitState.IDLE
        self.endpoints: dict[str, str] = {}
        self.restarts = 0
        self.not_before_s = 0.0
        """Monotonic time before which a lost unit should not be begun again."""
        self.lost_box = ""
        self._launcher = launcher
        self._pool = pool
        self._boxes: dict[str, BoxHandle] = {}
        self._starting: dict[str, Future[dict[str, str]]] = {}
        self._status: dict[str, Future[None]] = {}
        self._not_ready: dict[str, int] = {}
        self._next_status_s = 0.0
        self._ready_at_s = 0.0
        self._failures = 0

    def begin(self, specs: list[BoxSpec], timeout_s: float) -> None:
        """Launch the boxes and start them side by side."""
        assert not self._boxes, f"{self.plan.name} still has boxes"
        self.state, self.lost_box = UnitState.STARTING, ""
        self._not_ready.clear()
        self._status.clear()
        for spec in specs:
            self._boxes[spec.context.name] = self._launcher.launch(spec)
        self._starting = {name: self._pool.submit(box.start, timeout_s) for name, box in self._boxes.items()}

    def poll(self) -> HeadraceError | None:
        """Advance. Returns why the unit was lost (it is then idle, its boxes are gone), else None."""
        if self.state is UnitState.STARTING:
            return self._poll_start()
        if self.state is UnitState.READY:
            return self._poll_ready()
        return None

    def stop(self, grace_s: float) -> None:
        """Stop all boxes side by side and wait for it."""
        self._each(lambda box: box.stop(grace_s))
        self._clear()

    def kill(self) -> None:
        self._each(lambda box: box.kill())
        self._clear()

    def pids(self) -> list[int]:
        return [box.pid for box in self._boxes.values() if box.pid]

    def _poll_start(self) -> HeadraceError | None:
        for name, future in self._starting.items():
            if future.done() and (error := future.exception()) is not None:
                known = error if isinstance(error, HeadraceError) else RankLost(f"{name}: {error!r}")
                return self._lose(name, known)
        if all(future.done() for future in self._starting.values()):
            for future in self._starting.values():
                self.endpoints |= future.result()
            self._starting = {}
            self.state = UnitState.READY
            self._ready_at_s = time.monotonic()
        return None

    def _poll_ready(self) -> HeadraceError | None:
        now = time.monotonic()
        for name, box in self._boxes.items():
            if not box.alive():
                return self._lose(name, RankLost(f"{name} (process {box.pid}) died"))
        for name, future in list(self._status.items()):
            if future.done():
                del self._status[name]
                if (error := future.exception()) is not None:
                    return self._lose(name, RankLost(f"{name} does not answer: {error}"))
                if self._not_ready.get(name, 0) >= NOT_READY_LIMIT:
                    return self._lose(name, RankLost(f"{name} reports that it is not ready"))
        if now >= self._next_status_s:
            self._next_status_s = now + STATUS_PERIOD_S
            for name, box in self._boxes.items():
                if name not in self._status:
                    self._status[name] = self._pool.submit(self._ask, name, box)
        return None

    def _ask(self, name: str, box: BoxHandle) -> None:
        ready = bool(box.status(STATUS_TIMEOUT_S).get("ready", False))
        self._not_ready[name] = 0 if ready else self._not_ready.get(name, 0) + 1

    def _lose(self, name: str, error: HeadraceError) -> HeadraceError:
        now = time.monotonic()
        if self._ready_at_s and now - self._ready_at_s > _STABLE_S:
            self._failures = 0
        pause = _PAUSES_S[min(self._failures, len(_PAUSES_S) - 1)]
        self._failures += 1
        self.kill()
        self.lost_box = name
        self.not_before_s = now + pause
        return error

    def _each(self, action: Callable[[BoxHandle], None]) -> None:
        for future in [self._pool.submit(action, box) for box in self._boxes.values()]:
            try:
                future.result()
            except Exception:
                log.exception("%s: a box did not stop cleanly", self.plan.name)

    def _clear(self) -> None:
        self._boxes.clear()
        self._starting.clear()
        self._status.clear()
        self.endpoints = {}
        self.state = UnitState.IDLE


def merge_endpoints(units: Mapping[str, Unit]) -> dict[str, str]:
    """What all ready units serve."""
    merged: dict[str, str] = {}
    for unit in units.values():
        merged |= unit.endpoints
    return merged
