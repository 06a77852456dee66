"""Admission of a prompt: longest match over the tiers, device slots all or nothing. Leader only; pure.

A prompt whose next missing block is being computed or restored by another one waits: when that block is ready the match
is taken again, so a prefix shared by concurrent prompts is computed once. One whose next blocks come up from disk or
from another node waits for them, but not for ever. A prompt that found no room lets at most `OVERTAKE_LIMIT` later ones
pass.
"""

from collections.abc import Sequence

from headrace.ids import BlockName, RequestId, Tier
from headrace.kernels.formats import BLOCK_TOKENS
from headrace.kvstore.device_index import DeviceIndex
from headrace.prefill.prompt import Prompt, Stage
from headrace.prefill.publish import Publisher

OVERTAKE_LIMIT = 8
ASK_AGAIN_S = 0.005
"""How soon the daemon is asked again whether blocks have come up."""


class Admission:
    def __init__(
        self, index: DeviceIndex, publisher: Publisher, draft_rows: int, *, promote_wait_s: float = 5.0
    ) -> None:
        """`draft_rows`: cache rows after row L that the draft chain writes (0 when draft steps share the index).
        `promote_wait_s`: longest that a prompt waits for blocks from below the host tier."""
        self._promote_wait_s = promote_wait_s
        self._index = index
        self._draft_rows = draft_rows
        self._publisher = publisher
        self._in_flight: dict[BlockName, RequestId] = {}

    def admit(self, queue: Sequence[Prompt], places: int, now_s: float) -> list[Prompt]:
        """Admit what can run, best order first; returns the admitted ones, which now hold slots and pins. `places`:
        how many more may run."""
        admitted: list[Prompt] = []
        blocked: list[Prompt] = []
        for prompt in queue:
            if len(admitted) == places or any(b.overtaken >= OVERTAKE_LIMIT for b in blocked):
                break
            if self._waits_for_another(prompt) or self._waits_for_promotion(prompt, now_s):
                continue
            if not self._take_slots(prompt):
                blocked.append(prompt)
                continue
            for earlier in blocked:
                earlier.overtaken += 1
            self._start(prompt, now_s)
            admitted.append(prompt)
        return admitted

    def complete(self, prompt: Prompt, blocks: range) -> None:
        """The bytes of these full blocks are final: name them, so that others hit them."""
        if not prompt.request.publish:
            return
        for i in blocks:
            name = prompt.names[i]
            prompt.slots[i] = self._index.name_slot(prompt.slots[i], name, prompt.parent_of(i), i)
            if self._in_flight.get(name) == prompt.request_id:
                del self._in_flight[name]

    def release(self, prompt: Prompt) -> None:
        """Give all slots back. Named blocks stay cached."""
        for name in prompt.names:
            if self._in_flight.get(name) == prompt.request_id:
                del self._in_flight[name]
        self._index.release(prompt.slots)
        prompt.slots, prompt.fresh, prompt.restores = [], [], []
        prompt.device_hit = prompt.host_hit = prompt.ready_rows = 0
        prompt.started, prompt.came = False, {}

    def slots_needed(self, length: int) -> int:
        """Device slots of a prompt of `length` tokens: its private block is block floor(length / 64)."""
        return (length + self._draft_rows) // BLOCK_TOKENS + 1

    def _waits_for_another(self, prompt: Prompt) -> bool:
        hit = len(self._index.match(prompt.names))
        return hit < prompt.full_blocks and prompt.names[hit] in self._in_flight

    def _waits_for_promotion(self, prompt: Prompt, now_s: float) -> bool:
        hit = len(self._index.match(prompt.names))
        if hit == prompt.full_blocks or not self._publisher.has_lower_tiers:
            return False
        if prompt.promoting_since_s is None:
            prompt.promoting_since_s = now_s
        elif now_s >= prompt.promoting_since_s + self._promote_wait_s:
            return False
        elif now_s < prompt.ask_again_s:
            return True
        prompt.ask_again_s = now_s + ASK_AGAIN_S
        return self._publisher.promote(prompt.names[hit:]).coming > 0

    def _take_slots(self, prompt: Prompt) -> bool:
        held = self._index.acquire(prompt.names)
        fresh = self._index.allocate(self.slots_needed(prompt.length) - len(held))
        if fresh is None:
            self._index.release(held)
            return False
        prompt.device_hit = len(held)
        prompt.slots = held + fresh
        return True

    def _start(self, prompt: Prompt, now_s: float) -> None:
        prompt.pins = set()
        for i, leased in enumerate(self._publisher.lease(prompt)):
            if i == prompt.device_hit + prompt.host_hit and leased is not None:
                prompt.host_hit += 1
                prompt.restores.append(leased)
                if leased.tier is not Tier.HOST:
                    prompt.came[leased.tier] = prompt.came.get(leased.tier, 0) + 1
        hit = prompt.device_hit + prompt.host_hit
        prompt.fresh = prompt.slots[hit:]
        prompt.ready_rows = prompt.device_hit * BLOCK_TOKENS
        prompt.stage = Stage.RESTORING if prompt.host_hit else Stage.COMPUTING
        prompt.admitted_s = now_s
        if prompt.came and prompt.promoting_since_s is not None:
            prompt.promote_s = now_s - prompt.promoting_since_s
        if prompt.request.publish:
            for name in prompt.names[prompt.device_hit :]:
                self._in_flight.setdefault(name, prompt.request_id)
