"""Ending background tasks for certain."""

import asyncio
from typing import Any

_AGAIN_S = 0.1


async def end(task: "asyncio.Task[Any]") -> None:
    """Cancel a task and wait until it has ended. A cancellation that meets the end of a timed wait inside a client
    library can be lost (asyncio.wait_for of Python 3.11 does that), so it is repeated."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_AGAIN_S)
