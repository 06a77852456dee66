"""Stand-ins for what surrounds a decode rank, for tests of this room and of those that talk to it: a sink that
remembers, and a prefill that runs the reference engine and puts its blocks into a store."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from headrace.errors import DaemonUnavailable
from headrace.ids import BlockName, Namespace, RequestId, SlotIndex, Tier, new_incarnation
from headrace.kernels.formats import BLOCK_TOKENS
from headrace.kvstore.base import Leased, PutOutcome, StoreClient
from headrace.kvstore.names import chain, private_name
from headrace.kvstore.pool import DevicePool
from headrace.kvstore.transfer import digest, store_slab
from headrace.messages import DecodeRequest, Handover, SamplingParams, StepTokens
from headrace.model.mono import MonoEngine
from headrace.model.sampler import SamplerState
from headrace.model.transformer import Transformer

TEST_NAMESPACE = Namespace(b"\x07" * 32)


class ListSink:
    """Keeps every message; refuses those beyond `room` if that is given."""

    def __init__(self, room: int | None = None) -> None:
        self.messages: list[Any] = []
        self._room = room
        self._changed = threading.Condition()

    def put(self, message: Any) -> bool:
        with self._changed:
            if self._room is not None and len(self.messages) >= self._room:
                return False
            self.messages.append(message)
            self._changed.notify_all()
        return True

    def put_last(self, message: Any) -> None:
        with self._changed:
            self.messages.append(message)
            self._changed.notify_all()

    def tokens(self, request_id: str) -> list[int]:
        parts = [p for m in list(self.messages) if isinstance(m, StepTokens) for p in m.sequences]
        return [token for part in parts if part.request_id == request_id for token in part.tokens]

    def finish_reason(self, request_id: str) -> str | None:
        parts = [p for m in list(self.messages) if isinstance(m, StepTokens) for p in m.sequences]
        return next((p.finish_reason for p in parts if p.request_id == request_id and p.finish_reason), None)

    def of(self, kind: type[Any], request_id: str) -> list[Any]:
        return [m for m in list(self.messages) if isinstance(m, kind) and m.request_id == request_id]

    def wait(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Until `condition` holds; it is tested after every message."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not condition():
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"waited {timeout_s} s; last messages: {self.messages[-3:]}")
                self._changed.wait(min(left, 0.1))


class FakePrefill:
    """Computes prompts with the reference engine and publishes their blocks."""

    def __init__(self, model: Transformer, store: StoreClient, *, draft_tokens: int = 4) -> None:
        self._model = model
        self._store = store
        self._draft_tokens = draft_tokens

    def request(self, request_id: str, prompt: Seq[int], params: SamplingParams, **changes: Any) -> DecodeRequest:
        """Prefill `prompt`; the request that hands it to a decode rank. The blocks stay leased by the store client
        that was given."""
        engine = MonoEngine(self._model)
        layout = self._model.spec.slab_layout(self._model.fmt.name)
        last = len(prompt) // BLOCK_TOKENS
        engine.pool = DevicePool(layout, last + 2, self._model.device)
        result, drafts = engine._prefill(list(prompt), SamplerState(params), self._draft_tokens)
        names = chain(TEST_NAMESPACE, list(prompt))
        private = private_name()
        parents: list[BlockName | None] = [None, *names]
        blocks = [(name, parent, at) for at, (name, parent) in enumerate(zip(names, parents))]
        self._publish(engine.pool, [*blocks, (private, None, last)])
        handover = Handover(
            private_name=private,
            draft_tokens=tuple(drafts),
            mtp_hidden=np.zeros(self._model.hidden_size, dtype="<f4").tobytes(),
            index_seed=b"",
        )
        fields: dict[str, Any] = {
            "request_id": RequestId(request_id),
            "tokens": np.asarray(prompt, dtype="<u4").tobytes(),
            "block_names": tuple(names),
            "first_token": result.tokens[0],
            "output_index": 1,
            "sampling": params,
            "handover": handover,
            "namespace": TEST_NAMESPACE,
        }
        return DecodeRequest(**(fields | changes))

    def _publish(self, pool: DevicePool, blocks: list[tuple[BlockName, BlockName | None, int]]) -> None:
        slots = self._store.begin_put(blocks)
        writes = []
        for at, (block, slot) in enumerate(zip(blocks, slots)):
            if slot < 0:
                continue
            view = self._store.slot_view(slot)  # type: ignore[arg-type]
            store_slab(pool, at, view)
            writes.append((block[0], slot, digest(view[: pool.layout.payload_bytes])))
        self._store.commit_put(writes, keep_lease=False)  # type: ignore[arg-type]


class MemoryStore:
    """A host tier inside this process, with switches for what can go wrong. `StoreClient` of any number of users."""

    def __init__(self, slot_bytes: int, slots: int = 256) -> None:
        self.incarnation = new_incarnation()
        self.arena = "fake arena"
        self.down = False
        """True: every call raises DaemonUnavailable."""
        self.valid = True
        """False: leases have ended."""
        self.announced: set[BlockName] = set()
        self.leases: Counter[BlockName] = Counter()
        self.blocks: dict[BlockName, tuple[SlotIndex, bytes]] = {}
        self._memory = [bytearray(slot_bytes) for _ in range(slots)]
        self._free = [SlotIndex(slot) for slot in range(slots)]
        self._writing: dict[BlockName, SlotIndex] = {}

    def payload(self, name: BlockName, size: int) -> bytes:
        return bytes(self._memory[self.blocks[name][0]][:size])

    def match(self, names: Seq[BlockName]) -> int:
        self._check()
        return next((at for at, name in enumerate(names) if name not in self.blocks), len(names))

    def lease(self, names: Seq[BlockName]) -> list[Leased | None]:
        self._check()
        found: list[Leased | None] = []
        for name in names:
            block = self.blocks.get(name)
            found.append(None if block is None else Leased(name, block[0], block[1], Tier.HOST))
            self.leases[name] += block is not None
        return found

    def release(self, names: Seq[BlockName]) -> None:
        self._check()
        self.leases.subtract(names)

    def begin_put(self, blocks: Seq[tuple[BlockName, BlockName | None, int]], tenant: bytes = b"") -> list[int]:
        self._check()
        slots: list[int] = []
        for name, _parent, _depth in blocks:
            if name in self.blocks or name in self._writing:
                slots.append(PutOutcome.EXISTS)
            elif not self._free:
                slots.append(PutOutcome.FULL)
            else:
                self._writing[name] = self._free.pop()
                slots.append(self._writing[name])
        return slots

    def commit_put(self, writes: Seq[tuple[BlockName, SlotIndex, bytes]], *, keep_lease: bool) -> None:
        self._check()
        for name, slot, block_digest in writes:
            self.blocks[name] = (slot, block_digest)
            self.leases[name] += keep_lease
            del self._writing[name]

    def abort_put(self, writes: Seq[tuple[BlockName, SlotIndex]]) -> None:
        for name, slot in writes:
            del self._writing[name]
            self._free.append(slot)

    def drop(self, names: Seq[BlockName], *, corrupt: bool = False) -> None:
        self._check()
        for name in names:
            if name in self.blocks:
                self._free.append(self.blocks.pop(name)[0])

    def announce(self, added: Seq[BlockName], removed: Seq[BlockName]) -> None:
        self._check()
        self.announced |= set(added)
        self.announced -= set(removed)

    def slot_view(self, slot: SlotIndex) -> memoryview:
        return memoryview(self._memory[slot])

    def lease_valid(self) -> bool:
        return self.valid

    def stats(self) -> dict[str, float]:
        return {}

    def reconnect(self) -> None:
        self._check()
        self.incarnation = new_incarnation()

    def follow(self, arena: str) -> None:
        self._check()
        if arena != self.arena:
            raise DaemonUnavailable(f"the fake store has {self.arena!r}, wanted is {arena!r}")

    def close(self) -> None:
        pass

    def _check(self) -> None:
        if self.down:
            raise DaemonUnavailable("the fake store is switched off")
