"""One sequence: its tokens, what of it is committed, its blocks and their names. Pure: no torch, no store.

With L committed rows (target KV rows 0..L-1 and MTP rows 1..L are valid) the token at position L is sampled but has no
KV: the pending token. A step verifies rows L..L+n with tokens [pending, drafts...] and commits 1 + accepted of them.
"""

import dataclasses
import enum
from typing import Any

import numpy as np

from headrace.decode.base import LENGTH, StreamId
from headrace.errors import InputError, PromptTooLong
from headrace.ids import BlockName, Incarnation, RequestId
from headrace.kernels.formats import BLOCK_TOKENS
from headrace.kvstore.names import NameChain
from headrace.messages import DecodeRequest, TokenLogprob


class Phase(enum.Enum):
    """Where a sequence is. It holds blocks from LEASING on, until it is WAITING again (parked) or GONE."""

    WAITING = "waiting"
    LEASING = "leasing"
    COPYING = "copying"
    RUNNING = "running"
    PARKING = "parking"
    GONE = "gone"


@dataclasses.dataclass(slots=True)
class Emission:
    """What one step gave one sequence."""

    tokens: list[int]
    logprobs: list[TokenLogprob]
    drafted: int
    accepted: int
    finish_reason: str | None = None
    """The sampler's verdict: "stop", "length" or None."""


@dataclasses.dataclass(frozen=True, slots=True)
class ParkedBlocks:
    """A sequence in the host tier: one pinned block per block of it, under its public name where it has one."""

    names: list[BlockName]
    holder: Incarnation
    """Under which the client took the pins; they ended with it."""


class Sequence:
    """State of one request on this rank. The step loop owns it."""

    __slots__ = (
        "accepted",
        "answer",
        "blocks",
        "chain",
        "committed",
        "drafts",
        "finish_reason",
        "lifetime_blocks",
        "limit",
        "named_blocks",
        "order",
        "parked",
        "phase",
        "private_position",
        "prompt",
        "request",
        "reserved_blocks",
        "restored_tokens",
        "sampler",
        "stream",
        "was_parked",
        "work",
    )

    def __init__(self, request: DecodeRequest, stream: StreamId, context_tokens: int) -> None:
        """Raises InputError when the request contradicts itself: it is refused before it takes anything."""
        self.request = request
        self.stream = stream
        self.phase = Phase.WAITING
        self.prompt: list[int] = np.frombuffer(request.tokens, dtype="<u4").tolist()
        _check(request, len(self.prompt))
        self.committed = len(self.prompt)
        """L"""
        self.answer: list[int] = [request.first_token]
        """Tokens after the prompt; the last one is pending."""
        left = request.sampling.max_tokens - request.output_index
        self.limit = min(left, context_tokens - len(self.prompt) - 1)
        """Tokens this rank may sample in all."""
        if self.limit < 1:
            raise PromptTooLong(
                f"{len(self.prompt)} prompt tokens and the first token leave no room in a context of {context_tokens}",
                "tokens",
            )
        self.drafts: list[int] = list(request.handover.draft_tokens)
        self.private_position = len(self.prompt) // BLOCK_TOKENS
        self.blocks: list[int] = []
        """Slot of each block so far."""
        self.lifetime_blocks = (len(self.prompt) + self.limit + 1) // BLOCK_TOKENS + 1
        """Blocks of rows 0..P + limit + 1: target rows end at P + limit - 1, the last extend writes MTP row P + limit,
        and one row of slack keeps a speculative step inside whatever its acceptance."""
        self.reserved_blocks = self.lifetime_blocks
        """Blocks that admission counts for it; the scheduler sets it, and raises it when it grows beyond."""
        self.order = 0
        """Place in the order of arrival on this rank: whoever waits for room goes by it, parked ones included."""
        self.parked: ParkedBlocks | None = None
        """Where its bytes are while it is parked in the host tier."""
        self.was_parked = False
        self.accepted = False
        """Its joining was answered: from then on it ends with a finish reason, an abort or a failure, not a refusal."""
        self.named_blocks = len(request.block_names)
        """Leading blocks whose names are settled (published or found)."""
        self.chain = _chain(request, self.prompt)
        self.restored_tokens: dict[str, int] = {}
        self.sampler: Any = None
        """`model.sampler.SamplerState`, made when the sequence starts to run."""
        self.work: Any = None
        """The store job that works for it while it joins."""
        self.finish_reason: str | None = None

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def pending(self) -> int:
        """The token at position `committed`."""
        return self.answer[-1]

    @property
    def sampled(self) -> int:
        """Tokens this rank has sampled."""
        return len(self.answer) - 1

    @property
    def remaining(self) -> int:
        """Tokens this rank may still sample."""
        return self.limit - self.sampled

    @property
    def output_index(self) -> int:
        """Index within the answer of the next token to sample: part of the noise key."""
        return self.request.output_index + self.sampled

    def answer_before(self) -> list[int]:
        """Tokens of the answer sampled before this rank's first: those a resumed stream carries in its prompt, then
        the first token. Penalties count them."""
        earlier = self.request.output_index - 1
        return [*self.prompt[len(self.prompt) - earlier :], self.request.first_token] if earlier else [self.pending]

    def cut_drafts(self, most: int) -> list[int]:
        """The drafts to verify now: at most `most`, and never so many that all being accepted would sample more than
        `remaining` tokens (a step samples one more than it accepts), nor what the request's grammar forbids."""
        self.drafts = self.drafts[: max(0, min(most, self.remaining - 1))]
        if self.sampler is not None:
            self.drafts = self.drafts[: self.sampler.possible(self.drafts)]
        return self.drafts

    def step_rows(self, draft_tokens: int) -> int:
        """Rows that one step may touch: the verify writes up to row L + n, the extend one more, the draft steps after
        that `draft_tokens` more. Never beyond its lifetime: drafts are cut there."""
        return min(self.committed + len(self.drafts) + 2 + draft_tokens, self.lifetime_blocks * BLOCK_TOKENS)

    def block_names(self) -> list[tuple[BlockName | None, BlockName | None]]:
        """(name, parent) of each block that holds committed rows or the pending MTP row; (None, None) where the bytes
        are this sequence's alone."""
        known = self.chain.names[: self.named_blocks] if self.chain else list(self.request.block_names)
        used = -(-(self.committed + 1) // BLOCK_TOKENS)
        parents = [None, *known]
        return [(known[at], parents[at]) if at < len(known) else (None, None) for at in range(used)]

    def commit(self, emission: Emission) -> None:
        """Append the sampled tokens and commit as many rows; settle the finish reason."""
        room = self.remaining
        if not 1 <= len(emission.tokens) <= room:
            raise AssertionError(f"{len(emission.tokens)} tokens sampled, {room} allowed")
        self.answer += emission.tokens
        self.committed += len(emission.tokens)
        self.drafts = []
        self.finish_reason = emission.finish_reason
        if self.finish_reason is None and self.remaining == 0:
            self.finish_reason = LENGTH  # the context ends before max_tokens does

    def new_full_blocks(self) -> list[tuple[int, BlockName, BlockName | None]]:
        """(position, name, parent) of blocks whose 64 target rows are committed since the last call. Call it after the
        extend of the step, when their MTP rows (rows up to L) are true as well. Empty when the request is not to be
        published or its root is unknown."""
        if self.chain is None:
            return []
        have, full = self.chain.num_tokens, self.committed // BLOCK_TOKENS * BLOCK_TOKENS
        if full > have:
            self.chain.extend(self.tokens(have, full))
        names = self.chain.names
        new = [
            (at, names[at], names[at - 1] if at else None)
            for at in range(self.named_blocks, self.committed // BLOCK_TOKENS)
        ]
        self.named_blocks += len(new)
        return new

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens at positions [start, end)."""
        length = len(self.prompt)
        return self.prompt[start:end] + self.answer[max(0, start - length) : max(0, end - length)]


def _check(request: DecodeRequest, length: int) -> None:
    if len(request.tokens) % 4 or length == 0:
        raise InputError(f"{len(request.tokens)} bytes of prompt are not one or more u32 tokens", "tokens")
    full, named = length // BLOCK_TOKENS, len(request.block_names)
    if named != full:
        raise InputError(f"a prompt of {length} tokens has {full} full blocks, got {named} names", "block_names")
    if not 1 <= request.output_index <= length + 1:
        raise InputError(f"output_index {request.output_index} is not in 1..{length + 1}", "output_index")
    if request.sampling.max_tokens <= request.output_index:
        raise InputError(
            f"max_tokens {request.sampling.max_tokens} leaves nothing to sample at output index {request.output_index}",
            "max_tokens",
        )


def _chain(request: DecodeRequest, prompt: list[int]) -> NameChain | None:
    """Names of the sequence so far, or None when its answer blocks are not to be named."""
    if not request.publish or not (request.block_names or request.namespace):
        return None
    chain = NameChain(request.namespace)
    chain.names = list(request.block_names)
    chain.extend(prompt[len(chain.names) * BLOCK_TOKENS :])
    return chain
