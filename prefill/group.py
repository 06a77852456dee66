"""The leader's engine: one thread that turns the scheduler's plans into steps. Thread-safe from outside.

Commands (submit, close, flush) are queued and run on the engine thread between two steps, so the scheduler needs no
locks and a cancelled prompt is gone within one step.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from headrace.errors import Cancelled, HeadraceError, RankLost
from headrace.ids import RequestId
from headrace.messages import PrefillDone, PrefillRequest
from headrace.prefill.base import StepRunner
from headrace.prefill.scheduler import Scheduler

log = logging.getLogger(__name__)
T = TypeVar("T")
STORE_POLL_S = 0.004
"""How soon to look again when prompts wait for blocks that other processes write or hold."""
IDLE_POLL_S = 0.5


class PrefillGroup:
    def __init__(self, scheduler: Scheduler, runner: StepRunner) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stop_at: float | None = None
        self._waiting: dict[RequestId, Future[PrefillDone]] = {}
        self._status = scheduler.status()
        self._thread = threading.Thread(target=self._run, name="prefill-engine", daemon=True)
        self.failure: HeadraceError | None = None
        """Why the engine ended before it was stopped; the group must be restarted."""

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self._stop_at is None

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: PrefillRequest) -> Future[PrefillDone]:
        """The answer, or a HeadraceError. Whatever comes of it, `close` must follow; until then blocks stay pinned."""
        future: Future[PrefillDone] = Future()

        def start() -> None:
            self._scheduler.submit(request)
            self._waiting[request.request_id] = future

        def fail(error: HeadraceError) -> None:
            future.set_exception(error)

        self._command(start, fail)
        return future

    def close(self, request_id: RequestId) -> Future[None]:
        """Abort what still runs, release what is pinned. The future tells when it has happened."""

        def end() -> None:
            self._scheduler.close(request_id)
            unanswered = self._waiting.pop(request_id, None)
            if unanswered is not None:
                unanswered.set_exception(Cancelled(f"{request_id} was cancelled"))

        return self._ask(end)

    def flush(self) -> Future[int]:
        """Drop every cached device block that nothing holds; how many."""
        return self._ask(self._scheduler.flush)

    def status(self) -> dict[str, float]:
        """As of the last step."""
        return self._status

    def stop(self, grace_s: float) -> None:
        """Give prompts `grace_s` to be answered and let go by the router, then release everything and end the
        followers."""
        with self._wake:
            self._stop_at = time.monotonic() + grace_s
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join()
        self._runner.close()

    def _ask(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._command(lambda: future.set_result(call()), future.set_exception)
        return future

    def _command(self, run: Callable[[], None], fail: Callable[[HeadraceError], None]) -> None:
        def guarded() -> None:
            try:
                run()
            except HeadraceError as error:
                fail(error)

        with self._wake:
            if self.failure is not None or not self._thread.is_alive():
                fail(self.failure or RankLost("the prefill group is not running"))
                return
            self._commands.append(guarded)
            self._wake.notify()

    def _run(self) -> None:
        failure: HeadraceError | None = None
        try:
            while self._turn():
                pass
        except HeadraceError as error:
            failure = error
        except Exception as error:
            failure = RankLost(f"the prefill engine failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        if failure is not None:
            log.error("prefill group ends: %s", failure, exc_info=failure)
        self._finish(failure)

    def _turn(self) -> bool:
        """Commands, one step, answers. False: stopped."""
        for command in self._take_commands():
            command()
        plan = self._scheduler.next_plan()
        if plan is not None:
            self._scheduler.finish(plan, self._runner.run(plan))
        self._deliver()
        self._status = self._scheduler.status()
        if self._stop_at is not None and (self._scheduler.idle or time.monotonic() >= self._stop_at):
            return False
        if plan is None:
            self._runner.check()
            with self._wake:
                if not self._commands:
                    self._wake.wait(STORE_POLL_S if self._scheduler.waiting else IDLE_POLL_S)
        return True

    def _deliver(self) -> None:
        for answer in self._scheduler.take_answers():
            self._waiting.pop(answer.request_id).set_result(answer)
        for request_id, error in self._scheduler.take_failures():
            self._waiting.pop(request_id).set_exception(error)

    def _finish(self, failure: HeadraceError | None) -> None:
        """The engine ends: nobody waits for it any more and no lease stays."""
        with self._wake:
            self.failure = failure or RankLost("the prefill group was stopped")
        for command in self._take_commands():
            command()
        for future in self._waiting.values():
            future.set_exception(self.failure)
        self._waiting.clear()
        self._scheduler.close_all()
        self._status = self._scheduler.status()

    def _take_commands(self) -> list[Callable[[], None]]:
        with self._wake:
            commands = list(self._commands)
            self._commands.clear()
            return commands
