"""One running node daemon: arena, tier, core, server, on a thread with its own event loop. Owns all of them."""

import asyncio
import dataclasses
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.config import StoreConfig
from headrace.errors import ConfigError
from headrace.ids import new_incarnation
from headrace.kvstore.arena import Arena
from headrace.kvstore.daemon.core import NodeFacts, StoreCore
from headrace.kvstore.daemon.disk import make_disk_side
from headrace.kvstore.daemon.journal import Journal
from headrace.kvstore.daemon.lower import DiskSide, LowerTiers
from headrace.kvstore.daemon.server import StoreServer
from headrace.kvstore.directory.tasks import end
from headrace.kvstore.host_tier import HostTier
from headrace.kvstore.layout import SlabLayout
from headrace.kvstore.policies import make_policy
from headrace.kvstore.quotas import quotas_of

if TYPE_CHECKING:
    from headrace.kvstore.daemon.publisher import RedisPublisher
    from headrace.kvstore.peer.reader import PeerNode

STOP_TIMEOUT_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    name: str
    socket: Path
    layout: SlabLayout
    fingerprint: bytes
    store: StoreConfig
    directory_url: str = ""
    """Redis to publish into; empty: routers ask this daemon."""
    peer_token: str = ""
    """Secret shared with other nodes, if the settings name none."""
    arena_prefix: str
    """Start of the shared-memory file's name, so that whoever started this run can find it."""


class Node:
    """Constructed stopped. `start` once, `stop` once."""

    def __init__(self, settings: NodeSettings) -> None:
        self.incarnation = new_incarnation()
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="node-daemon", daemon=True)
        self._arena: Arena | None = None
        self._journal: Journal | None = None
        self._core: StoreCore | None = None
        self._server: StoreServer | None = None
        self._publisher: RedisPublisher | None = None
        self._publishing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Allocate the arena and listen. Raises ConfigError with the reason; nothing is left behind then."""
        if len(self._settings.fingerprint) != 32:
            raise ConfigError(f"a node daemon needs a 32-byte fingerprint, got {len(self._settings.fingerprint)} bytes")
        store, layout = self._settings.store, self._settings.layout
        self._arena = Arena.create(
            Path(store.shm_dir),
            self._settings.arena_prefix,
            host_bytes=store.host_bytes,
            slot_bytes=layout.slot_bytes,
            owner=self.incarnation,
            numa=store.numa,
        )
        self._thread.start()
        try:
            slots = self._arena.slots
            policy = make_policy(store.host_policy, slots)
            tier = HostTier(
                slots=slots,
                slot_bytes=layout.slot_bytes,
                policy=policy,
                lease_s=store.lease_s,
                quotas=quotas_of(policy, store.host_policy, slots, store.tenant_share),
            )
            # Here, not on the loop: reading back a large disk tier takes longer than a call may.
            disk = make_disk_side(store, self._settings.name, self._settings.fingerprint, layout)
            self._core = self._call(self._build(tier, disk))
            self._core.constants["host_huge_bytes"] = float(self._arena.huge_bytes())
            self._record(self._core)
            self._call(self._listen(self._core))
        except BaseException:
            self.stop()
            raise

    def values(self) -> dict[str, float]:
        """Gauges and counters."""
        core = self._core
        return {} if core is None or not self._thread.is_alive() else self._call(_values(core))

    def check_integrity(self) -> list[str]:
        core = self._core
        return [] if core is None else self._call(_violations(core))

    def stop(self) -> None:
        """Close every connection and remove socket and arena. May be called in any state."""
        try:
            if self._thread.is_alive() and self._core is not None:
                self._call(self._close())
        finally:
            self._end()

    def _end(self) -> None:
        """Whatever went wrong before: no thread and no file stays."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_TIMEOUT_S)
        if not self._loop.is_running():
            self._loop.close()
        if self._journal is not None:
            self._journal.close()
        if self._arena is not None:
            self._arena.close()

    def _record(self, core: StoreCore) -> None:
        store, facts = self._settings.store, core.facts
        if store.event_log:
            header: dict[str, object] = {"node": facts.node, "incarnation": facts.incarnation}
            header |= {"slots": facts.slots, "slot_bytes": facts.slot_bytes}
            self._journal = Journal(Path(store.event_log), header, store.event_log_bytes)
            core.record(self._journal)

    async def _build(self, tier: HostTier, disk: DiskSide | None) -> StoreCore:
        arena, store = self._arena, self._settings.store
        assert arena is not None
        if disk is None and not store.peers and not store.peer_listen:
            return StoreCore(self._facts(arena, False), tier)
        peers: list[PeerNode] = []
        if store.peers:
            # Imported here, as below: a node that is alone needs no gRPC.
            from headrace.kvstore.daemon.neighbours import make_peers

            peers = make_peers(self._settings)
        lower = LowerTiers(tier, arena.slot, disk, peers)
        lower.parts += peers
        for peer in peers:
            await peer.open()
        return StoreCore(self._facts(arena, disk is not None or bool(peers)), tier, lower=lower)

    async def _listen(self, core: StoreCore) -> None:
        server = StoreServer(core, self._settings.socket)
        core.on_change = server.notify
        await server.start()
        self._server = server
        if self._settings.store.peer_listen:
            from headrace.kvstore.daemon.neighbours import make_owner

            assert self._arena is not None
            assert core.lower is not None
            owner = make_owner(self._settings, core, self._arena.slot)
            await owner.start()
            core.lower.parts.append(owner)
        if self._settings.directory_url:
            # Imported here: a daemon without Redis needs no Redis client.
            from headrace.kvstore.daemon.publisher import RedisPublisher

            self._publisher = RedisPublisher(
                self._settings.directory_url, self._settings.name, self._settings.fingerprint, core.events
            )
            self._publishing = asyncio.create_task(self._publisher.run())

    async def _close(self) -> None:
        if self._publisher is not None and self._publishing is not None:
            await end(self._publishing)
            await self._publisher.close()
        if self._server is not None:
            await self._server.stop()
        if self._core is not None and self._core.lower is not None:
            await self._core.lower.close()

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(STOP_TIMEOUT_S)

    def _facts(self, arena: Arena, lower_tiers: bool) -> NodeFacts:
        return NodeFacts(
            node=self._settings.name,
            incarnation=self.incarnation,
            fingerprint=self._settings.fingerprint,
            lease_s=self._settings.store.lease_s,
            arena=str(arena.path),
            slots=arena.slots,
            slot_bytes=arena.slot_bytes,
            payload_bytes=self._settings.layout.payload_bytes,
            lower_tiers=lower_tiers,
        )


async def _values(core: StoreCore) -> dict[str, float]:
    return core.values()


async def _violations(core: StoreCore) -> list[str]:
    below = core.lower.check_integrity() if core.lower is not None else []
    return core.tier.check_integrity() + below
