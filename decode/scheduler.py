"""Who runs on this rank: bounded FIFO queue, admission by reservation, blocks of each sequence. Pure: no torch.

A sequence is admitted when its whole life fits: every block of prompt + answer + slack is reserved (counted) at once
and allocated when rows reach it, so nothing that was admitted can run out. It never computes a prompt position: `admit`
only takes blocks, the join brings their bytes or the request is refused.
"""

from collections import deque

from headrace.decode.base import DecodeOptions, StreamId
from headrace.decode.sequence import Phase, Sequence
from headrace.errors import CapacityError, NeverFits
from headrace.ids import RequestId
from headrace.kernels.formats import BLOCK_TOKENS
from headrace.kvstore.device_index import DeviceIndex


class Scheduler:
    """Owns the references that sequences hold in `index`. One thread."""

    def __init__(self, options: DecodeOptions, index: DeviceIndex) -> None:
        self.options = options
        self.index = index
        self._waiting: deque[Sequence] = deque()
        self._held: dict[RequestId, Sequence] = {}
        """Leasing, copying or running, in order of admission."""

    @property
    def running(self) -> list[Sequence]:
        return [s for s in self._held.values() if s.phase is Phase.RUNNING]

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

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
        if sequence.reserved_blocks > self.index.num_slots:
            raise NeverFits(
                f"{len(sequence.prompt)} prompt + {sequence.limit} answer tokens need {sequence.reserved_blocks} "
                f"blocks, this rank has {self.index.num_slots}"
            )
        if self.find(sequence.request_id) is not None:
            raise CapacityError(f"request {sequence.request_id} is already on this rank")
        self._waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Move what fits from the head of the queue to phase LEASING, holding the leading blocks that are resident.
        Strictly first come, first served: nobody overtakes a request that waits for room."""
        admitted = []
        while self._waiting and len(self._held) < self.options.max_running:
            sequence = self._waiting[0]
            resident = self.index.acquire(sequence.request.block_names)
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

    def shed(self) -> list[tuple[Sequence, CapacityError]]:
        """Take what waits beyond `max_queued` out of the queue, newest first."""
        refused = []
        while len(self._waiting) > self.options.max_queued:
            sequence = self._waiting.pop()
            sequence.phase = Phase.GONE
            refused.append((sequence, CapacityError(
                f"{self.options.max_queued} requests wait already, {len(self._held)} of {self.options.max_running} run"
            )))  # fmt: skip
        return refused

    def grow(self, sequence: Sequence, rows: int) -> list[int]:
        """Make rows 0..rows-1 of a sequence addressable; returns the new slots. Contents are whatever was there."""
        need = -(-rows // BLOCK_TOKENS)
        if need > sequence.reserved_blocks:
            raise AssertionError(f"{rows} rows need {need} blocks, {sequence.reserved_blocks} are reserved")
        missing = need - len(sequence.blocks)
        if missing <= 0:
            return []
        slots = self.index.allocate(missing)
        if slots is None:
            raise CapacityError(
                f"{missing} reserved blocks cannot be allocated: free {self.index.free_count}, "
                f"cached {self.index.cached_count}, held {self.index.held_count}"
            )
        new = [int(slot) for slot in slots]
        sequence.blocks += new
        return new

    def remove(self, sequence: Sequence) -> None:
        """Give back everything of a sequence, whatever its phase. Named blocks stay cached."""
        if sequence.phase is Phase.WAITING:
            self._waiting.remove(sequence)
        elif sequence.phase is not Phase.GONE:
            del self._held[sequence.request_id]
            self.index.release(sequence.blocks)  # type: ignore[arg-type]
            sequence.blocks = []
        sequence.phase = Phase.GONE
