"""Fake prefill group and decode rank over real gRPC: deterministic, honour aborts, count all they hold.

The answer's token i is `script(prompt, i)`; the default repeats the prompt. Both sides share a `FakeStore` of block
names, so hits, misses and flushes behave like the real store's. For tests of the router, and for its benchmarks.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np

from headrace.errors import HeadraceError
from headrace.ids import BlockName, RequestId, new_incarnation
from headrace.kernels.formats import BLOCK_TOKENS
from headrace.kvstore.base import Placement
from headrace.kvstore.names import private_name
from headrace.messages import (
    Aborted,
    AbortRequest,
    Accepted,
    BoxStatus,
    DecodeRequest,
    ErrorInfo,
    FlushDone,
    FlushRequest,
    Handover,
    Hello,
    PrefillDone,
    PrefillFailed,
    PrefillRequest,
    Refused,
    SamplingParams,
    SequenceTokens,
    StatusRequest,
    StepTokens,
    TokenLogprob,
)
from headrace.rpc import server

Script = Callable[[Sequence[int], int], int]


def echo(prompt: Sequence[int], index: int) -> int:
    return prompt[index % len(prompt)]


@dataclasses.dataclass(slots=True)
class FakeStore:
    """Block names that both pools can read, and the directory's view of them. Implements kvstore.base.Directory."""

    blocks: set[BlockName] = dataclasses.field(default_factory=set)

    async def start(self) -> None:
        return None

    async def close(self) -> None:
        return None

    def lookup(self, names: Sequence[BlockName]) -> Placement:
        return Placement(host_blocks={"node-0": self.match(names)}, device_blocks={})

    def stats(self) -> dict[str, float]:
        return {"blocks": float(len(self.blocks))}

    def match(self, names: Sequence[BlockName]) -> int:
        count = 0
        for name in names:
            if name not in self.blocks:
                break
            count += 1
        return count


@dataclasses.dataclass(kw_only=True)
class FakeBox:
    """What both fakes share: an address, knobs for faults, and counters."""

    name: str
    store: FakeStore
    token: str = ""
    script: Script = echo
    fingerprint: bytes = b"f" * 32
    device_blocks: int = 1024
    step_s: float = 0.0
    address: str = ""
    held: set[RequestId] = dataclasses.field(default_factory=set)
    seen: list[Any] = dataclasses.field(default_factory=list)
    aborted: int = 0
    fail_next: list[HeadraceError] = dataclasses.field(default_factory=list)
    """Errors for the next requests, first one first."""
    _server: Any = None

    async def _serve(self, service: str, port: int, **methods: Any) -> str:
        unary: dict[str, Any] = {"Hello": self._hello, "Status": self._status, "Flush": self._flush}
        self._server = server(service, self.token, unary=unary, **methods)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        await self._server.start()
        return self.address

    async def stop(self) -> None:
        """Like a process that dies: streams break, everything held is gone."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
        self.held.clear()

    async def _hello(self, hello: Hello, _context: Any) -> Hello | ErrorInfo:
        if hello.fingerprint not in (b"", self.fingerprint):
            return ErrorInfo(kind="IncompatiblePeer", text=f"{self.name} has another fingerprint")
        return Hello(name=self.name, role="fake", incarnation=new_incarnation(), fingerprint=self.fingerprint)

    async def _status(self, _request: StatusRequest, _context: Any) -> BoxStatus:
        values = {
            "running": float(len(self.held)),
            "device_blocks": float(self.device_blocks),
            "aborted_total": float(self.aborted),
            "cached_tokens_total{tier=host}": 0.0,
        }
        return BoxStatus(name=self.name, incarnation=new_incarnation(), ready=True, values=values)

    async def _flush(self, _request: FlushRequest, _context: Any) -> FlushDone:
        count = len(self.store.blocks)
        self.store.blocks.clear()
        return FlushDone(blocks=count)

    def _token(self, prompt: Sequence[int], index: int, sampling: SamplingParams) -> tuple[int, str | None]:
        """(token, finish reason) of answer index `index`."""
        token = self.script(prompt, index)
        if token in sampling.stop_token_ids and index + 1 >= sampling.min_tokens:
            return token, "stop"
        return token, "length" if index + 1 >= sampling.max_tokens else None

    @staticmethod
    def _logprob(token: int, sampling: SamplingParams) -> TokenLogprob | None:
        if sampling.top_logprobs < 0:
            return None
        return TokenLogprob(logprob=-0.5, top=tuple((token + i, -0.5 - i) for i in range(sampling.top_logprobs)))


@dataclasses.dataclass(kw_only=True)
class FakePrefill(FakeBox):
    """A prefill group's leader. `compute_s`: time of one prompt."""

    compute_s: float = 0.0

    async def start(self, port: int = 0) -> str:
        return await self._serve("headrace.Prefill", port, server_stream={"Run": self._run})

    async def _run(self, request: PrefillRequest, _context: Any) -> AsyncIterator[Any]:
        self.seen.append(request)
        self.held.add(request.request_id)
        answered = False
        try:
            await asyncio.sleep(self.compute_s)
            if self.fail_next:
                error = self.fail_next.pop(0)
                info = ErrorInfo(kind=error.kind, text=str(error))
                yield PrefillFailed(request_id=request.request_id, error=info)
                return
            done = self._compute(request)
            answered = done.finish_reason is None
            yield done
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.aborted += not answered
            raise
        finally:
            self.held.discard(request.request_id)

    def _compute(self, request: PrefillRequest) -> PrefillDone:
        tokens: list[int] = np.frombuffer(request.tokens, "<u4").tolist()
        prompt = tokens[: len(tokens) - request.output_index]
        hit = min(self.store.match(request.block_names) * BLOCK_TOKENS, len(tokens) - 1)
        if request.publish:
            self.store.blocks.update(request.block_names)
        token, finish = self._token(prompt, request.output_index, request.sampling)
        name = private_name()
        handover = Handover(private_name=name, draft_tokens=(), mtp_hidden=b"", index_seed=b"")
        return PrefillDone(
            request_id=request.request_id,
            first_token=token,
            logprob=self._logprob(token, request.sampling),
            finish_reason=finish,
            cached_tokens={"device": 0, "host": hit},
            prompt_logprobs=tuple(self._scores(tokens, request.prompt_logprobs)),
            handover=None if finish or not request.want_handover else handover,
            compute_s=self.compute_s,
        )

    @staticmethod
    def _scores(tokens: list[int], top: int) -> list[TokenLogprob]:
        if top < 0:
            return []
        return [TokenLogprob(logprob=-0.25, top=tuple((t + i, -0.25 - i) for i in range(top))) for t in tokens[1:]]


@dataclasses.dataclass(slots=True)
class _Stepping:
    request: DecodeRequest
    prompt: list[int]
    index: int


@dataclasses.dataclass(kw_only=True)
class FakeDecode(FakeBox):
    """A decode rank: all sequences of a stream advance together, up to `tokens_per_step` tokens each."""

    tokens_per_step: int = 3

    async def start(self, port: int = 0) -> str:
        return await self._serve("headrace.Decode", port, bidi={"Stream": self._stream})

    async def _stream(self, requests: AsyncIterator[Any], _context: Any) -> AsyncIterator[Any]:
        running: dict[RequestId, _Stepping] = {}
        outbox: asyncio.Queue[Any] = asyncio.Queue()
        wake = asyncio.Event()
        tasks = [
            asyncio.create_task(self._read(requests, running, outbox, wake)),
            asyncio.create_task(self._step(running, outbox, wake)),
        ]
        try:
            while True:
                yield await outbox.get()
        finally:
            for task in tasks:
                task.cancel()
            self.held.difference_update(running)

    async def _read(
        self, requests: AsyncIterator[Any], running: dict[RequestId, _Stepping], outbox: Any, wake: asyncio.Event
    ) -> None:
        async for message in requests:
            self.seen.append(message)
            if isinstance(message, AbortRequest):
                self.aborted += running.pop(message.request_id, None) is not None
                self.held.discard(message.request_id)
                outbox.put_nowait(Aborted(request_id=message.request_id))
                continue
            refusal = self._refusal(message)
            if refusal is not None:
                outbox.put_nowait(Refused(request_id=message.request_id, error=refusal))
                continue
            tokens: list[int] = np.frombuffer(message.tokens, "<u4").tolist()
            prompt = tokens[: len(tokens) - (message.output_index - 1)]
            running[message.request_id] = _Stepping(message, prompt, message.output_index)
            self.held.add(message.request_id)
            outbox.put_nowait(Accepted(request_id=message.request_id, restored_tokens={"host": len(tokens)}))
            wake.set()

    def _refusal(self, request: DecodeRequest) -> ErrorInfo | None:
        if self.fail_next:
            error = self.fail_next.pop(0)
            return ErrorInfo(kind=error.kind, text=str(error))
        held = self.store.match(request.block_names)
        if request.publish and held < len(request.block_names):
            return ErrorInfo(kind="BlockMiss", text=f"block {held} of {len(request.block_names)} is gone")
        return None

    async def _step(self, running: dict[RequestId, _Stepping], outbox: Any, wake: asyncio.Event) -> None:
        step = 0
        while True:
            await wake.wait()
            await asyncio.sleep(self.step_s)
            parts = tuple(self._advance(item) for item in running.values())
            for part in parts:
                if part.finish_reason is not None:
                    del running[part.request_id]
                    self.held.discard(part.request_id)
            if parts:
                outbox.put_nowait(StepTokens(step=step, sequences=parts))
                step += 1
            if not running:
                wake.clear()

    def _advance(self, item: _Stepping) -> SequenceTokens:
        tokens: list[int] = []
        finish = None
        sampling = item.request.sampling
        for _ in range(1 + item.index % self.tokens_per_step):
            token, finish = self._token(item.prompt, item.index, sampling)
            tokens.append(token)
            item.index += 1
            if finish is not None:
                break
        found = [self._logprob(token, sampling) for token in tokens]
        return SequenceTokens(
            request_id=item.request.request_id,
            tokens=tuple(tokens),
            logprobs=tuple(x for x in found if x is not None),
            finish_reason=finish,
            drafted=self.tokens_per_step,
            accepted=len(tokens) - 1,
        )
