"""The plan of one step: everything a rank is told, as messages. Pure; knows no tensors.

Bookkeeping lives on the leader alone. A rank executes plans in order of their step number and holds nothing between
steps but its device pool and, per running prompt, the hidden state of the last row it was shown (`ChunkPlan.carry`).

Order inside a step: restores, zeroing, chunks, tails, stores, drafts. A chunk's rows are [start, start + rows); its MTP
positions are [start - 1, start + rows - 1) (from 0 on), so target rows and MTP rows of a block are complete together.
"""

import dataclasses

import numpy as np
import numpy.typing as npt

from headrace.errors import HeadraceError
from headrace.ids import BlockName, RequestId
from headrace.messages import SamplingParams, TokenLogprob, message


@message
class ChunkPlan:
    """One prompt's rows in this step."""

    request_id: RequestId
    table: bytes
    """Device slots of the sequence's blocks 0, 1, ..., little-endian i32."""
    start: int
    """Position of the first row."""
    tokens: bytes
    """Tokens of the rows, little-endian u32: at least one."""
    query_only: bool
    """The first row is in the cache already: it is computed for its hidden state and its cache write is dropped. There
    is no MTP position before it."""
    carry: bool
    """The hidden state of row start - 1 is the one this rank carries: MTP position start - 1 runs too."""
    sampling: SamplingParams | None = None
    """Set on the prompt's last chunk: sample a token from its last row."""
    scored: int = -1
    """k >= 0: logprobs of the tokens after each row, with the k best."""
    following: int = -1
    """The prompt's token after the last row; -1: there is none."""
    output_index: int = 0
    """Index within the answer of the token to sample."""
    answered: bytes = b""
    """The prompt's last `output_index` tokens (sampled ones, for penalties), little-endian u32; last chunk only."""


@message
class TailPlan:
    """A prompt whose first token t_L is known: MTP position L - 1, then the draft chain. Uses up the carried hidden
    state of row L - 1."""

    request_id: RequestId
    table: bytes
    position: int
    """L - 1"""
    token: int
    """t_L"""
    drafts: int
    """Greedy draft tokens to make: 0 or more."""


@message
class RestorePlan:
    """Copy a slab of the host tier to the device pool of every rank."""

    name: BlockName
    host_slot: int
    device_slot: int
    digest: bytes


@message
class StorePlan:
    """Copy a finished block from the pool of one rank to a host slot that is being written."""

    name: BlockName
    device_slot: int
    host_slot: int
    rank: int
    """The rank that copies it: block index mod ranks, so that all host links work."""


@message
class StepPlan:
    step: int
    restores: tuple[RestorePlan, ...] = ()
    zero: tuple[int, ...] = ()
    """Device slots to clear before use: fresh ones, so that row 0 of the MTP planes and unused rows are zero."""
    chunks: tuple[ChunkPlan, ...] = ()
    tails: tuple[TailPlan, ...] = ()
    stores: tuple[StorePlan, ...] = ()
    arena: str = ""
    """The host tier that the slots of `restores` and `stores` belong to (`StoreClient.arena` of the leader)."""
    ahead: bool = False
    """A chunk reads blocks that this step restores: its layers wait for their bytes as they come."""
    forget: tuple[RequestId, ...] = ()
    """Requests whose carried hidden state is dropped at the start of the step."""


@message
class StoppedPlan:
    """Instead of a plan: the leader is done, followers end."""

    reason: str


@message
class StepAck:
    """What one rank reports when it has executed a plan."""

    step: int
    rank: int
    digests: dict[BlockName, bytes]
    """Slabs this rank wrote to the host tier; none when it could not reach the plan's arena."""
    bad: tuple[BlockName, ...] = ()
    """Restored slabs whose bytes were not what their digest says: nothing computed from them counts."""
    error: str = ""
    """Traceback; the rank is no longer in step and the group must be restarted."""


@message
class FollowerHello:
    """First message of a follower on its stream to the leader."""

    rank: int
    nonce: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Sampled:
    """First token of one prompt (known on the leader only)."""

    token: int
    logprob: TokenLogprob | None
    finish_reason: str | None
    """"stop" or "length" when this token ends the answer."""
    error: HeadraceError | None = None
    """Why there is no token; nothing else counts then."""


@dataclasses.dataclass(frozen=True, slots=True)
class Drafted:
    """Result of one tail (known on the leader only): what `messages.Handover` needs, in its forms."""

    tokens: tuple[int, ...]
    mtp_hidden: bytes
    index_seed: bytes


@dataclasses.dataclass(slots=True)
class StepOutcome:
    """What executing one plan gave; the leader merges the acks of the followers into its own."""

    sampled: dict[RequestId, Sampled] = dataclasses.field(default_factory=dict)
    scores: dict[RequestId, list[TokenLogprob]] = dataclasses.field(default_factory=dict)
    """Of the tokens after the rows of scored chunks (known on the leader only)."""
    drafted: dict[RequestId, Drafted] = dataclasses.field(default_factory=dict)
    digests: dict[BlockName, bytes] = dataclasses.field(default_factory=dict)
    bad: set[BlockName] = dataclasses.field(default_factory=set)


def pack_table(slots: npt.ArrayLike) -> bytes:
    return np.asarray(slots, dtype="<i4").tobytes()


def unpack_table(table: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(table, dtype="<i4").astype(np.int64)


def unpack_tokens(tokens: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(tokens, dtype="<u4").astype(np.int64)
