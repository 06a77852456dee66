"""Requests of one rank from arrival to last message: queue, join, tokens, publishing, and every way to end.

Runs in the step loop's thread only. Each accepted request gets exactly one last message (a finish reason, Aborted or
SequenceFailed), unless its stream is gone.
"""

import logging

from headrace.decode.base import Counters, DecodeOptions, Sink, Source, StreamId
from headrace.decode.join import (
    AnnounceJob,
    Block,
    Job,
    JoinJob,
    ParkJob,
    PublishJob,
    Reconnected,
    StoreWorker,
    restored_tokens,
)
from headrace.decode.scheduler import Scheduler
from headrace.decode.sequence import ParkedBlocks, Phase, Sequence
from headrace.decode.step import Outcome
from headrace.errors import CapacityError, EngineError, HeadraceError, InputError, RankLost
from headrace.ids import RequestId
from headrace.kernels.formats import BLOCK_TOKENS
from headrace.kvstore.names import private_name, tenant_id
from headrace.messages import (
    Aborted,
    Accepted,
    DecodeRequest,
    ErrorInfo,
    Refused,
    SequenceFailed,
    SequenceTokens,
    StepTokens,
)
from headrace.model.sampler import SamplerState

log = logging.getLogger(__name__)


class Requests:
    """The step loop's view of its clients."""

    def __init__(self, scheduler: Scheduler, worker: StoreWorker, counters: Counters, options: DecodeOptions) -> None:
        self.sinks: dict[StreamId, Sink] = {}
        self._scheduler = scheduler
        self._index = scheduler.index
        self._worker = worker
        self._counters = counters
        self._options = options

    # --- arrival ----------------------------------------------------------------------------------------------------

    def submit(self, stream: StreamId, request: DecodeRequest, *, refuse: bool) -> None:
        if stream not in self.sinks:
            return
        try:
            if refuse:
                raise RankLost("this decode rank is shutting down")
            self._scheduler.submit(Sequence(request, stream, self._options.context_tokens))
        except HeadraceError as error:
            self._refuse(stream, request.request_id, error)
        except (ValueError, TypeError) as error:
            self._refuse(stream, request.request_id, InputError(str(error)))

    def admit(self) -> None:
        """Start the joins of whoever fits now; refuse what waits beyond the queue's bound; announce changes."""
        for sequence in self._scheduler.admit():
            names = [*sequence.request.block_names, sequence.request.handover.private_name]
            if sequence.parked is not None:
                names = sequence.parked.names
            sources = [Source(name, at) for at, name in enumerate(names)][len(sequence.blocks) :]
            sequence.work = JoinJob(sequence, sources, parked=sequence.parked)
            sequence.parked = None
            self._worker.join(sequence.work)
        for sequence, error in self._scheduler.shed():
            self._refuse(sequence.stream, sequence.request_id, error)
        self._announce()

    def job_done(self, job: Job | Reconnected) -> None:
        if isinstance(job, JoinJob):
            self._join_advanced(job)
        elif isinstance(job, ParkJob):
            self._parked(job)
        elif isinstance(job, PublishJob):
            self._index.release(job.slots)  # type: ignore[arg-type]
            self._counters.published_blocks_total += job.published
            self._counters.publish_skipped_total += job.skipped
        elif isinstance(job, Reconnected):
            self._index.take_changes()
            self._worker.announce(AnnounceJob(self._index.names(), []))

    def _join_advanced(self, job: JoinJob) -> None:
        sequence = job.sequence
        if sequence.phase is Phase.GONE:
            return
        if (job.cancelled or job.error) and job.leased:
            job.cancelled = True
            self._worker.join(job)  # once more, to give the leases back
        elif job.error is not None:
            self._scheduler.remove(sequence)
            self._not_joined(sequence, job.error)
        elif job.cancelled:
            self._scheduler.remove(sequence)
            self._aborted(sequence)
        elif sequence.phase is Phase.LEASING:
            try:
                job.slots = self._scheduler.grow(sequence, (job.sources[-1].position + 1) * BLOCK_TOKENS)
            except CapacityError as error:
                job.error, job.cancelled = error, True
            sequence.phase = Phase.COPYING
            self._worker.join(job)
        else:
            self._start(sequence, job)

    def _start(self, sequence: Sequence, job: JoinJob) -> None:
        """All bytes are here: name the copied blocks, accept, run. A parked one goes on where it was."""
        known = sequence.block_names()
        for source in job.sources:
            name, parent = known[source.position]
            if name is not None:
                slot = self._index.name_slot(sequence.blocks[source.position], name, parent, source.position)  # type: ignore[arg-type]
                sequence.blocks[source.position] = int(slot)
        sequence.phase, sequence.work = Phase.RUNNING, None
        if sequence.accepted:
            self._counters.resumed_total += 1
            return
        request, sequence.accepted = sequence.request, True
        sequence.sampler = SamplerState(request.sampling, request.output_index, sequence.answer_before())
        tokens = restored_tokens(sequence, job, job.sources[0].position)
        for tier, count in tokens.items():
            totals = self._counters.restored_tokens_total
            totals[tier] = totals.get(tier, 0) + count
        self._put(sequence.stream, Accepted(request_id=sequence.request_id, restored_tokens=tokens), [])

    # --- steps ------------------------------------------------------------------------------------------------------

    def ready(self) -> list[Sequence]:
        """The sequences of the next step, their rows addressable; starts the parking of whoever makes room for them."""
        ready, parking = self._scheduler.make_ready()
        for sequence in parking:
            sequence.work = ParkJob(sequence, self._blocks_to_park(sequence))
            self._worker.park(sequence.work)
        self._counters.prompt_rows_computed_total += sum(max(0, len(s.prompt) - s.committed) for s in ready)
        return ready

    def _blocks_to_park(self, sequence: Sequence) -> list[Block]:
        return [
            (slot, name or private_name(), parent, at)
            for at, (slot, (name, parent)) in enumerate(zip(sequence.blocks, sequence.block_names()))
        ]

    def _parked(self, job: ParkJob) -> None:
        sequence = job.sequence
        cancelled, sequence.work = job.cancelled, None
        if job.parked is None or cancelled or sequence.phase is Phase.GONE:
            self._unpin(sequence, job.parked)
            if sequence.phase is Phase.GONE:
                return
            self._scheduler.remove(sequence)
            if cancelled:
                self._aborted(sequence)
            else:
                assert job.error is not None
                self._failed(sequence, job.error)
            return
        self._counters.parked_total += 1
        self._scheduler.park(sequence, job.parked)

    def _unpin(self, sequence: Sequence, parked: ParkedBlocks | None) -> None:
        if parked is not None:
            self._worker.join(JoinJob(sequence, [], parked=parked, cancelled=True))

    def settle(self, outcomes: list[Outcome], step: int) -> None:
        """After a step: publish, release what ended, deliver tokens, one message per stream."""
        messages: dict[StreamId, list[SequenceTokens]] = {}
        for outcome in outcomes:
            sequence, emission = outcome.sequence, outcome.emission
            if emission is None:
                self._fail(sequence, _as_headrace(outcome.error))
                continue
            self._publish(sequence)
            self._counters.count(len(emission.tokens), emission.drafted, emission.accepted)
            if sequence.finish_reason is not None:
                self._scheduler.remove(sequence)
                self._scheduler.lengths.add(sequence.output_index)
                self._counters.finished_total += 1
            messages.setdefault(sequence.stream, []).append(
                SequenceTokens(
                    request_id=sequence.request_id,
                    tokens=tuple(emission.tokens),
                    logprobs=tuple(emission.logprobs),
                    finish_reason=sequence.finish_reason,
                    drafted=emission.drafted,
                    accepted=emission.accepted,
                )
            )
        for stream, parts in messages.items():
            ended = [part.request_id for part in parts if part.finish_reason is not None]
            self._put(stream, StepTokens(step=step, sequences=tuple(parts)), ended)

    def _publish(self, sequence: Sequence) -> None:
        """Name the blocks that became full, and have them written through to the host tier."""
        blocks = []
        for position, name, parent in sequence.new_full_blocks():
            slot = self._index.name_slot(sequence.blocks[position], name, parent, position)  # type: ignore[arg-type]
            sequence.blocks[position] = int(slot)
            blocks.append((int(slot), name, parent, position))
        if not blocks:
            return
        root = sequence.request.namespace
        job = PublishJob(blocks, tenant_id(root) if root else b"")
        self._index.retain(job.slots)  # type: ignore[arg-type]
        if not self._worker.publish(job):
            self._index.release(job.slots)  # type: ignore[arg-type]
            self._counters.publish_skipped_total += len(blocks)

    def _announce(self) -> None:
        if not self._worker.connected:
            return  # everything is announced anew when the daemon is back
        added, removed = self._index.take_changes()
        if added or removed:
            self._worker.announce(AnnounceJob(added, removed))

    # --- endings ----------------------------------------------------------------------------------------------------

    def abort(self, stream: StreamId, request_id: RequestId) -> None:
        """Release a request. Aborted is sent when everything is back: at once, or when a copy in flight has ended."""
        sequence = self._scheduler.find(request_id)
        if sequence is None or sequence.stream != stream:
            self._last(stream, Aborted(request_id=request_id))
        elif self._drop(sequence):
            self._aborted(sequence)

    def close_stream(self, stream: StreamId) -> None:
        """Nobody listens any more: abort all of it."""
        self.sinks.pop(stream, None)
        for sequence in self._scheduler.of_stream(stream):
            if self._drop(sequence):
                self._aborted(sequence)

    def fail_all(self, reason: HeadraceError) -> None:
        """The loop has ended: every request gets its last message. Copies in flight are told to stop."""
        for sequence in self._scheduler.all():
            if sequence.work is not None:
                sequence.work.cancelled = True
            self._remove(sequence)
            self._failed(sequence, reason)

    def _drop(self, sequence: Sequence) -> bool:
        """Release now if nothing is in flight; else cancel the job and release when it comes back (False)."""
        if sequence.phase in (Phase.LEASING, Phase.COPYING, Phase.PARKING):
            sequence.work.cancelled = True
            return False
        self._remove(sequence)
        return True

    def _remove(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        self._unpin(sequence, sequence.parked)
        sequence.parked = None

    def _aborted(self, sequence: Sequence) -> None:
        self._counters.aborted_total += 1
        self._last(sequence.stream, Aborted(request_id=sequence.request_id))

    def _fail(self, sequence: Sequence, error: HeadraceError) -> None:
        if self._drop(sequence):
            self._failed(sequence, error)

    def _failed(self, sequence: Sequence, error: HeadraceError) -> None:
        self._counters.failed_total += 1
        self._last(sequence.stream, SequenceFailed(request_id=sequence.request_id, error=_info(error)))

    def _not_joined(self, sequence: Sequence, error: HeadraceError) -> None:
        if sequence.accepted:
            self._failed(sequence, error)
        else:
            self._refuse(sequence.stream, sequence.request_id, error)

    def _refuse(self, stream: StreamId, request_id: RequestId, error: HeadraceError) -> None:
        self._counters.refused_total += 1
        self._last(stream, Refused(request_id=request_id, error=_info(error)))

    def _last(self, stream: StreamId, message: object) -> None:
        sink = self.sinks.get(stream)
        if sink is not None:
            sink.put_last(message)

    def _put(self, stream: StreamId, message: object, ended: list[RequestId]) -> None:
        """Deliver; when the reader is too slow, fail every request of its stream and those the lost message ended."""
        sink = self.sinks.get(stream)
        if sink is None or sink.put(message):
            return
        error = CapacityError("the reader of this stream is too slow; its requests were dropped")
        for request_id in ended:
            self._counters.failed_total += 1
            sink.put_last(SequenceFailed(request_id=request_id, error=_info(error)))
        for sequence in self._scheduler.of_stream(stream):
            self._fail(sequence, error)


def _info(error: HeadraceError) -> ErrorInfo:
    return ErrorInfo(kind=error.kind, text=str(error))


def _as_headrace(error: Exception | None) -> HeadraceError:
    if isinstance(error, HeadraceError):
        return error
    log.error("a sequence failed", exc_info=error)
    return EngineError(f"{type(error).__name__}: {error}")
