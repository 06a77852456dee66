"""Who runs on this rank: bounded queue, admission by reservation, who makes room. Pure: no torch.

A sequence is admitted when the blocks that it is expected to need fit, and they are counted from then on (`strict`:
when its whole lifetime fits). It never computes a prompt position: `admit` only takes blocks, the join brings their
bytes or the request is refused. One that outgrows its reservation takes what nobody has reserved; when that is nothing,
the youngest running sequence is parked in the host tier as a whole. It returns by its order of arrival with its whole
lifetime reserved and is never parked again. The oldest of those that were never parked stays too: it advances, or waits
for others that hold all they need. So somebody always advances.
"""

from collections import deque

from headrace.decode.base import DecodeOptions, StreamId
from headrace.decode.sequence import ParkedBlocks, Phase, Sequence
from headrace.errors import CapacityError, NeverFits
from headrace.forecast import AnswerLengths
from headrace.ids import RequestId
from headrace.kernels.formats import BLOCK_TOKENS
from headrace.kvstore.device_index import DeviceIndex


class Scheduler:
    """Owns the references that sequences hold in `index`. One thread."""

    def __init__(self, options: DecodeOptions, index: DeviceIndex) -> None:
        self.options = options
        self.index = index
        self.lengths = AnswerLengths()
        self._waiting: deque[Sequence] = deque()
        """By order of arrival; parked ones are always older than those that have not run yet."""
        self._held: dict[RequestId, Sequence] = {}
        """Leasing, copying, running or parking, in order of admission."""
        self._arrivals = 0

    @property
    def running(self) -> list[Sequence]:
        """By order of arrival."""
        return sorted((s for s in self._held.values() if s.phase is Phase.RUNNING), key=lambda s: s.order)

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_parked(self) -> int:
        return sum(s.was_parked for s in self._waiting)

    @property
    def unallocated_blocks(self) -> int:
        """Reserved blocks that are not allocated yet."""
        return sum(s.reserved_blocks - len(s.blocks) for s in self._held.values())

    def all(self) -> list[Sequence]:
        return [*self._held.values(), *self._waiting]

    def find(self, request_id: RequestId) -> Sequence | None:
        held = self._held.get(request_id)
        return held or next((s for s in self._waiting if s.request_id == request_id), None)

    def of_stream(self, stream: StreamId) -> list[Sequence]:
        return [s for s in self.all() if s.stream == stream]

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises NeverFits, or CapacityError for an id that is already here."""
        if sequence.lifetime_blocks > self.index.num_slots:
            raise NeverFits(
                f"{len(sequence.prompt)} prompt + {sequence.limit} answer tokens need {sequence.lifetime_blocks} "
                f"blocks, this rank has {self.index.num_slots}"
            )
        if self.find(sequence.request_id) is not None:
            raise CapacityError(f"request {sequence.request_id} is already on this rank")
        self._arrivals += 1
        sequence.order = self._arrivals
        self._waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Move what fits from the head of the queue to phase LEASING, holding the leading blocks that are resident.
        Strictly first come, first served: nobody overtakes a request that waits for room."""
        admitted = []
        while self._waiting and len(self._held) < self.options.max_running:
            sequence = self._waiting[0]
            sequence.reserved_blocks = self._reservation(sequence)
            names = [name for name, _ in sequence.block_names()]
            resident = self.index.acquire(names[: names.index(None)] if None in names else names)  # type: ignore[arg-type]
            need = sequence.reserved_blocks - len(resident)
            if self.index.free_count + self.index.cached_count < self.unallocated_blocks + need:
                self.index.release(resident)
                break
            self._waiting.popleft()
            sequence.blocks = [int(slot) for slot in resident]
            sequence.phase = Phase.LEASING
            self._held[sequence.request_id] = sequence
            admitted.append(sequence)
        return admitted

    def _reservation(self, sequence: Sequence) -> int:
        """Blocks to count for a sequence that is about to be admitted."""
        if self.options.strict or sequence.was_parked:
            return sequence.lifetime_blocks
        expected = self.lengths.expect(sequence.output_index, sequence.remaining)
        rows = sequence.committed + expected + 2 * self.options.draft_tokens + 2
        return min(sequence.lifetime_blocks, -(-rows // BLOCK_TOKENS))

    def shed(self) -> list[tuple[Sequence, CapacityError]]:
        """Take what waits beyond `max_queued` out of the queue, newest first. Parked ones are not counted."""
        refused = []
        while len(self._waiting) - self.num_parked > self.options.max_queued:
            sequence = self._waiting.pop()
            sequence.phase = Phase.GONE
            refused.append((sequence, CapacityError(
                f"{self.options.max_queued} requests wait already, {len(self._held)} of {self.options.max_running} run"
            )))  # fmt: skip
        return refused

    def grow(self, sequence: Sequence, rows: int) -> list[int]:
        """Make rows 0..rows-1 of a sequence addressable; returns the new slots. Contents are whatever was there. Within
        its reservation this succeeds; beyond it only as far as nobody else has reserved. Raises CapacityError."""
        need = -(-rows // BLOCK_TOKENS)
        if need > sequence.lifetime_blocks:
            raise AssertionError(f"{rows} rows need {need} blocks, its lifetime {sequence.lifetime_blocks}")
        missing = need - len(sequence.blocks)
        if missing <= 0:
            return []
        beyond = max(0, need - sequence.reserved_blocks)
        unreserved = self.index.free_count + self.index.cached_count - self.unallocated_blocks
        slots = self.index.allocate(missing) if beyond <= unreserved or not beyond else None
        if slots is None:
            raise CapacityError(
                f"{missing} blocks cannot be allocated: free {self.index.free_count}, cached "
                f"{self.index.cached_count}, held {self.index.held_count}, reserved {self.unallocated_blocks}"
            )
        sequence.reserved_blocks = max(need, sequence.reserved_blocks)
        new = [int(slot) for slot in slots]
        sequence.blocks += new
        return new

    def make_ready(self) -> tuple[list[Sequence], list[Sequence]]:
        """(sequences of the next step with their rows addressable, sequences to park now). Oldest first; one that finds
        no room is left out of the step until the parking of the youngest has made some."""
        drafts, ready, parking = self.options.draft_tokens, [], []
        for sequence in self.running:
            if sequence.phase is not Phase.RUNNING:
                continue  # chosen to make room for an older one
            sequence.cut_drafts(drafts)
            try:
                self.grow(sequence, sequence.step_rows(drafts))
                ready.append(sequence)
            except CapacityError:
                victim = self._to_park()
                if victim is not None:
                    victim.phase = Phase.PARKING
                    parking.append(victim)
        return [s for s in ready if s.phase is Phase.RUNNING], parking

    def _to_park(self) -> Sequence | None:
        """Who makes room: the youngest that runs and was never parked, be it itself, but not the only
        one. None while one is on its way out already, or none can be: then room comes when a sequence that holds its
        whole lifetime ends, or a join or a write in flight does."""
        candidates = [s for s in self.running if not s.was_parked]
        if any(s.phase is Phase.PARKING for s in self._held.values()) or len(candidates) < 2:
            return None
        return candidates[-1]

    def park(self, sequence: Sequence, blocks: ParkedBlocks) -> None:
        """Its bytes are in the host tier: give its slots back and put it in line again, by its order of arrival."""
        self._let_go(sequence)
        sequence.phase, sequence.parked, sequence.was_parked = Phase.WAITING, blocks, True
        at = next((i for i, s in enumerate(self._waiting) if s.order > sequence.order), len(self._waiting))
        self._waiting.insert(at, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Give back everything of a sequence, whatever its phase. Named blocks stay cached."""
        if sequence.phase is Phase.WAITING:
            self._waiting.remove(sequence)
        elif sequence.phase is not Phase.GONE:
            self._let_go(sequence)
        sequence.phase = Phase.GONE

    def _let_go(self, sequence: Sequence) -> None:
        del self._held[sequence.request_id]
        self.index.release(sequence.blocks)  # type: ignore[arg-type]
        sequence.blocks = []
