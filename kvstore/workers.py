"""Threads for calls that block in the operating system: transfers to disks and sockets release the interpreter there.

Daemon threads, not an executor: one that hangs in the kernel must not keep the process from ending.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

T = TypeVar("T")


class Workers:
    """`count` threads. `run` on the event loop; `close` once."""

    def __init__(self, count: int, name: str) -> None:
        self.count = count
        self.busy = 0
        """Calls that were given and have not ended, late ones included. Counted on the event loop."""
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        for number in range(count):
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True).start()

    def start(self, call: Callable[[], T]) -> "asyncio.Future[T]":
        """Give a call to a thread. The future tells when the thread is done with it; cancelling it stops nothing."""
        done: Future[T] = Future()
        self._calls.put((done, call))
        self.busy += 1
        future = asyncio.wrap_future(done)
        future.add_done_callback(self._ended)
        return future

    def close(self) -> None:
        """Let the threads end after the calls they have."""
        for _ in range(self.count):
            self._calls.put(None)

    def _ended(self, future: "asyncio.Future[Any]") -> None:
        self.busy -= 1
        if not future.cancelled():
            future.exception()  # Looked at: whoever gave up waiting does not need the log to say it.

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            done, call = item
            # A loop that was closed meanwhile, or a future that was cancelled: nobody wants the result.
            with contextlib.suppress(InvalidStateError, RuntimeError):
                try:
                    done.set_result(call())
                except Exception as error:
                    done.set_exception(error)
            del item, done, call


async def within(future: "asyncio.Future[T]", seconds: float) -> T:
    """The result, or TimeoutError while the call goes on."""
    async with asyncio.timeout(seconds):
        return await asyncio.shield(future)
