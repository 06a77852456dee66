"""One client request as a whole: its prompts, their choices, one merged stream of text deltas, and the usage.

The first choice of a prompt starts alone; its siblings start when its prompt is computed, so that they hit. Everything
is aborted when the reader stops (`cancel`, or leaving `deltas`). The same path serves streaming and not.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from headrace.errors import HeadraceError
from headrace.ids import Namespace, RequestId
from headrace.kvstore.names import NameChain, token_bytes
from headrace.messages import SamplingParams, TokenLogprob
from headrace.router.answers.text import AnswerText, TextDelta, TextRules
from headrace.router.base import GenerationEngine, PromptReady, RunningSequence, SequenceRequest
from headrace.router.tokens.tokenizer import Tokenizer


@dataclasses.dataclass(slots=True)
class Usage:
    """True counts, whatever the API calls them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_by_tier: dict[str, int] = dataclasses.field(default_factory=lambda: {"device": 0, "host": 0})

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached_by_tier.values())


class RequestObserver(Protocol):
    """What metrics want to know of a client request."""

    def prompt_ready(self, waited_s: float, prompt_tokens: int, cached: dict[str, int]) -> None: ...

    def tokens(self, count: int, since_last_s: float | None, since_start_s: float) -> None:
        """`since_last_s` None: the first tokens of a choice."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    request_id: str
    namespace: Namespace
    prompts: Sequence[Sequence[int]]
    n: int
    sampling: SamplingParams
    """`choice` is filled in per choice."""
    rules: TextRules
    deadline: float
    publish: bool = True
    chains: Sequence[NameChain | None] = ()
    """Names of the prompts' blocks, where they are known."""
    prompt_logprobs: int = -1
    """As in `SequenceRequest`; each prompt's first choice asks."""
    tenant: str = ""
    priority: int = 0
    session: str = ""
    arrived: float | None = None
    """When the client's request came, on the loop's clock; None: now."""


class Generation:
    """Choice index = prompt index * n + choice, as the completions API numbers them."""

    def __init__(
        self, engine: GenerationEngine, tokenizer: Tokenizer, observer: RequestObserver, spec: GenerationSpec
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._observer = observer
        self.spec = spec
        self.usage = Usage(prompt_tokens=sum(map(len, spec.prompts)))
        self.prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
        """By prompt, known before its first delta."""
        self._merged: asyncio.Queue[tuple[int, TextDelta] | HeadraceError] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._clock: Callable[[], float] = asyncio.get_running_loop().time
        self._started_at = self._clock() if spec.arrived is None else spec.arrived

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._started_at

    @property
    def choices(self) -> int:
        return len(self.spec.prompts) * self.spec.n

    async def deltas(self) -> AsyncIterator[tuple[int, TextDelta]]:
        """(choice index, delta) of all choices as they come; each choice ends with a finish reason. Raises the first
        HeadraceError of any choice, after aborting the others."""
        for number, prompt in enumerate(self.spec.prompts):
            computed = asyncio.Event()
            data = token_bytes(prompt)
            for choice in range(self.spec.n):
                run = self._choice(number * self.spec.n + choice, choice, data, computed)
                self._tasks.append(asyncio.create_task(run))
        try:
            unfinished = self.choices
            while unfinished:
                item = await self._merged.get()
                if isinstance(item, HeadraceError):
                    raise item
                unfinished -= item[1].finish_reason is not None
                yield item
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Abort whatever runs. Never blocks, idempotent."""
        for task in self._tasks:
            task.cancel()

    async def _choice(self, index: int, choice: int, prompt: bytes, computed: asyncio.Event) -> None:
        if choice:
            await computed.wait()
        spec = self.spec
        sequence = self._engine.submit(
            SequenceRequest(
                request_id=RequestId(f"{spec.request_id}-{index}"),
                prompt=prompt,
                namespace=spec.namespace,
                sampling=dataclasses.replace(spec.sampling, choice=choice),
                deadline=spec.deadline,
                publish=spec.publish,
                prompt_logprobs=-1 if choice else spec.prompt_logprobs,
                chain=spec.chains[index // spec.n] if spec.chains else None,
                tenant=spec.tenant,
                priority=spec.priority,
                session=spec.session,
            )
        )
        try:
            await self._read(index, choice, sequence, computed)
        except HeadraceError as error:
            self._merged.put_nowait(error)
        finally:
            computed.set()
            sequence.cancel()

    async def _read(self, index: int, choice: int, sequence: RunningSequence, computed: asyncio.Event) -> None:
        answer = AnswerText(self._tokenizer, self.spec.rules)
        last: float | None = None
        async for event in sequence.events():
            if isinstance(event, PromptReady):
                if choice == 0:
                    self.prompt_logprobs[index // self.spec.n] = event.logprobs
                computed.set()
                self._prompt_ready(
                    event, counts=choice == 0, prompt_tokens=len(self.spec.prompts[index // self.spec.n])
                )
                continue
            delta = answer.feed(event)
            now = self._clock()
            self._observer.tokens(delta.tokens, None if last is None else now - last, now - self._started_at)
            last = now
            self.usage.completion_tokens += delta.tokens
            self._merged.put_nowait((index, delta))
            if delta.finish_reason is not None:
                return

    def _prompt_ready(self, event: PromptReady, *, counts: bool, prompt_tokens: int) -> None:
        self._observer.prompt_ready(event.waited_s, prompt_tokens, event.cached_tokens)
        if counts:
            for tier, tokens in event.cached_tokens.items():
                self.usage.cached_by_tier[tier] = self.usage.cached_by_tier.get(tier, 0) + tokens
