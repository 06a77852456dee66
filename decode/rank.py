"""The engine of one decode rank: a step loop in its own thread around scheduler, store worker and lock-step.

Other threads talk to it through an inbox (`submit`, `abort`, `close_stream`, `flush`); it talks back through the sinks
of the streams. Knows nothing of gRPC, processes, or how the model was loaded.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from headrace.decode.base import Bell, Counters, DecodeOptions, Sink, StreamId
from headrace.decode.draft_length import DraftLength
from headrace.decode.join import Job, Reconnected, StoreWorker
from headrace.decode.lockstep import Lockstep, Plan
from headrace.decode.requests import Requests
from headrace.decode.scheduler import Scheduler
from headrace.decode.sequence import Sequence
from headrace.decode.step import Outcome, StepRunner
from headrace.errors import HeadraceError, RankLost
from headrace.ids import RequestId
from headrace.messages import DecodeRequest

log = logging.getLogger(__name__)
IDLE_S = 0.5
"""An idle group meets this often without being rung."""
QUIET_S = 1.0
"""A leaving rank ends a group that has been idle for this long instead of waiting for the other ranks to leave."""


class DecodeRank:
    """Thread-safe from the outside; everything else happens in the loop thread. `make_worker` gets the callback that
    jobs come back through."""

    def __init__(
        self,
        *,
        options: DecodeOptions,
        scheduler: Scheduler,
        runner: StepRunner,
        lockstep: Lockstep,
        bell: Bell,
        make_worker: Callable[[Callable[[Job | Reconnected], None]], StoreWorker],
        collectives: Callable[[], int],
        sent_bytes: Callable[[], Mapping[str, int]],
    ) -> None:
        self.options = options
        self.counters = Counters()
        self._scheduler = scheduler
        self._runner = runner
        self._lockstep = lockstep
        self._bell = bell
        self._collectives = collectives
        self._sent_bytes = sent_bytes
        self._worker = make_worker(self._job_done)
        self._requests = Requests(scheduler, self._worker, self.counters, options)
        self._inbox: deque[Callable[[], None]] = deque()
        self._group_idle = True
        self._group_sequences = 0
        self._drafting = DraftLength(options.draft_tokens)
        self._told = (False, False)
        self._gauges: dict[str, float] = {}
        self._refreshed = 0.0
        self._quiet_since = time.monotonic()
        self._late = threading.Lock()
        self._leaving = False
        self._stop_now = False
        self._next_stream = 0
        self._stream_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        """Why the loop ended, when it did not end on purpose."""
        self.ended = threading.Event()

    # --- any thread -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._worker.start()
        self._thread = threading.Thread(target=self._run, name="decode-step", daemon=True)
        self._thread.start()

    def stop(self, grace_s: float) -> None:
        """Let what runs finish for `grace_s`, then end. The loop keeps stepping with the group until all ranks leave,
        or one that leaves sees an idle group for a second; the group ends with the first rank whose time is over."""
        self._leaving = True
        self._post(lambda: None)
        if not self.ended.wait(grace_s):
            self._stop_now = True
            self._post(lambda: None)
            self.ended.wait(5.0)
        self._worker.close(2.0)
        if self.ended.is_set():
            self._bell.close()

    def open_stream(self, sink: Sink) -> StreamId:
        with self._stream_lock:
            self._next_stream += 1
            stream = StreamId(self._next_stream)
        self._requests.sinks[stream] = sink
        return stream

    def close_stream(self, stream: StreamId) -> None:
        """The stream broke or ended: all its requests are aborted, nothing is sent any more."""
        self._post(lambda: self._requests.close_stream(stream))

    def submit(self, stream: StreamId, request: DecodeRequest) -> None:
        self._post(lambda: self._requests.submit(stream, request, refuse=self._leaving))

    def abort(self, stream: StreamId, request_id: RequestId) -> None:
        self._post(lambda: self._requests.abort(stream, request_id))

    def flush(self) -> "Future[int]":
        """Drop every block of the device tier that nothing holds; the number dropped."""
        future: Future[int] = Future()

        def run() -> None:
            future.set_result(self._scheduler.index.flush())

        self._post(run)
        return future

    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def status(self) -> dict[str, float]:
        """Gauges and counters, at most one step or 50 ms old."""
        return {
            **self._gauges,
            "device_blocks": self._scheduler.index.num_slots,
            "store_connected": float(self._worker.connected),
            "control_exchanges_total": self._lockstep.control.exchanges,
            "collectives_total": self._collectives(),
            **{f"exchange_bytes_total{{leg={leg}}}": count for leg, count in self._sent_bytes().items()},
            **self.counters.values(),
        }

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        if self.ended.is_set():
            self._run_late(RankLost("this decode rank has ended"))
        elif self._group_idle:
            self._bell.ring(self._lockstep.control.exchanges)

    def _job_done(self, job: Job | Reconnected) -> None:
        self._post(lambda: self._requests.job_done(job))

    # --- the loop thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._turn():
                pass
            reason: HeadraceError = RankLost("the decode group is shutting down")
        except BaseException as error:
            self.failure = error
            log.exception("the step loop of rank %s ended", self._lockstep.control.rank)
            text = f"{type(error).__name__}: {error}"
            reason = error if isinstance(error, RankLost) else RankLost(f"the step loop ended: {text}")
        self._leaving = True
        self._finish(reason)

    def _turn(self) -> bool:
        """One step, or one idle wait. False: the group has ended."""
        sequences = self._collect()
        if self._group_idle:
            if not sequences and not self._has_news():
                self._refresh(0.0)
                self._bell.sleep(self._lockstep.control.exchanges, IDLE_S)
                sequences = self._collect()
            if sequences or self._has_news():
                self._bell.ring(self._lockstep.control.exchanges)
        self._told = (self._may_leave(), self._stop_now)
        plan = self._lockstep.agree(
            verify=sum(1 + len(s.drafts) for s in sequences),
            sequences=len(sequences),
            draft_tokens=self._draft_tokens() if sequences else 0,
            leaving=self._told[0],
            stop_now=self._told[1],
        )
        if plan.stop:
            return False
        self._group_idle = plan.idle
        self._hurry(plan)
        if not plan.idle:
            self.counters.steps_total += 1
            self._requests.settle(self._step(sequences, plan), self.counters.steps_total)
            self._refresh(0.05)
        return True

    def _step(self, sequences: list[Sequence], plan: Plan) -> list[Outcome]:
        started = time.perf_counter()
        outcomes = self._runner.run(sequences, plan)
        self._group_sequences = plan.sequences
        self._drafting.took(sum(plan.verify), max(0, plan.draft_tokens - 1), time.perf_counter() - started)
        for outcome in outcomes:
            if outcome.emission is not None:
                self._drafting.accepted(outcome.emission.drafted, outcome.emission.accepted)
        return outcomes

    def _draft_tokens(self) -> int:
        """Drafts this rank would make in the step that is about to begin."""
        if not self.options.adaptive:
            return self.options.draft_tokens
        return self._drafting.choose(max(1, self._group_sequences))

    def _collect(self) -> list[Sequence]:
        """Act on the inbox, admit, and return the sequences of the next step."""
        while self._inbox:
            self._inbox.popleft()()
        self._requests.admit()
        return self._requests.ready()

    def _hurry(self, plan: Plan) -> None:
        """Nobody runs anything and this rank has waited long enough for the others to leave: end the group."""
        if not (plan.idle and self._may_leave()):
            self._quiet_since = time.monotonic()
        elif time.monotonic() - self._quiet_since > QUIET_S:
            self._stop_now = True

    def _may_leave(self) -> bool:
        return self._leaving and not self._scheduler.num_held and not self._scheduler.num_waiting

    def _has_news(self) -> bool:
        """Something the group does not know yet."""
        return (self._may_leave(), self._stop_now) != self._told

    def _refresh(self, age_s: float) -> None:
        """Renew what `status` shows if it is older than that."""
        now = time.monotonic()
        if now - self._refreshed < age_s:
            return
        self._refreshed, index = now, self._scheduler.index
        held = index.held_count
        self._gauges = {
            "running": self._scheduler.num_held,
            "queued": self._scheduler.num_waiting,
            "parked": self._scheduler.num_parked,
            "draft_tokens": self._drafting.current,
            "device_free_blocks": index.num_slots - held,
            "device_cached_blocks": index.num_slots - held - index.free_count,
        }

    def _finish(self, reason: HeadraceError) -> None:
        """Fail what is left. From here on whoever posts runs the inbox itself."""
        self._requests.fail_all(reason)
        self.ended.set()
        self._run_late(reason)
        self._refresh(0.0)

    def _run_late(self, reason: HeadraceError) -> None:
        with self._late:
            while self._inbox:
                self._inbox.popleft()()
            self._requests.fail_all(reason)
