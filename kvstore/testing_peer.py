"""Two nodes in one process, the second fetching from the first over real gRPC and TCP on loopback. No test framework
here."""

from pathlib import Path

from headrace.ids import new_incarnation
from headrace.kvstore.daemon.core import NodeFacts, StoreCore
from headrace.kvstore.faults import FaultPlan, FaultyPipe
from headrace.kvstore.peer.owner import PeerOwner
from headrace.kvstore.peer.reader import PeerNode, PeerSettings
from headrace.kvstore.testing import FINGERPRINT
from headrace.kvstore.testing_lower import PAYLOAD_BYTES, SLOT_BYTES, LowerFixture, LowerSettings

TOKEN = "the nodes' secret"


class PeerPair:
    """`owner` has blocks, `reader` wants them. `open` and `close` on the running loop."""

    def __init__(
        self,
        directory: Path,
        *,
        owner: LowerSettings | None = None,
        reader: LowerSettings | None = None,
        timeout_s: float = 5.0,
        token: str = TOKEN,
        fingerprint: bytes = FINGERPRINT,
    ) -> None:
        for name in ("owner", "reader"):
            (directory / name).mkdir()
        self.plan = FaultPlan()
        self.timeout_s = timeout_s
        self._token, self._fingerprint = token, fingerprint
        self.owner = LowerFixture(directory / "owner", owner)
        self._port = 0
        self.directory = directory / "reader"
        self.reader_settings = reader
        self.core = self._core()

    def _core(self) -> StoreCore:
        facts = NodeFacts(
            node="owner", incarnation=new_incarnation(), fingerprint=FINGERPRINT, lease_s=10.0, arena="",
            slots=self.owner.host.slots, slot_bytes=SLOT_BYTES, payload_bytes=PAYLOAD_BYTES,
        )  # fmt: skip
        return StoreCore(facts, self.owner.host, lower=self.owner.lower)

    async def _serve(self) -> None:
        self.service = PeerOwner(
            self.core, self.owner.view, listen=f"127.0.0.1:{self._port}", token=TOKEN, timeout_s=self.timeout_s,
            wrap=lambda pipe: FaultyPipe(pipe, self.plan),
        )  # fmt: skip
        await self.service.start()
        self._port = self.service.port

    async def restart_owner(self) -> None:
        """The owner dies and comes back at the same address, with an empty host tier."""
        await self.service.close()
        await self.owner.crash()
        self.core = self._core()
        await self._serve()

    async def open(self) -> None:
        await self._serve()
        self.peer = PeerNode(
            "owner",
            f"127.0.0.1:{self.service.port}",
            PeerSettings(
                fingerprint=self._fingerprint,
                token=self._token,
                payload_bytes=PAYLOAD_BYTES,
                depth=2,
                timeout_s=self.timeout_s,
                retry_s=0.1,
            ),
            wrap=lambda pipe: FaultyPipe(pipe, self.plan),
        )
        await self.peer.open()
        self.reader = LowerFixture(self.directory, self.reader_settings, sources=[self.peer])

    def tick(self) -> None:
        self.core.tick()
        self.service.tick()
        self.peer.tick()
        self.reader.tick()

    async def known(self, count: int) -> None:
        """Until the reader knows of `count` blocks of the owner's."""
        await self.reader.settle(lambda: self._knows(count))

    def _knows(self, count: int) -> bool:
        self.tick()
        return self.peer.values()["peer_known_blocks{peer=owner}"] == count

    async def in_step(self) -> None:
        """Until the reader has heard all that happened at the owner."""
        self.tick()
        incarnation, last = self.core.events.incarnation, self.core.events.last
        await self.reader.settle_until(lambda: self.peer.heard == (incarnation, last) or self._moved_on(last))

    def _moved_on(self, last: int) -> bool:
        return self.peer.heard[0] == self.core.events.incarnation and self.peer.heard[1] > last

    async def close(self) -> None:
        self.plan.clear()
        await self.peer.close()
        await self.service.close()
        await self.reader.close()
        await self.owner.close()
