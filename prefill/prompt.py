"""One prompt on the leader: where it stands. Plain state; the scheduler's parts change it."""

import dataclasses
import enum

from headrace.ids import BlockName, RequestId, SlotIndex, Tier
from headrace.kernels.formats import BLOCK_TOKENS
from headrace.kvstore.base import Leased
from headrace.messages import Handover, PrefillDone, PrefillRequest, TokenLogprob
from headrace.prefill.plan import Drafted, Sampled


class Stage(enum.Enum):
    """The life of a prompt, in order. Cancelling removes it from any of them."""

    QUEUED = "queued"
    """Waits for device slots, for a place among the running, or for a prefix somebody else is computing."""
    RESTORING = "restoring"
    """Holds its slots; its host hits are copied by the next step."""
    COMPUTING = "computing"
    TAIL = "tail"
    """The first token is known and does not end the answer: MTP row L and the drafts come next."""
    PUBLISHING = "publishing"
    """Computed; some block is not readable in the host tier yet."""
    DONE = "done"
    """Answered. Everything stays pinned until the router closes the stream."""


@dataclasses.dataclass(slots=True)
class Prompt:
    request: PrefillRequest
    order: tuple[int, int]
    """(-priority, arrival): smaller goes first."""
    private_name: BlockName
    submitted_s: float
    stage: Stage = Stage.QUEUED
    overtaken: int = 0
    """How often a later prompt was admitted while this one waited for slots."""

    slots: list[SlotIndex] = dataclasses.field(default_factory=list)
    """Device slot of each block, one reference each. From block floor(L / 64) on they are private."""
    device_hit: int = 0
    """Blocks found in the device tier."""
    host_hit: int = 0
    """Blocks after those, found in the host tier."""
    came: dict[Tier, int] = dataclasses.field(default_factory=dict)
    """Of the host hits, how many came up from a lower tier for this prompt."""
    promoting_since_s: float | None = None
    """When blocks were first asked for from below."""
    ask_again_s: float = 0.0
    promote_s: float = 0.0
    """How long it waited for those that came."""
    restores: list[Leased] = dataclasses.field(default_factory=list)
    fresh: list[SlotIndex] = dataclasses.field(default_factory=list)
    """Slots to clear before the next chunk."""
    ready_rows: int = 0
    """Rows whose cache bytes are there."""
    started: bool = False
    """A chunk was planned: the hidden state of row ready_rows - 1 is carried."""

    pins: set[int] = dataclasses.field(default_factory=set)
    """Blocks of which this request holds a host read lease; index `full_blocks` is the private block."""
    writing: dict[int, SlotIndex] = dataclasses.field(default_factory=dict)
    """Blocks that this step copies to a host slot."""
    written: set[int] = dataclasses.field(default_factory=set)
    """Blocks this request put into the host tier."""
    starved: bool = False
    """The host tier was full when this prompt last wanted to write."""

    sampled: Sampled | None = None
    finish_reason: str | None = None
    scores: list[TokenLogprob] = dataclasses.field(default_factory=list)
    """Of its own tokens so far, if it wants them."""
    drafted: Drafted | None = None
    restore_s: float = 0.0
    admitted_s: float = 0.0

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def length(self) -> int:
        """L, prompt tokens"""
        return len(self.request.tokens) // 4

    @property
    def names(self) -> tuple[BlockName, ...]:
        return self.request.block_names

    @property
    def full_blocks(self) -> int:
        return self.length // BLOCK_TOKENS

    @property
    def hit_tokens(self) -> int:
        return (self.device_hit + self.host_hit) * BLOCK_TOKENS

    @property
    def remaining_rows(self) -> int:
        """Rows still to write; 0 with a query-only row left when the whole prompt was hit."""
        return self.length - self.ready_rows

    @property
    def hands_over(self) -> bool:
        """Whether a decode rank will want this prompt's blocks (once the first token is known, whether it does)."""
        return self.request.want_handover and self.finish_reason is None

    def name_of(self, block: int) -> BlockName:
        return self.names[block] if block < self.full_blocks else self.private_name

    def parent_of(self, block: int) -> BlockName | None:
        return self.names[block - 1] if 0 < block < self.full_blocks else None

    def cached_tokens(self) -> dict[str, int]:
        """By tier; the sum is min(hit, L - 1): the last row is always computed."""
        total = min(self.hit_tokens, self.length - 1)
        tokens = {Tier.DEVICE.value: min(self.device_hit * BLOCK_TOKENS, total), Tier.HOST.value: 0}
        for tier, blocks in self.came.items():
            tokens[tier.value] = min(blocks * BLOCK_TOKENS, total - sum(tokens.values()))
        tokens[Tier.HOST.value] += total - sum(tokens.values())
        return tokens

    def answer(self, now_s: float) -> PrefillDone:
        """What the router gets. The first token is sampled and, with a handover, the tail has run."""
        assert self.sampled is not None
        handover = None
        if self.drafted is not None:
            handover = Handover(
                private_name=self.private_name,
                draft_tokens=self.drafted.tokens,
                mtp_hidden=self.drafted.mtp_hidden,
                index_seed=self.drafted.index_seed,
            )
        return PrefillDone(
            request_id=self.request_id,
            first_token=self.sampled.token,
            logprob=self.sampled.logprob,
            finish_reason=self.finish_reason,
            cached_tokens=self.cached_tokens(),
            handover=handover,
            prompt_logprobs=tuple(self.scores),
            queue_s=self.admitted_s - self.submitted_s - self.promote_s,
            restore_s=self.promote_s + self.restore_s,
            compute_s=now_s - self.admitted_s - self.restore_s,
        )
