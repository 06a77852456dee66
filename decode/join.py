"""Store work of one rank beside its step loop: lease and copy the blocks of joining requests, publish full blocks,
announce what the device tier holds. One thread, so that a slow copy or a dead daemon never holds up a step.

The step loop owns all slots. A job carries slot numbers that the loop keeps referenced until the job comes back through
`done`, so a slot is never reused under a copy in flight. Nothing here touches the index.
"""

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

from headrace.decode.base import Source
from headrace.decode.sequence import ParkedBlocks, Sequence
from headrace.errors import BlockMiss, CapacityError, DaemonUnavailable, HeadraceError, LeaseExpired, StoreError
from headrace.ids import BlockName, Incarnation, Tier
from headrace.kvstore.base import Leased, StoreClient
from headrace.kvstore.names import is_private

log = logging.getLogger(__name__)


Block = tuple[int, BlockName, BlockName | None, int]
"""(device slot, name, parent, depth) of a block that goes to the host tier."""


class Mover(Protocol):
    """Copies between the pool and slots of the host tier. `StoreMover` (mover.py) is the product's."""

    def fence(self) -> object:
        """What has been queued on the device so far by the calling thread; the loop takes it when it gives a job."""
        ...

    def follow(self, fence: object) -> None:
        """The copies of the next calls start after what `fence` stands for, and wait for nothing queued later."""
        ...

    def restore(self, device_slots: Seq[int], sources: Seq[Leased]) -> None:
        """Copy leased blocks. Raises DigestMismatch: then none of the slots' bytes must be used, and the block that is
        not what was written has been dropped from the store."""
        ...

    def publish(self, blocks: Seq[Block], tenant: bytes = b"") -> tuple[int, int]:
        """-> (published or already there, skipped). `tenant`: whom the store counts them for."""
        ...

    def park(self, blocks: Seq[Block]) -> list[BlockName]:
        """Have every block in the host tier and pinned there; the names they are under, which for a block that somebody
        else is writing just then is a private one. Raises CapacityError when the tier is full of what is in use; then
        nothing is pinned."""
        ...


@dataclasses.dataclass(slots=True)
class JoinJob:
    """Bring the missing blocks of one sequence. Comes back twice: leased, then copied; or once with `error`."""

    sequence: Sequence
    sources: list[Source]
    slots: list[int] = dataclasses.field(default_factory=list)
    """Device slot for each source; filled by the loop between the two halves."""
    leased: bool = False
    copied: bool = False
    cancelled: bool = False
    """Set by the loop; the worker stops before the next RESTORE_BLOCKS blocks."""
    error: HeadraceError | None = None
    tiers: list[str] = dataclasses.field(default_factory=list)
    leases: list[Leased] = dataclasses.field(default_factory=list)
    parked: ParkedBlocks | None = None
    """Pins that end with this job: those of a sequence that returns from the host tier."""
    fence: object = None
    holder: Incarnation | None = None
    """Under which the client took the leases: they ended, and their slots mean nothing, once it has another one."""

    @property
    def names(self) -> list[BlockName]:
        return [source.name for source in self.sources]


@dataclasses.dataclass(slots=True)
class PublishJob:
    """Write full blocks through to the host tier. The loop holds one reference on each slot meanwhile."""

    blocks: list[Block]
    tenant: bytes = b""
    """Whom the store counts them for (`names.tenant_id`): a block's parent may be gone from the host tier by now."""
    published: int = 0
    skipped: int = 0
    fence: object = None

    @property
    def slots(self) -> list[int]:
        return [block[0] for block in self.blocks]


@dataclasses.dataclass(slots=True)
class ParkJob:
    """Take one sequence to the host tier and pin it there. The loop does not step it meanwhile."""

    sequence: Sequence
    blocks: list[Block]
    parked: ParkedBlocks | None = None
    cancelled: bool = False
    """Set by the loop: its request ends when the job comes back."""
    error: HeadraceError | None = None
    fence: object = None


@dataclasses.dataclass(slots=True)
class AnnounceJob:
    added: list[BlockName]
    removed: list[BlockName]


@dataclasses.dataclass(slots=True)
class Reconnected:
    """The daemon is back: the loop announces everything anew."""


Job = JoinJob | ParkJob | PublishJob | AnnounceJob
RECONNECT_S = 0.5
RESTORE_BLOCKS = 32
"""Blocks of one call to the copy engines."""


class StoreWorker:
    """Runs jobs in order: what makes room, then joins, then the rest. `run_next` is the whole logic; `start` puts a
    thread around it."""

    def __init__(
        self, client: StoreClient, mover: Mover, done: Callable[[Job | Reconnected], None], *, max_publish: int = 256
    ) -> None:
        self._client = client
        self._mover = mover
        self._done = done
        self._max_publish = max_publish
        self._parks: deque[ParkJob] = deque()
        self._joins: deque[JoinJob] = deque()
        self._others: deque[PublishJob | AnnounceJob] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._close_by = 0.0
        self._retry_at = 0.0
        self._thread: threading.Thread | None = None
        self.connected = True

    def start(self) -> None:
        self._thread = threading.Thread(target=self._loop, name="decode-store", daemon=True)
        self._thread.start()

    def join(self, job: JoinJob) -> None:
        """Lease its sources, or, when they are leased and slots are given, copy them."""
        self._put(self._joins, job)

    def park(self, job: ParkJob) -> None:
        self._put(self._parks, job)

    def publish(self, job: PublishJob) -> bool:
        """False when too much waits already: the write is skipped and the caller keeps its references."""
        if len(self._others) >= self._max_publish or not self.connected:
            return False
        self._put(self._others, job)
        return True

    def announce(self, job: AnnounceJob) -> None:
        self._put(self._others, job)

    def close(self, timeout_s: float) -> None:
        """Finish what waits within `timeout_s` (an answer's last blocks are worth publishing), then end the thread.
        What is left after that is dropped; its leases end with the client."""
        with self._changed:
            self._closed = True
            self._close_by = time.monotonic() + timeout_s
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def run_next(self) -> bool:
        """Run one waiting job; False when there is none."""
        with self._changed:
            if self._parks:
                job: Job = self._parks.popleft()
            elif self._joins:
                job = self._joins.popleft()
            elif self._others:
                job = self._others.popleft()
            else:
                return False
        if not isinstance(job, AnnounceJob):
            self._mover.follow(job.fence)
        if isinstance(job, JoinJob):
            self._run_join(job)
            if job.sources:
                self._done(job)
        elif isinstance(job, ParkJob):
            self._run_park(job)
            self._done(job)
        elif isinstance(job, PublishJob):
            self._run_publish(job)
            self._done(job)
        else:
            self._guard("announce", lambda: self._client.announce(job.added, job.removed))
        return True

    def _put(self, queue: deque, job: Job) -> None:
        if not isinstance(job, AnnounceJob):
            job.fence = self._mover.fence()
        with self._changed:
            queue.append(job)
            self._changed.notify_all()

    def _loop(self) -> None:
        while not self._closed or time.monotonic() < self._close_by:
            if self.run_next():
                continue
            if self._closed:
                return
            if not self.connected:
                self._reconnect()
            with self._changed:
                if not (self._parks or self._joins or self._others or self._closed):
                    self._changed.wait(None if self.connected else RECONNECT_S)

    def _reconnect(self) -> None:
        if time.monotonic() < self._retry_at:
            return
        self._retry_at = time.monotonic() + RECONNECT_S
        reconnect = getattr(self._client, "reconnect", None)
        try:
            if reconnect is not None:
                reconnect()
            self._client.match([])
        except (StoreError, OSError):
            return
        self.connected = True
        log.info("the node daemon is back")
        self._done(Reconnected())

    def _lost(self, doing: str, error: Exception) -> None:
        if self.connected:
            log.warning("%s: the node daemon does not answer (%s); going on with the device tier", doing, error)
        self.connected = False
        self._retry_at = time.monotonic() + RECONNECT_S

    def _guard(self, doing: str, call: Callable[[], object]) -> None:
        try:
            call()
        except (DaemonUnavailable, OSError) as error:
            self._lost(doing, error)
        except StoreError as error:
            log.warning("%s: %s", doing, error)

    # --- joins ------------------------------------------------------------------------------------------------------

    def _run_join(self, job: JoinJob) -> None:
        try:
            if job.cancelled:
                self._give_back(job)
            elif not job.leased:
                self._lease(job)
            else:
                self._copy(job)
        except HeadraceError as error:
            job.error = error
            if isinstance(error, DaemonUnavailable):
                self._lost("join", error)
            self._give_back(job)
        except Exception as error:  # an I/O error of the mapped arena, say: this request fails, the loop goes on
            log.exception("join of %s", job.sequence.request_id)
            job.error = BlockMiss(f"copying the blocks of {job.sequence.request_id} failed: {error}")
            self._give_back(job)

    def _lease(self, job: JoinJob) -> None:
        leases = self._client.lease(job.names)
        missing = [source for source, lease in zip(job.sources, leases) if lease is None]
        if missing:
            taken = [lease.name for lease in leases if lease is not None]
            self._client.release(taken)
            raise BlockMiss(
                f"{len(missing)} of {len(job.sources)} blocks are not in the host tier, "
                f"first block {missing[0].position} ({missing[0].name.hex()[:16]})"
            )
        job.leased, job.holder = True, self._client.incarnation
        job.tiers = [lease.tier.value for lease in leases if lease is not None]
        job.leases = [lease for lease in leases if lease is not None]

    def _copy(self, job: JoinJob) -> None:
        if job.holder != self._client.incarnation:
            raise LeaseExpired(f"the node daemon was lost after {len(job.sources)} blocks were leased")
        for start in range(0, len(job.slots), RESTORE_BLOCKS):
            if job.cancelled:
                break
            part = slice(start, start + RESTORE_BLOCKS)
            self._mover.restore(job.slots[part], job.leases[part])
        if not job.cancelled and not self._client.lease_valid():
            raise LeaseExpired(f"the lease of {len(job.sources)} blocks ended while they were copied")
        job.copied = not job.cancelled
        self._give_back(job)
        if job.copied:
            private = [name for name in job.names if is_private(name)]
            self._guard("drop", lambda: self._client.drop(private))

    def _give_back(self, job: JoinJob) -> None:
        if job.leased:
            job.leased = False
            if job.holder == self._client.incarnation:
                self._guard("release", lambda: self._client.release(job.names))
        if job.parked is not None:
            self._unpin(job.parked)
            job.parked = None

    def _unpin(self, parked: ParkedBlocks) -> None:
        """Its private blocks are nobody else's: they go at once."""
        if parked.holder == self._client.incarnation:
            self._guard("release", lambda: self._client.release(parked.names))
            private = [name for name in parked.names if is_private(name)]
            self._guard("drop", lambda: self._client.drop(private))

    # --- parking ----------------------------------------------------------------------------------------------------

    def _run_park(self, job: ParkJob) -> None:
        holder = self._client.incarnation
        try:
            job.parked = ParkedBlocks(self._mover.park(job.blocks), holder)
        except Exception as error:
            if isinstance(error, DaemonUnavailable):
                self._lost("park", error)
            elif not isinstance(error, HeadraceError):
                log.exception("parking %s", job.sequence.request_id)
            what = f"{job.sequence.request_id} has to make room and cannot be parked in the host tier: {error}"
            job.error = CapacityError(what)

    # --- publishing -------------------------------------------------------------------------------------------------

    def _run_publish(self, job: PublishJob) -> None:
        try:
            job.published, job.skipped = self._mover.publish(job.blocks, job.tenant)
        except (StoreError, OSError) as error:
            job.published, job.skipped = 0, len(job.blocks)
            if isinstance(error, (DaemonUnavailable, OSError)):
                self._lost("publish", error)


def restored_tokens(sequence: Sequence, job: JoinJob, resident: int) -> dict[str, int]:
    """Prompt tokens by the tier this rank took them from: `resident` leading blocks, then the job's sources."""
    length = len(sequence.prompt)
    tokens = {Tier.DEVICE.value: min(resident * 64, length)}
    for source, tier in zip(job.sources, job.tiers):
        count = max(0, min(64, length - source.position * 64))
        tokens[tier] = tokens.get(tier, 0) + count
    return {tier: count for tier, count in tokens.items() if count}
