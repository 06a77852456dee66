"""The leader's scheduler: prompts in, step plans out, answers back. Pure: no threads, sockets, tensors or collectives.

    submit -> QUEUED -> (RESTORING) -> COMPUTING -> TAIL -> PUBLISHING -> DONE -> close
                                                 \\-> DONE at once when the first token ends the answer

`next_plan` and `finish` alternate; everything else may be called only between a `finish` and the next `next_plan`,
which is what makes cancelling simple: no step is running, so nothing writes to what is given back.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable

from headrace.errors import CapacityError, HeadraceError, InputError, NeverFits, PromptTooLong
from headrace.ids import BlockName, RequestId
from headrace.kernels.formats import BLOCK_TOKENS
from headrace.kvstore.device_index import DeviceIndex
from headrace.kvstore.names import private_name
from headrace.messages import PrefillDone, PrefillRequest
from headrace.prefill.admit import Admission
from headrace.prefill.base import NodeStore
from headrace.prefill.plan import ChunkPlan, RestorePlan, StepOutcome, StepPlan, TailPlan, pack_table, unpack_tokens
from headrace.prefill.prompt import Prompt, Stage
from headrace.prefill.publish import Publisher
from headrace.prefill.share import share_rows
from headrace.prefill.stats import Counters


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    chunk_tokens: int
    max_running: int
    max_queued: int
    draft_tokens: int
    draft_rows: int
    """Cache rows after row L that the draft chain writes: `draft_tokens`, or 0 when draft steps share the index."""
    host_blocks: int
    """Slots of the host tier: a prompt with more blocks never fits."""
    max_context: int
    """Longest prompt the model takes, tokens."""
    vocab_size: int
    promote_wait_s: float = 5.0
    """Longest that a prompt waits for blocks from below the host tier."""
    restore_ahead: bool = False
    """A prompt's first chunk runs in the step that restores its prefix."""


class Scheduler:
    def __init__(
        self,
        index: DeviceIndex,
        client: NodeStore,
        limits: Limits,
        ranks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = Counters()
        self._index, self._client, self._limits, self._clock = index, client, limits, clock
        self._publisher = Publisher(client, ranks)
        self._admission = Admission(index, self._publisher, limits.draft_rows, promote_wait_s=limits.promote_wait_s)
        self._prompts: dict[RequestId, Prompt] = {}
        self._arrivals = 0
        self._step = 0
        self._forget: list[RequestId] = []
        self._answering: list[Prompt] = []
        self._answers: list[PrefillDone] = []
        self._failures: list[tuple[RequestId, HeadraceError]] = []
        self._chunks: list[tuple[Prompt, int]] = []
        """Of the running step: prompt and ready rows after it."""

    # --- between steps ---------------------------------------------------------------------------------------------

    def submit(self, request: PrefillRequest, priority: int = 0) -> None:
        """Queue a prompt. Higher priorities go first. Raises InputError, NeverFits, CapacityError."""
        self._check(request)
        self._arrivals += 1
        self._prompts[request.request_id] = Prompt(request, (-priority, self._arrivals), private_name(), self._clock())

    def close(self, request_id: RequestId) -> None:
        """The router is done with this prompt, or gave it up: give everything back. Unknown ids are fine."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is None:
            return
        self.counters.aborted += prompt.stage is not Stage.DONE
        self._give_back(prompt)
        self._announce()

    def close_all(self) -> None:
        for request_id in list(self._prompts):
            self.close(request_id)

    def take_answers(self) -> list[PrefillDone]:
        answers, self._answers = self._answers, []
        return answers

    def take_failures(self) -> list[tuple[RequestId, HeadraceError]]:
        """Prompts that ended without an answer, and why; they still wait for `close`."""
        failures, self._failures = self._failures, []
        return failures

    def flush(self) -> int:
        dropped = self._index.flush()
        self._announce()
        return dropped

    @property
    def idle(self) -> bool:
        """No prompt is here, answered or not."""
        return not self._prompts

    @property
    def waiting(self) -> bool:
        """Something unanswered is here: when `next_plan` gives None, ask again soon."""
        return any(p.stage is not Stage.DONE for p in self._prompts.values())

    def status(self) -> dict[str, float]:
        stages = [p.stage for p in self._prompts.values()]
        queued = stages.count(Stage.QUEUED)
        return self.counters.values() | {
            "queued": queued,
            "running": len(stages) - queued - stages.count(Stage.DONE),
            "answered": stages.count(Stage.DONE),
            "device_blocks": self._index.num_slots,
            "device_free_blocks": self._index.free_count + self._index.cached_count,
            "published_blocks_total": self._publisher.published_blocks,
            "skipped_blocks_total": self._publisher.skipped_blocks,
        }

    # --- a step ----------------------------------------------------------------------------------------------------

    def next_plan(self) -> StepPlan | None:
        """What all ranks do next, or None when there is nothing to do now."""
        self._recover_store()
        self._admit()
        order = self._by_age()
        self._step += 1
        tails = [p for p in order if p.stage is Stage.TAIL]
        restoring = [p for p in order if p.stage is Stage.RESTORING]
        if self._limits.restore_ahead:
            for prompt in restoring:
                prompt.ready_rows = prompt.hit_tokens
        # A step with tails has no chunks: a first token never waits behind somebody else's prompt.
        self._chunks = [] if tails else self._share(order)
        chunked = {id(p): rows for p, rows in self._chunks}
        complete = {
            # What is computed on bytes that are still to be checked is written a step later.
            id(p): self._publisher.complete_blocks(
                p,
                p.ready_rows if p.stage is Stage.RESTORING else chunked.get(id(p), p.ready_rows),
                p.stage in (Stage.TAIL, Stage.PUBLISHING),
            )
            for p in order
        }
        stores = self._publisher.plan(order, complete)
        zero = [slot for p, _ in self._chunks for slot in p.fresh]
        plan = StepPlan(
            step=self._step,
            restores=tuple(plan for p in restoring for plan in _restores(p)),
            zero=tuple(zero),
            chunks=tuple(_chunk(p, rows) for p, rows in self._chunks),
            tails=tuple(self._tail(p) for p in tails),
            stores=tuple(stores),
            arena=self._client.arena,
            ahead=any(p.stage is Stage.RESTORING for p, _ in self._chunks),
            forget=tuple(self._forget),
        )
        if not (plan.restores or plan.chunks or plan.tails or plan.stores or plan.forget):
            # What was being written by others may have become readable without a step of ours.
            self._answer_published()
            self._step -= 1
            return None
        self._forget = []
        return plan

    def finish(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """All ranks have executed `plan`."""
        self.counters.steps += 1
        for prompt in [p for p in self._by_age() if p.stage is Stage.RESTORING]:
            self._restored(prompt, outcome.bad)
        for prompt, rows in self._chunks:
            if prompt.stage is Stage.COMPUTING:
                self._computed(prompt, rows, outcome)
            else:  # Its restore failed: what was computed on it never was.
                self._forget.append(prompt.request_id)
        for tail in plan.tails:
            prompt = self._prompts[tail.request_id]
            prompt.drafted = outcome.drafted[tail.request_id]
            prompt.stage = Stage.PUBLISHING
        self._chunks = []
        for prompt in self._by_age():
            self._publisher.commit(prompt, outcome.digests)
        self._answer_published()
        self._announce()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        queue = [p for p in self._by_age() if p.stage is Stage.QUEUED]
        running = sum(p.stage not in (Stage.QUEUED, Stage.DONE) for p in self._prompts.values())
        if queue:
            self._admission.admit(queue, self._limits.max_running - running, self._clock())

    def _share(self, order: Iterable[Prompt]) -> list[tuple[Prompt, int]]:
        stages = (Stage.COMPUTING, Stage.RESTORING) if self._limits.restore_ahead else (Stage.COMPUTING,)
        ready = [p for p in order if p.stage in stages]
        given = share_rows([p.remaining_rows for p in ready], self._limits.chunk_tokens, self._step)
        return [(p, p.ready_rows + rows) for p, rows in zip(ready, given) if rows or not p.remaining_rows]

    def _tail(self, prompt: Prompt) -> TailPlan:
        assert prompt.sampled is not None
        request = prompt.request
        # Drafts beyond max_tokens would only be thrown away.
        room = request.sampling.max_tokens - request.output_index - 1
        return TailPlan(
            request_id=prompt.request_id,
            table=pack_table(prompt.slots),
            position=prompt.length - 1,
            token=prompt.sampled.token,
            drafts=min(self._limits.draft_tokens, room),
        )

    def _restored(self, prompt: Prompt, bad: set[BlockName]) -> None:
        mine = [leased.name for leased in prompt.restores]
        wrong = [name for name in mine if name in bad]
        if wrong or not self._publisher.lease_valid():
            self._requeue(prompt)
            self._publisher.drop(wrong, corrupt=True)
            return
        hit = prompt.device_hit + prompt.host_hit
        self._admission.complete(prompt, range(prompt.device_hit, hit))
        prompt.restores = []
        prompt.ready_rows = hit * BLOCK_TOKENS
        prompt.restore_s = self._clock() - prompt.admitted_s
        prompt.stage = Stage.COMPUTING

    def _computed(self, prompt: Prompt, rows: int, outcome: StepOutcome) -> None:
        if not prompt.started:
            self.counters.query_only_rows += prompt.hit_tokens > 0
            self.counters.count_hits(prompt)
        self.counters.computed_tokens += rows - prompt.ready_rows
        self._admission.complete(prompt, range(prompt.ready_rows // BLOCK_TOKENS, rows // BLOCK_TOKENS))
        prompt.ready_rows, prompt.started, prompt.fresh = rows, True, []
        prompt.scores += outcome.scores.get(prompt.request_id, ())
        sampled = outcome.sampled.get(prompt.request_id)
        if sampled is None:
            return
        if sampled.error is not None:
            self._forget.append(prompt.request_id)
            self._failures.append((prompt.request_id, sampled.error))
            prompt.stage = Stage.DONE
            return
        prompt.sampled, prompt.finish_reason = sampled, sampled.finish_reason
        if prompt.hands_over:
            prompt.stage = Stage.TAIL
        else:
            self._forget.append(prompt.request_id)
            self._answering.append(prompt)

    def _answer_published(self) -> None:
        for prompt in self._by_age():
            if prompt.stage is Stage.PUBLISHING and self._publisher.readable(prompt):
                self._answering.append(prompt)
        for prompt in self._answering:
            prompt.stage = Stage.DONE
            self.counters.answered += 1
            self._answers.append(prompt.answer(self._clock()))
        self._answering = []

    def _requeue(self, prompt: Prompt) -> None:
        prompt.scores = []
        self._give_back(prompt)
        prompt.stage = Stage.QUEUED

    def _give_back(self, prompt: Prompt) -> None:
        if prompt.started and prompt.drafted is None and prompt.stage is not Stage.DONE:
            self._forget.append(prompt.request_id)
        self._publisher.release(prompt)
        self._admission.release(prompt)

    def _recover_store(self) -> None:
        """The daemon went away and took every lease along. What is on the device stays; restores start over."""
        if not self._publisher.lost:
            return
        for prompt in self._by_age():
            prompt.pins, prompt.writing = set(), {}
            if prompt.stage is Stage.RESTORING:
                self._requeue(prompt)
        if self._publisher.reconnect(self._clock()):
            self._publisher.announce(self._index.names(), [])

    def _announce(self) -> None:
        added, removed = self._index.take_changes()
        if added or removed:
            self._publisher.announce(added, removed)

    def _by_age(self) -> list[Prompt]:
        return sorted(self._prompts.values(), key=lambda p: p.order)

    def _check(self, request: PrefillRequest) -> None:
        limits, length = self._limits, len(request.tokens) // 4
        if request.request_id in self._prompts:
            raise InputError(f"request id {request.request_id} is in use")
        if not length or len(request.tokens) % 4:
            raise InputError(f"{len(request.tokens)} bytes are not one or more u32 tokens", "tokens")
        if len(request.block_names) != length // BLOCK_TOKENS:
            raise InputError(f"{len(request.block_names)} block names for {length} tokens", "block_names")
        if not 0 <= request.output_index < length:
            raise InputError(f"output_index {request.output_index} of a prompt of {length} tokens", "output_index")
        if length > limits.max_context:
            raise PromptTooLong(f"{length} tokens; the model takes {limits.max_context}", "prompt")
        top = int(unpack_tokens(request.tokens).max())
        if top >= limits.vocab_size:
            raise InputError(f"token id {top} is outside the vocabulary of {limits.vocab_size}", "tokens")
        slots, blocks = self._admission.slots_needed(length), length // BLOCK_TOKENS + 1
        if slots > self._index.num_slots:
            raise NeverFits(f"{length} tokens need {slots} blocks; the device tier has {self._index.num_slots}")
        if request.want_handover and blocks > limits.host_blocks:
            raise NeverFits(f"{length} tokens need {blocks} blocks; the host tier has {limits.host_blocks}")
        waiting = sum(p.stage is not Stage.DONE for p in self._prompts.values())
        if waiting >= limits.max_running + limits.max_queued:
            raise CapacityError(
                f"{waiting} prompts are running or queued, the limit is {limits.max_running} + {limits.max_queued}"
            )


def _restores(prompt: Prompt) -> list[RestorePlan]:
    slots = prompt.slots[prompt.device_hit :]
    return [
        RestorePlan(name=leased.name, host_slot=leased.slot, device_slot=slot, digest=leased.digest)
        for leased, slot in zip(prompt.restores, slots)
    ]


def _chunk(prompt: Prompt, end: int) -> ChunkPlan:
    """Rows up to `end`. The first chunk after a hit starts one row early, on a row that is only asked."""
    request = prompt.request
    query_only = not prompt.started and prompt.ready_rows > 0
    start = prompt.ready_rows - query_only
    last = end == prompt.length
    return ChunkPlan(
        request_id=prompt.request_id,
        table=pack_table(prompt.slots),
        start=start,
        tokens=request.tokens[4 * start : 4 * end],
        query_only=query_only,
        carry=prompt.started,
        sampling=request.sampling if last else None,
        output_index=request.output_index if last else 0,
        answered=request.tokens[4 * (prompt.length - request.output_index) :] if last else b"",
        scored=request.prompt_logprobs,
        following=-1 if last else int.from_bytes(request.tokens[4 * end : 4 * end + 4], "little"),
    )
