"""Client of one decode rank: one long-lived stream, many sequences on it, reconnected when it breaks.

Incoming messages are dealt to per-sequence queues by request id; outgoing ones go through one writer task, because a
gRPC stream takes one write at a time. When the stream breaks, every sequence on it gets RankLost.
"""

import asyncio
import logging
from typing import Any

import grpc.aio

from headrace.errors import EngineError, HeadraceError, RankLost, from_wire
from headrace.ids import RequestId
from headrace.messages import (
    Aborted,
    AbortRequest,
    Accepted,
    DecodeRequest,
    Refused,
    SequenceFailed,
    SequenceTokens,
    StepTokens,
)
from headrace.router.peer import Peer, PeerIdentity
from headrace.rpc import Channel

SERVICE = "headrace.Decode"
RECONNECT_S = (0.05, 2.0)
"""First and longest pause between attempts to reconnect."""

log = logging.getLogger(__name__)


class DecodeRun:
    """One sequence on a decode rank. It is held there from `submit` until a finish reason, Refused, SequenceFailed,
    Aborted, or the loss of the stream (the rank aborts what a broken stream carried)."""

    def __init__(self, client: "DecodeClient", request_id: RequestId) -> None:
        self._client = client
        self.request_id = request_id
        self._inbox: asyncio.Queue[Accepted | SequenceTokens | HeadraceError] = asyncio.Queue()
        self._released = asyncio.Event()
        self._aborting = False

    async def accepted(self) -> Accepted:
        """Raises what the rank refused with (BlockMiss, CapacityError, ...) or RankLost."""
        message = await self._next()
        if not isinstance(message, Accepted):
            raise EngineError(f"{self._client.name} sent {type(message).__name__} before Accepted")
        return message

    async def tokens(self) -> SequenceTokens:
        """The next step's tokens. Raises what failed the sequence, or RankLost."""
        message = await self._next()
        if not isinstance(message, SequenceTokens):
            raise EngineError(f"{self._client.name} sent {type(message).__name__} instead of tokens")
        return message

    async def _next(self) -> Accepted | SequenceTokens:
        message = await self._inbox.get()
        if isinstance(message, HeadraceError):
            raise message
        return message

    def abort(self) -> None:
        """Ask the rank to drop it. Never blocks; harmless when it has ended."""
        if not self._released.is_set() and not self._aborting:
            self._aborting = True
            self._client.send(AbortRequest(request_id=self.request_id))

    async def released(self) -> None:
        """Returns when the rank holds nothing of it any more."""
        await self._released.wait()

    def deliver(self, message: Accepted | SequenceTokens | HeadraceError, *, last: bool) -> None:
        self._inbox.put_nowait(message)
        if last:
            self._released.set()


class DecodeClient:
    """`start` once, `close` once, both on the router's event loop."""

    def __init__(self, name: str, address: str, token: str, identity: PeerIdentity) -> None:
        self.name = name
        self.peer = Peer(name, address, SERVICE, token, identity)
        self._runs: dict[RequestId, DecodeRun] = {}
        self._outbox: asyncio.Queue[Any] = asyncio.Queue()
        self._connected = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        return self._connected.is_set()

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_connected(), name=f"decode stream {self.name}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail_all("the router is stopping")
        await self.peer.close()

    def submit(self, request: DecodeRequest) -> DecodeRun:
        """Hand a sequence over. Raises RankLost when there is no connection now."""
        if not self.connected:
            raise RankLost(f"{self.name} ({self.peer.address}) is not connected")
        run = DecodeRun(self, request.request_id)
        self._runs[request.request_id] = run
        self.send(request)
        return run

    def send(self, message: DecodeRequest | AbortRequest) -> None:
        self._outbox.put_nowait(message)

    async def _keep_connected(self) -> None:
        pause = RECONNECT_S[0]
        while True:
            channel: Channel | None = None
            try:
                channel = await self.peer.ready()
                pause = RECONNECT_S[0]
                await self._serve(channel.bidi("Stream"))
                problem: BaseException | str = "the rank closed the stream"
            except (HeadraceError, grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
                problem = error
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                problem = error
            except Exception as error:
                log.exception("%s: the stream failed unexpectedly", self.name)
                problem = error
            finally:
                self._connected.clear()
                self.peer.lost(channel)
            log.warning("%s: stream lost (%s), reconnecting", self.name, _short(problem))
            self._fail_all(_short(problem))
            await asyncio.sleep(pause)
            pause = min(2 * pause, RECONNECT_S[1])

    async def _serve(self, call: Any) -> None:
        """Read and write one stream until it ends."""
        self._outbox = asyncio.Queue()
        writer = asyncio.create_task(self._write(call, self._outbox), name=f"decode writer {self.name}")
        self._connected.set()
        try:
            async for message in call:
                self._deal(message)
        finally:
            self._connected.clear()
            writer.cancel()
            call.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, call: Any, outbox: "asyncio.Queue[Any]") -> None:
        while True:
            message = await outbox.get()
            try:
                await call.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                # The reader sees the same failure and fails the sequences.
                call.cancel()
                return

    def _deal(self, message: Any) -> None:
        if isinstance(message, StepTokens):
            for part in message.sequences:
                self._deliver(part.request_id, part, last=part.finish_reason is not None)
        elif isinstance(message, Accepted):
            self._deliver(message.request_id, message, last=False)
        elif isinstance(message, (Refused, SequenceFailed)):
            error = from_wire(message.error.kind, message.error.text)
            self._deliver(message.request_id, error, last=True)
        elif isinstance(message, Aborted):
            self._deliver(message.request_id, EngineError("aborted by the router"), last=True)
        else:
            log.error("%s sent an unexpected %s", self.name, type(message).__name__)

    def _deliver(
        self, request_id: RequestId, message: Accepted | SequenceTokens | HeadraceError, *, last: bool
    ) -> None:
        run = self._runs.get(request_id)
        if run is None:
            return  # tokens that were on their way when the abort was answered
        if last:
            del self._runs[request_id]
        run.deliver(message, last=last)

    def _fail_all(self, why: str) -> None:
        runs, self._runs = self._runs, {}
        for run in runs.values():
            run.deliver(RankLost(f"{self.name} ({self.peer.address}): {why}"), last=True)

    @property
    def sequences(self) -> int:
        """Sequences that this router has on the rank."""
        return len(self._runs)


def _short(problem: BaseException | str) -> str:
    if isinstance(problem, grpc.aio.AioRpcError):
        return f"{problem.code().name} {problem.details()}"
    return str(problem) or type(problem).__name__
