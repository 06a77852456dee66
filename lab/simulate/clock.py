"""An asyncio event loop whose time is simulated: when nothing is ready it jumps to the next timer instead of sleeping.

Production coroutines (placement, admission, time-outs) run on it unchanged, hours of traffic pass in seconds, and one
trace with one seed always takes the same course. No I/O may happen on it.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jump(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Never waits: tells the loop how far it may jump."""

    loop: "VirtualLoop"

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("the simulation is stuck: every task waits and no timer is set")
        self.loop.now_s += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now_s = 0.0
        jump = _Jump()
        jump.loop = self
        super().__init__(jump)

    def time(self) -> float:
        return self.now_s


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` from simulated time 0 to its end."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


async def sleep_until(when_s: float) -> None:
    """Sleep to a point in (simulated) time; returns at once when it has passed."""
    wait = when_s - asyncio.get_running_loop().time()
    if wait > 0:
        await asyncio.sleep(wait)
