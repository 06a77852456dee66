"""The life of one sequence between the two pools (DESIGN section 6). Token level only: no text, no HTTP.

1. names from the tokens, 2. placement and reservation, 3. prefill: first token, its stream stays open as the pin,
4. decode: submit, on Accepted the prefill stream is closed, 5. tokens until a finish reason.
A miss or a lost rank goes back to 1 with the tokens already sent appended to the prompt, until the deadline.

Every sequence is one asyncio task that owns its prefill stream, its decode run and its ticket, and gives each back in
one `finally`. Cancelling never depends on the reader: `cancel` aborts both sides at once.
"""

import asyncio
import logging
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from collections.abc import Sequence as Seq

from headrace.errors import (
    BlockMiss,
    Cancelled,
    CapacityError,
    DeadlineExceeded,
    Draining,
    EngineError,
    HeadraceError,
    IncompatiblePeer,
    NeverFits,
    RankLost,
    StoreError,
)
from headrace.ids import BlockName, RequestId
from headrace.kvstore.names import NameChain, tenant_id
from headrace.messages import DecodeRequest, PrefillDone, PrefillRequest, TokenLogprob
from headrace.router.base import Demand, Event, NewTokens, Placer, PromptReady, SequenceRequest, Ticket
from headrace.router.decode_client import DecodeClient, DecodeRun
from headrace.router.observe import EngineObserver
from headrace.router.prefill_client import PrefillClient, PrefillRun

MAX_MISSES = 4
"""Attempts that may end in BlockMiss before the request fails: more means the store is thrashing."""
RETRY_PAUSE_S = (0.05, 1.0)
WAIT_MARGIN_S = 0.1
"""Waiting for room ends this much before the request does, so that the client learns the reason (429, not 504)."""
ABORT_TIMEOUT_S = 5.0
"""How long a sequence waits for `Aborted`; afterwards the rank's own leases and the broken stream clean up."""

log = logging.getLogger(__name__)


class Engine:
    """Runs sequences against the clients it is given; knows all that run."""

    def __init__(
        self,
        prefill: Mapping[str, PrefillClient],
        decode: Mapping[str, DecodeClient],
        placer: Placer,
        observer: EngineObserver,
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.placer = placer
        self.observer = observer
        self._running: set[Sequence] = set()

    def submit(self, request: SequenceRequest) -> "Sequence":
        sequence = Sequence(self, request)
        self._running.add(sequence)
        sequence.start(self._running.discard)
        return sequence

    @property
    def running(self) -> int:
        return len(self._running)

    async def drain(self, grace_s: float) -> None:
        """Let what runs finish within `grace_s`, abort the rest, return when nothing is held."""
        if self._running:
            await asyncio.wait([s.task for s in self._running], timeout=grace_s)
        ended = Draining(f"the service is shutting down; this was not finished after a grace of {grace_s:g} s")
        for sequence in list(self._running):
            sequence.cancel(ended)
        if self._running:
            await asyncio.wait([s.task for s in self._running], timeout=ABORT_TIMEOUT_S + 1)


class Sequence:
    """One sequence. Implements base.RunningSequence."""

    task: "asyncio.Task[None]"

    def __init__(self, engine: Engine, request: SequenceRequest) -> None:
        self._engine = engine
        self._request = request
        self._events: asyncio.Queue[Event | HeadraceError] = asyncio.Queue()
        self._sent: list[int] = []
        self._finished = False
        self._cancelled: HeadraceError = Cancelled("the sequence was cancelled")
        self._reported_prompt = False
        self._misses = 0
        self._attempts = 0
        self._started_at = asyncio.get_running_loop().time()

    def start(self, forget: "Callable[[Sequence], None]") -> None:
        self.task = asyncio.create_task(self._run(), name=f"sequence {self._request.request_id}")
        self.task.add_done_callback(lambda _task: forget(self))

    def cancel(self, reason: HeadraceError | None = None) -> None:
        # Once only: a second cancellation would interrupt the waiting for the rank's confirmation.
        if not self._finished:
            self._finished = True
            self._cancelled = reason or self._cancelled
            self.task.cancel()

    async def closed(self) -> None:
        await asyncio.wait([self.task])

    async def events(self) -> AsyncIterator[Event]:
        while True:
            event = await self._events.get()
            if isinstance(event, HeadraceError):
                raise event
            yield event
            if isinstance(event, NewTokens) and event.finish_reason is not None:
                return

    async def _run(self) -> None:
        try:
            async with asyncio.timeout_at(self._request.deadline):
                await self._until_done()
            self._engine.placer.answered(len(self._sent))
        except TimeoutError:
            waited = asyncio.get_running_loop().time() - self._started_at
            self._events.put_nowait(
                DeadlineExceeded(f"not finished after {waited:.1f} s ({len(self._sent)} tokens were generated)")
            )
        except HeadraceError as error:
            self._events.put_nowait(error)
        except asyncio.CancelledError:
            self._events.put_nowait(self._cancelled)
        except Exception as error:
            log.exception("sequence %s failed", self._request.request_id)
            self._events.put_nowait(EngineError(f"internal error: {type(error).__name__}"))

    async def _until_done(self) -> None:
        """Attempts until the answer is complete. Raises what cannot be retried."""
        pause = RETRY_PAUSE_S[0]
        while not self._finished:
            try:
                await self._attempt()
            except HeadraceError as error:
                if not self._may_retry(error):
                    raise
                self._engine.observer.retried(self._request.request_id, error)
                log.warning("sequence %s: %s: %s; trying again", self._request.request_id, error.kind, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_PAUSE_S[1])

    def _may_retry(self, error: HeadraceError) -> bool:
        if isinstance(error, BlockMiss):
            self._misses += 1
            return self._misses < MAX_MISSES
        if isinstance(error, NeverFits):
            return False
        if isinstance(error, CapacityError):
            # A refusal before the first token belongs to the client; once tokens are out the stream must go on.
            return bool(self._sent)
        return isinstance(error, (RankLost, StoreError)) and not isinstance(error, IncompatiblePeer)

    async def _attempt(self) -> None:
        """One pass through prefill and decode, continuing after the tokens already sent."""
        request, sampling = self._request, self._request.sampling
        request_id = self._attempt_id()
        resumed = len(self._sent)
        sent = struct.pack(f"<{resumed}I", *self._sent)
        tokens = request.prompt + sent
        chain = NameChain(request.namespace) if request.chain is None else request.chain.copy()
        chain.extend(tokens if request.chain is None else sent)
        demand = self._demand(chain.names, len(tokens) // 4)
        ticket = await self._engine.placer.place(demand)
        self._engine.observer.placed(ticket, demand)
        pin: PrefillRun | None = None
        run: DecodeRun | None = None
        try:
            last_one = sampling.max_tokens - resumed == 1
            pin = await self._engine.prefill[ticket.prefill].run(
                PrefillRequest(
                    request_id=request_id,
                    tokens=tokens,
                    block_names=tuple(chain.names),
                    sampling=sampling,
                    output_index=resumed,
                    want_handover=not last_one,
                    publish=request.publish,
                    prompt_logprobs=-1 if resumed else request.prompt_logprobs,
                    tenant=tenant_id(request.namespace),
                )
            )
            done = await pin.done()
            self._prefilled(ticket, demand, done)
            if done.finish_reason is not None:
                return
            if done.handover is None:
                raise EngineError(f"{ticket.prefill} gave neither a finish reason nor a handover")
            run = self._engine.decode[ticket.decode].submit(
                DecodeRequest(
                    request_id=request_id,
                    tokens=tokens,
                    block_names=tuple(chain.names),
                    first_token=done.first_token,
                    output_index=resumed + 1,
                    sampling=sampling,
                    handover=done.handover,
                    namespace=request.namespace,
                    publish=request.publish,
                )
            )
            await run.accepted()
            ticket.worked()
            self._engine.observer.accepted(demand)
            pin.close()
            await self._relay(run)
        except (BlockMiss, RankLost, StoreError):
            ticket.failed()
            raise
        finally:
            await self._give_back(ticket, pin, run)

    def _demand(self, names: Seq[BlockName], prompt_tokens: int) -> Demand:
        request = self._request
        return Demand(
            names=names,
            prompt_tokens=prompt_tokens,
            answer_tokens=request.sampling.max_tokens - len(self._sent),
            deadline=request.deadline - WAIT_MARGIN_S,
            request_id=request.request_id,
            tenant=request.tenant,
            priority=request.priority,
            session=request.session,
        )

    def _attempt_id(self) -> RequestId:
        """A new id per attempt: what a pool still does for a broken attempt must not touch the next one."""
        first = self._request.request_id
        self._attempts += 1
        return first if self._attempts == 1 else RequestId(f"{first}~{self._attempts}")

    def _prefilled(self, ticket: Ticket, demand: Demand, done: PrefillDone) -> None:
        ticket.prefill_finished()
        waited = max(0.0, asyncio.get_running_loop().time() - self._started_at - done.restore_s - done.compute_s)
        self._engine.observer.prefilled(ticket, demand, done)
        if not self._reported_prompt:
            self._reported_prompt = True
            self._events.put_nowait(PromptReady(dict(done.cached_tokens), waited, done.prompt_logprobs))
        self._emit((done.first_token,), () if done.logprob is None else (done.logprob,), done.finish_reason)

    async def _relay(self, run: DecodeRun) -> None:
        clock = asyncio.get_running_loop().time
        last = clock()
        while not self._finished:
            new = await run.tokens()
            now = clock()
            self._engine.observer.stepped(new.drafted, new.accepted, now - last)
            last = now
            self._emit(new.tokens, new.logprobs, new.finish_reason)

    def _emit(self, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...], finish_reason: str | None) -> None:
        self._sent.extend(tokens)
        self._finished = self._finished or finish_reason is not None
        if tokens or finish_reason is not None:
            self._events.put_nowait(NewTokens(tokens, logprobs, finish_reason))

    async def _give_back(self, ticket: Ticket, pin: PrefillRun | None, run: DecodeRun | None) -> None:
        """Release both sides; the reservation is only free when the rank says so (or does not answer)."""
        if pin is not None:
            pin.close()
        ticket.prefill_finished(computed=False)
        try:
            if run is not None:
                run.abort()
                await asyncio.wait_for(run.released(), ABORT_TIMEOUT_S)
        except TimeoutError:
            log.error("sequence %s: %s did not confirm the abort", self._request.request_id, ticket.decode)
            self._engine.observer.abort_unconfirmed()
        finally:
            ticket.release()
