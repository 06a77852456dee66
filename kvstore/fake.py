"""An in-process node and its clients: the daemon's own bookkeeping and a bytearray, no socket, no shared memory, no
threads. For tests of whatever uses a `StoreClient`, and for the simulator."""

import time
from collections.abc import Callable
from typing import Any

from headrace.errors import DaemonUnavailable, from_wire
from headrace.ids import SlotIndex, new_incarnation
from headrace.kvstore import wire
from headrace.kvstore.daemon.core import NodeFacts, Session, StoreCore
from headrace.kvstore.daemon.peers import PeerProcess
from headrace.kvstore.host_tier import HostTier
from headrace.kvstore.operations import StoreOperations
from headrace.kvstore.policies import make_policy
from headrace.kvstore.quotas import quotas_of
from headrace.messages import ErrorInfo, Hello, decode, encode

FINGERPRINT = bytes(32)


class FakeNode:
    """A node daemon without process. `available = False` makes every call fail as a dead daemon does."""

    def __init__(
        self,
        *,
        slots: int,
        slot_bytes: int,
        policy: str = "lru",
        lease_s: float = 10.0,
        grace_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.available = True
        self.clock = clock
        self.slot_bytes = slot_bytes
        self.memory = memoryview(bytearray(slots * slot_bytes))
        whole = make_policy(policy, slots)
        self.tier = HostTier(
            slots=slots,
            slot_bytes=slot_bytes,
            policy=whole,
            quotas=quotas_of(whole, policy, slots, 1.0),
            lease_s=lease_s,
            grace_s=grace_s,
            clock=clock,
        )
        facts = NodeFacts(
            node="node-0",
            incarnation=new_incarnation(),
            fingerprint=FINGERPRINT,
            lease_s=lease_s,
            arena="fake arena",
            slots=slots,
            slot_bytes=slot_bytes,
        )
        self.core = StoreCore(facts, self.tier)

    def client(self, name: str = "rank", role: str = "decode") -> "FakeClient":
        return FakeClient(self, name, role)

    def tick(self) -> None:
        """What the daemon's server does every fraction of a second."""
        for session in self.core.tick():
            self.core.close(session, clean=False)


class FakeClient(StoreOperations):
    """A client of a FakeNode. It has no heartbeat thread: each call renews, as does `heartbeat`."""

    def __init__(self, node: FakeNode, name: str, role: str) -> None:
        super().__init__()
        self._node = node
        self._name = name
        self._role = role
        self._session: Session | None = None
        self._renewed_s = 0.0
        self._dial()

    def slot_view(self, slot: SlotIndex) -> memoryview:
        size = self._node.slot_bytes
        if not 0 <= slot < len(self._node.memory) // size:
            raise IndexError(f"slot {slot} is outside the arena")
        return self._node.memory[slot * size : (slot + 1) * size]

    @property
    def arena(self) -> str:
        return self._node.core.facts.arena

    @property
    def has_lower_tiers(self) -> bool:
        return self._node.core.facts.lower_tiers

    def lease_valid(self) -> bool:
        return self._session is not None and self._node.clock() - self._renewed_s < self._node.core.facts.lease_s

    def heartbeat(self) -> None:
        self._call(wire.Heartbeat())

    def reconnect(self) -> None:
        if self._session is None:
            self._dial()
            self._announce_all()

    def follow(self, arena: str) -> None:
        if self.arena != arena:
            raise DaemonUnavailable(f"the fake node has {self.arena!r}, wanted is {arena!r}")

    def vanish(self) -> None:
        """End as a killed process does: without a word."""
        if self._session is not None:
            self._node.core.close(self._session, clean=False)
            self._session = None

    def close(self) -> None:
        if self._session is not None:
            self._node.core.close(self._session, clean=True)
            self._session = None

    def _call(self, request: Any) -> Any:
        session = self._session
        if session is None or not session.open or not self._node.available:
            self.vanish()
            raise DaemonUnavailable("the fake node is not connected")
        reply = decode(encode(self._node.core.handle(session, decode(encode(request)))))
        if isinstance(reply, ErrorInfo):
            raise from_wire(reply.kind, reply.text)
        self._renewed_s = self._node.clock()
        return reply

    def _dial(self) -> None:
        if not self._node.available:
            raise DaemonUnavailable("the fake node is not available")
        self.incarnation = new_incarnation()
        hello = Hello(name=self._name, role=self._role, incarnation=self.incarnation, fingerprint=FINGERPRINT)
        self._session, _ = self._node.core.open(hello, PeerProcess(0))
        self._renewed_s = self._node.clock()
