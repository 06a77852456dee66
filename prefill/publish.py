"""Gets every block of a prompt into the host tier and holds it there until the router lets go. Leader only; pure.

For each complete block, in block order: a read lease if it is there already; else a two-phase put whose lease is kept
as the pin. A full tier is back-pressure: the block is asked for again later. While the oldest prompt starves, younger
ones that have not answered give their pins back, so two prompts can never hold half of the tier each and wait for
ever; their device slots still hold the bytes.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from headrace.errors import DaemonUnavailable, LeaseExpired
from headrace.ids import BlockName, SlotIndex
from headrace.kernels.formats import BLOCK_TOKENS
from headrace.kvstore.base import Coming, Leased, PutOutcome
from headrace.prefill.base import NodeStore
from headrace.prefill.plan import StorePlan
from headrace.prefill.prompt import Prompt, Stage

T = TypeVar("T")
RECONNECT_S = 0.5


class Publisher:
    """When the daemon does not answer, nothing is readable and nothing is written until it is back (`lost`)."""

    def __init__(self, client: NodeStore, ranks: int) -> None:
        self._client = client
        self._ranks = ranks
        self.lost = False
        self._retry_s = 0.0
        self.published_blocks = 0
        self.skipped_blocks = 0
        """Blocks of prompts without handover that found the tier full."""

    def lease(self, prompt: Prompt) -> list[Leased | None]:
        """At admission: pin what the host tier has of this prompt. One entry a full block."""
        found = self._lease(prompt.names)
        prompt.pins = {i for i, leased in enumerate(found) if leased is not None}
        return found

    @property
    def has_lower_tiers(self) -> bool:
        return not self.lost and self._client.has_lower_tiers

    def promote(self, names: Sequence[BlockName]) -> Coming:
        """Have what lies below the host tier brought up; nothing is coming while the daemon is lost."""
        return self._try(Coming(0, 0), lambda: self._client.promote(names))

    def plan(self, prompts: Iterable[Prompt], complete: dict[int, int]) -> list[StorePlan]:
        """Stores for this step. `complete` by `id(prompt)`: blocks complete at the end of the step's compute, private
        block included; prompts in order of age."""
        stores: list[StorePlan] = []
        starving = False
        for prompt in prompts:
            if prompt.stage is Stage.DONE or (not prompt.request.publish and not prompt.request.want_handover):
                continue
            if starving:
                if prompt.stage is not Stage.RESTORING:
                    self._yield_pins(prompt)
                continue
            wanted = [i for i in range(complete[id(prompt)]) if i not in prompt.pins and i not in prompt.writing]
            stores += self._begin(prompt, wanted)
            starving = prompt.starved
        return stores

    def _begin(self, prompt: Prompt, wanted: Sequence[int]) -> list[StorePlan]:
        prompt.starved = False
        if not wanted:
            return []
        blocks = [(prompt.name_of(i), prompt.parent_of(i), i) for i in wanted]
        stores, exists = [], []
        nothing: list[int] = []
        for i, slot in zip(wanted, self._try(nothing, lambda: self._client.begin_put(blocks, prompt.request.tenant))):
            if slot == PutOutcome.EXISTS:
                exists.append(i)
            elif slot == PutOutcome.FULL:
                # Waiting for room is for those whose blocks somebody is going to read.
                prompt.starved = prompt.hands_over
                self.skipped_blocks += not prompt.hands_over
            else:
                prompt.writing[i] = SlotIndex(slot)
                stores.append(
                    StorePlan(name=prompt.name_of(i), device_slot=prompt.slots[i], host_slot=slot, rank=i % self._ranks)
                )
        for i, leased in zip(exists, self._lease([prompt.name_of(i) for i in exists])):
            if leased is not None:
                prompt.pins.add(i)
        return stores

    def commit(self, prompt: Prompt, digests: dict[BlockName, bytes]) -> None:
        """The step that copied `prompt.writing` is over."""
        if not prompt.writing:
            return
        done = {i: slot for i, slot in prompt.writing.items() if prompt.name_of(i) in digests}
        # A rank that could not reach the host tier gave no digest: the next plan puts those blocks again.
        undone = [(prompt.name_of(i), slot) for i, slot in prompt.writing.items() if i not in done]
        prompt.writing = {}
        if undone:
            self._try(None, lambda: self._client.abort_put(undone))
        if not done:
            return
        writes = [(prompt.name_of(i), slot, digests[prompt.name_of(i)]) for i, slot in done.items()]
        blocks = list(done)
        if not self._try(False, lambda: self._commit(writes)):
            return
        prompt.pins.update(blocks)
        prompt.written.update(blocks)
        self.published_blocks += len(blocks)

    def readable(self, prompt: Prompt) -> bool:
        """Whether a decode rank can have every block of the handover."""
        return len(prompt.pins) == prompt.full_blocks + 1

    def release(self, prompt: Prompt) -> None:
        """The prompt ends, whatever its stage: no lease, no half-written slot and no private block stays."""
        writing = [(prompt.name_of(i), slot) for i, slot in prompt.writing.items()]
        unlisted = prompt.written & {prompt.full_blocks} if prompt.request.publish else prompt.written
        dropped = [prompt.name_of(i) for i in sorted(unlisted)]
        if writing:
            self._try(None, lambda: self._client.abort_put(writing))
        self._yield_pins(prompt)
        self.drop(dropped)
        prompt.writing, prompt.written = {}, set()

    def drop(self, names: Sequence[BlockName], *, corrupt: bool = False) -> None:
        if names:
            self._try(None, lambda: self._client.drop(names, corrupt=corrupt))

    def announce(self, added: Sequence[BlockName], removed: Sequence[BlockName]) -> None:
        self._try(None, lambda: self._client.announce(added, removed))

    def lease_valid(self) -> bool:
        return not self.lost and self._client.lease_valid()

    def reconnect(self, now_s: float) -> bool:
        """Try to get the daemon back, at most every RECONNECT_S; True when it answers again."""
        if now_s < self._retry_s:
            return False
        self._retry_s = now_s + RECONNECT_S
        try:
            self._client.reconnect()
        except DaemonUnavailable:
            return False
        self.lost = False
        return True

    def complete_blocks(self, prompt: Prompt, rows: int, tail: bool) -> int:
        """Blocks whose bytes are final when `rows` rows are written (and, with `tail`, MTP row L)."""
        return prompt.full_blocks + 1 if tail else min(rows // BLOCK_TOKENS, prompt.full_blocks)

    def _yield_pins(self, prompt: Prompt) -> None:
        names = [prompt.name_of(i) for i in sorted(prompt.pins)]
        prompt.pins = set()
        if names:
            self._try(None, lambda: self._client.release(names))

    def _lease(self, names: Sequence[BlockName]) -> list[Leased | None]:
        return self._try([None] * len(names), lambda: self._client.lease(names)) if names else []

    def _commit(self, writes: Sequence[tuple[BlockName, SlotIndex, bytes]]) -> bool:
        try:
            self._client.commit_put(writes, keep_lease=True)
        except LeaseExpired:
            return False  # None became visible; the next plan puts them again.
        return True

    def _try(self, otherwise: T, call: Callable[[], T]) -> T:
        if self.lost:
            return otherwise
        try:
            return call()
        except DaemonUnavailable:
            self.lost = True
            return otherwise
