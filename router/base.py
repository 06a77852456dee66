"""Contracts inside the router: what the API layer asks of the engine, and what the engine asks of placement.

All of it lives on one asyncio event loop; nothing here is thread-safe. No torch.
"""

import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from headrace.ids import BlockName, Namespace, RequestId
from headrace.kvstore.names import NameChain
from headrace.messages import SamplingParams, TokenLogprob


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRequest:
    """One sequence to generate, already tokenised. A client request with n choices is n of these."""

    request_id: RequestId
    prompt: bytes
    """Little-endian u32, at least one token."""
    namespace: Namespace
    sampling: SamplingParams
    deadline: float
    """On the loop's clock (`loop.time()`)."""
    publish: bool = True
    prompt_logprobs: int = -1
    """k >= 0: logprobs of the prompt's own tokens with the k best; its namespace must then be nobody else's."""
    chain: NameChain | None = None
    """Names of the prompt's blocks, if they are known; never changed."""
    tenant: str = ""
    priority: int = 0
    session: str = ""

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // 4


@dataclasses.dataclass(frozen=True, slots=True)
class PromptReady:
    """The prompt is computed: the first event of every sequence, sent once even if the prompt is computed again."""

    cached_tokens: dict[str, int]
    """By tier; true values from the prefill group."""
    waited_s: float
    """From submission to the prefill group's first work: admission, placement and queue."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the prompt's tokens after the first, if they were asked for."""


@dataclasses.dataclass(frozen=True, slots=True)
class NewTokens:
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    """Empty, or one per token."""
    finish_reason: str | None
    """None, "stop" or "length"; with a reason it is the last event."""


Event = PromptReady | NewTokens


class RunningSequence(Protocol):
    """A running sequence."""

    def events(self) -> AsyncIterator[Event]:
        """PromptReady, then NewTokens until a finish reason. Raises HeadraceError when it failed for good."""
        ...

    def cancel(self) -> None:
        """Abort it on both pools at once. Never blocks; harmless when it has ended."""
        ...

    async def closed(self) -> None:
        """Returns when nothing of it is held anywhere (bounded by the engine's abort timeout)."""
        ...


class GenerationEngine(Protocol):
    def submit(self, request: SequenceRequest) -> RunningSequence:
        """Start it. Refusals (CapacityError, NeverFits) come out of `events`."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What placement must know of a sequence."""

    names: Sequence[BlockName]
    prompt_tokens: int
    answer_tokens: int
    """Most tokens that may still be generated."""
    deadline: float
    request_id: RequestId = RequestId("")
    tenant: str = ""
    priority: int = 0
    """Higher ones of the same tenant go first."""
    session: str = ""
    """What the client calls its session; for the policy of that name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """Why a place was taken."""

    matched: dict[str, int]
    """Leading blocks of the prompt: "host", and the device tiers of the group and the rank that were chosen."""
    groups: tuple[Any, ...]
    """Candidates (`policies.Group`), best first."""
    ranks: tuple[Any, ...]
    """Candidates (`policies.Rank`), best first."""


class Ticket(Protocol):
    """A place that is reserved: released exactly once, by the sequence that owns it."""

    prefill: str
    """"prefill-0\""""
    decode: str
    """"decode-0.1\""""
    predicted_cached_tokens: int
    predicted_prefill_s: float
    """Restore and compute, without the queue."""
    choice: Choice

    def prefill_finished(self, *, computed: bool = True) -> None:
        """The prefill group is done with it; idempotent."""
        ...

    def failed(self) -> None:
        """This group and this rank did not work together."""
        ...

    def worked(self) -> None:
        """They did."""
        ...

    def release(self) -> None:
        """Give the decode reservation back; idempotent."""
        ...


class Placer(Protocol):
    async def place(self, demand: Demand) -> Ticket:
        """Wait (bounded) for room and pick the pair with the lowest predicted time to the second token. Raises
        CapacityError (queue full, or the deadline passed) or NeverFits."""
        ...

    def answered(self, tokens: int) -> None:
        """An answer ended with so many tokens: what the next ones are expected to need follows from it."""
        ...
