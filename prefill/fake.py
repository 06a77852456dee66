"""Fakes of the room's borders for tests: a host tier in memory, a group that computes nothing, and a
scheduler between them.

`MemoryStore` keeps the promises of `kvstore.base.StoreClient` for one client; `FakeRunner` answers every plan at once
with made-up tokens and checks what a rank would trip over.
"""

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.errors import DaemonUnavailable, LeaseExpired
from headrace.ids import BlockName, Incarnation, Namespace, RequestId, SlotIndex, Tier
from headrace.kvstore.base import Coming, Leased, PutOutcome
from headrace.kvstore.device_index import DeviceIndex
from headrace.kvstore.names import chain
from headrace.kvstore.policies import make_policy
from headrace.messages import PrefillDone, PrefillRequest, SamplingParams
from headrace.prefill.plan import Drafted, Sampled, StepOutcome, StepPlan
from headrace.prefill.scheduler import Limits, Scheduler

ROOT = Namespace(b"t" * 32)


class MemoryStore:
    """`slots` host slots of `slot_bytes`. Blocks without a lease are evicted oldest first when room is needed."""

    def __init__(self, slots: int, slot_bytes: int = 64, memory: bytearray | mmap.mmap | None = None) -> None:
        """`memory`: shared with the fakes of other processes, which may look at slots only."""
        self.incarnation = Incarnation("fake")
        self.arena = "fake arena"
        self.available = True
        self._connected = True
        self.announced: set[BlockName] = set()
        self.ready: dict[BlockName, tuple[SlotIndex, bytes]] = {}
        self.tenants: dict[BlockName, bytes] = {}
        """For whom each block was asked to be written."""
        self.leases: dict[BlockName, int] = {}
        self.writing: dict[BlockName, SlotIndex] = {}
        self.below: dict[BlockName, bytes] = {}
        """Digests of blocks on a disk; each `promote` brings one up, with whatever bytes its slot has."""
        self.promotes = True
        """False: what is below stays there, and is for ever coming."""
        self._came: set[BlockName] = set()
        self._free = [SlotIndex(i) for i in range(slots)]
        self._memory = memory if memory is not None else bytearray(slots * slot_bytes)
        self._slot_bytes = slot_bytes

    @property
    def idle(self) -> bool:
        """No lease and no unfinished write."""
        return not self.leases and not self.writing

    def match(self, names: Sequence[BlockName]) -> int:
        return next((i for i, name in enumerate(names) if name not in self.ready), len(names))

    def lease(self, names: Sequence[BlockName]) -> list[Leased | None]:
        self._call()
        found: list[Leased | None] = []
        for name in names:
            entry = self.ready.get(name)
            if entry is not None:
                self.leases[name] = self.leases.get(name, 0) + 1
            tier = Tier.DISK if name in self._came else Tier.HOST
            self._came.discard(name)
            found.append(None if entry is None else Leased(name, entry[0], entry[1], tier))
        return found

    @property
    def has_lower_tiers(self) -> bool:
        return bool(self.below)

    def promote(self, names: Sequence[BlockName]) -> Coming:
        self._call()
        ready = self.match(names)
        coming = next((i for i, name in enumerate(names[ready:]) if name not in self.below), len(names) - ready)
        if coming and self.promotes:
            slot = SlotIndex(self._begin(names[ready]))
            del self.writing[names[ready]]
            self.ready[names[ready]] = (slot, self.below[names[ready]])
            self._came.add(names[ready])
            ready, coming = ready + 1, coming - 1
        return Coming(ready, coming)

    def lease_leading(self, names: Sequence[BlockName]) -> list[Leased]:
        return [leased for leased in self.lease(names[: self.match(names)]) if leased is not None]

    def release(self, names: Sequence[BlockName]) -> None:
        self._call()
        for name in names:
            self.leases[name] -= 1
            if not self.leases[name]:
                del self.leases[name]

    def begin_put(self, blocks: Sequence[tuple[BlockName, BlockName | None, int]], tenant: bytes = b"") -> list[int]:
        self._call()
        self.tenants.update({name: tenant for name, _, _ in blocks})
        return [self._begin(name) for name, _, _ in blocks]

    def commit_put(self, writes: Sequence[tuple[BlockName, SlotIndex, bytes]], *, keep_lease: bool) -> None:
        self._call()
        if any(self.writing.get(name) != slot for name, slot, _ in writes):
            raise LeaseExpired("a slot is not being written by this client")
        for name, slot, digest in writes:
            del self.writing[name]
            self.ready[name] = (slot, digest)
            if keep_lease:
                self.leases[name] = self.leases.get(name, 0) + 1

    def abort_put(self, writes: Sequence[tuple[BlockName, SlotIndex]]) -> None:
        self._call()
        for name, slot in writes:
            del self.writing[name]
            self._free.append(slot)

    def drop(self, names: Sequence[BlockName], *, corrupt: bool = False) -> None:
        self._call()
        for name in names:
            if name in self.ready and name not in self.leases:
                self._free.append(self.ready.pop(name)[0])

    def announce(self, added: Sequence[BlockName], removed: Sequence[BlockName]) -> None:
        self._call()
        self.announced = (self.announced | set(added)) - set(removed)

    def slot_view(self, slot: SlotIndex) -> memoryview:
        return memoryview(self._memory)[slot * self._slot_bytes : (slot + 1) * self._slot_bytes]

    def lease_valid(self) -> bool:
        return self._connected

    def reconnect(self) -> None:
        if not self.available:
            raise DaemonUnavailable("the fake daemon is away")
        self._connected = True

    def follow(self, arena: str) -> None:
        if not self.available or self.arena != arena:
            raise DaemonUnavailable(f"the fake daemon has {self.arena!r}, wanted is {arena!r}")

    def stats(self) -> dict[str, float]:
        return {"leases": sum(self.leases.values()), "free": len(self._free)}

    def close(self) -> None:
        self.leases.clear()
        self.writing.clear()

    def lose(self) -> None:
        """The daemon dies with everything it knows."""
        self.available = self._connected = False
        slots = [slot for slot, _ in self.ready.values()] + list(self.writing.values())
        self._free += slots
        self.ready, self.leases, self.writing = {}, {}, {}
        self.announced = set()

    def _begin(self, name: BlockName) -> int:
        if name in self.ready or name in self.writing:
            return PutOutcome.EXISTS
        if not self._free:
            victim = next((held for held in self.ready if held not in self.leases), None)
            if victim is None:
                return PutOutcome.FULL
            self._free.append(self.ready.pop(victim)[0])
        self.writing[name] = self._free.pop()
        return self.writing[name]

    def _call(self) -> None:
        if not self._connected:
            raise DaemonUnavailable("the fake daemon of this connection is gone")


class FollowerStore(MemoryStore):
    """The store of a rank that is no leader: it may look at slots and nothing else. One place decides for a group."""

    def match(self, names: Sequence[BlockName]) -> int:
        self._call()
        return 0

    def _call(self) -> None:
        raise AssertionError("a follower asked the store for a decision; only the leader does that")


class FakeRunner:
    """Token 7 for every prompt. `bad` names are reported as corrupt once."""

    def __init__(self, ranks: int = 1, token: int = 7) -> None:
        self.ranks = ranks
        self.plans: list[StepPlan] = []
        self.bad: set[BlockName] = set()
        self.token = token

    def run(self, plan: StepPlan) -> StepOutcome:
        self.plans.append(plan)
        outcome = StepOutcome()
        for chunk in plan.chunks:
            if chunk.sampling is not None:
                reason = "length" if chunk.output_index + 1 >= chunk.sampling.max_tokens else None
                outcome.sampled[chunk.request_id] = Sampled(self.token, None, reason)
        for tail in plan.tails:
            outcome.drafted[tail.request_id] = Drafted(tuple(range(tail.drafts)), b"", b"")
        outcome.digests = {store.name: b"d" * 16 for store in plan.stores}
        outcome.bad = {restore.name for restore in plan.restores} & self.bad
        self.bad -= outcome.bad
        return outcome

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


class House:
    """A scheduler with everything around it faked, the clock included: a step takes 10 ms."""

    def __init__(
        self,
        device: int = 32,
        host: int = 64,
        chunk: int = 128,
        running: int = 4,
        queued: int = 4,
        ranks: int = 2,
    ) -> None:
        self.index = DeviceIndex(device, make_policy("lru", device))
        self.store = MemoryStore(host)
        self.runner = FakeRunner(ranks)
        limits = Limits(
            chunk_tokens=chunk,
            max_running=running,
            max_queued=queued,
            draft_tokens=4,
            draft_rows=0,
            host_blocks=host,
            max_context=10_000,
            vocab_size=1000,
        )
        self.now_s = 0.0
        self.scheduler = Scheduler(self.index, self.store, limits, ranks, clock=lambda: self.now_s)
        self.answers: dict[RequestId, PrefillDone] = {}

    def submit(self, name: str, tokens: Sequence[int], priority: int = 0, **fields: Any) -> None:
        fields.setdefault("sampling", SamplingParams(max_tokens=16))
        data = np.array(tokens, dtype="<u4").tobytes()
        names = tuple(chain(ROOT, data))
        self.scheduler.submit(
            PrefillRequest(request_id=RequestId(name), tokens=data, block_names=names, **fields), priority
        )

    def step(self) -> StepPlan | None:
        self.now_s += 0.01
        plan = self.scheduler.next_plan()
        if plan is not None:
            self.scheduler.finish(plan, self.runner.run(plan))
        self.answers |= {answer.request_id: answer for answer in self.scheduler.take_answers()}
        return plan

    def drain(self, limit: int = 200) -> None:
        for _ in range(limit):
            if self.step() is None and not self.scheduler.waiting:
                return
        raise AssertionError(f"not done after {limit} steps: {self.scheduler.status()}")

    def value(self, key: str) -> float:
        return self.scheduler.status()[key]

    def check_all_given_back(self) -> None:
        assert self.index.check_integrity() == []
        assert self.index.held_count == 0
        assert self.store.idle
