"""Nodes to run suites against: the fake and a real daemon process behind one form. No test framework here."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.ids import BlockName, SlotIndex, new_incarnation
from headrace.kvstore.base import StoreClient
from headrace.kvstore.checksum import digest
from headrace.kvstore.client import NodeClient
from headrace.kvstore.fake import FakeClient, FakeNode
from headrace.kvstore.layout import SlabLayout
from headrace.kvstore.names import fingerprint
from headrace.messages import Hello

LAYOUT = SlabLayout(1, (0,), False, "tile656")
FINGERPRINT = fingerprint("test", LAYOUT)
SHM = Path("/dev/shm")
Block = tuple[BlockName, BlockName | None, int]


class FakeFixture:
    """The fake node behind the form that the suites use. `settle` plays the daemon's upkeep."""

    def __init__(self, slots: int = 8) -> None:
        self.slots = slots
        self.node = FakeNode(slots=slots, slot_bytes=LAYOUT.slot_bytes, lease_s=1.0, grace_s=0.3)
        self.clients: list[FakeClient] = []

    def client(self, name: str = "decode-0.0", role: str = "decode") -> FakeClient:
        self.clients.append(self.node.client(name, role))
        return self.clients[-1]

    def settle(self, done: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Let the node's upkeep run until `done()`; AssertionError when the time is over first."""
        end = time.monotonic() + timeout_s
        while not done() and time.monotonic() < end:
            self.node.tick()
            for client in self.clients:
                if client.lease_valid():
                    client.heartbeat()
            time.sleep(0.02)
        assert done(), f"not settled within {timeout_s} s"

    def vanish(self, client: FakeClient) -> None:
        client.vanish()

    def close(self) -> None:
        assert self.node.tier.check_integrity() == []


class DaemonFixture:
    """A real daemon process. `close` also checks that it ends in order and leaves nothing behind."""

    def __init__(
        self,
        directory: Path,
        slots: int = 8,
        lease_s: float = 1.0,
        name: str = "node-0",
        redis_url: str = "",
        layout: SlabLayout = LAYOUT,
        event_log: Path | None = None,
        settings: Sequence[str] = (),
    ) -> None:
        """`settings`: "store.field=value" each."""
        self.slots = slots
        self.layout = layout
        self.settings = settings
        self.socket = directory / "node.sock"
        self.name = f"hrtest-{os.getpid()}-{directory.name}"
        self.lease_s = lease_s
        self.node_name = name
        self.redis_url = redis_url
        self.event_log = event_log
        self.clients: list[NodeClient] = []
        self.process = self.start()

    def start(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "headrace.kvstore.daemon", "--socket", str(self.socket)]
        command += [
            "--layout",
            json.dumps(dataclasses.asdict(self.layout)),
            "--fingerprint",
            FINGERPRINT.hex(),
            "--lease-s",
            str(self.lease_s),
        ]
        command += ["--host-bytes", str(self.slots * self.layout.slot_bytes), "--shm-dir", str(SHM)]
        command += ["--name", self.node_name, "--arena-prefix", self.name, "--redis", self.redis_url]
        command += ["--event-log", str(self.event_log or "")]
        for setting in self.settings:
            command += ["--set", setting]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the daemon ended with {self.process.wait()}"
        self.incarnation = json.loads(line)["incarnation"]
        return self.process

    def hello(self, name: str, role: str) -> Hello:
        return Hello(name=name, role=role, incarnation=new_incarnation(), fingerprint=FINGERPRINT)

    def client(self, name: str = "decode-0.0", role: str = "decode") -> NodeClient:
        self.clients.append(NodeClient(f"unix:{self.socket}", self.hello(name, role), self.layout))
        return self.clients[-1]

    def settle(self, done: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Wait until `done()`; AssertionError when the time is over first."""
        end = time.monotonic() + timeout_s
        while not done() and time.monotonic() < end:
            time.sleep(0.02)
        assert done(), f"not settled within {timeout_s} s"

    def vanish(self, client: NodeClient) -> None:
        """Break the connection without a goodbye, as a dying process does."""
        client.hang_up()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def files(self) -> list[Path]:
        return list(SHM.glob(f"{self.name}-*"))

    def close(self) -> None:
        for client in self.clients:
            client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            code = self.process.wait(5)
            assert code == 0, f"the daemon ended with {code}"
            assert not self.socket.exists()
            assert self.files() == []
        for path in self.files():
            path.unlink()


def blocks_of(names: Sequence[BlockName], start: int = 0, stop: int | None = None) -> list[Block]:
    """(name, parent, depth) of a part of a chain, as `begin_put` takes them."""
    stop = len(names) if stop is None else stop
    return [(names[i], names[i - 1] if i else None, i) for i in range(start, stop)]


def put(
    client: StoreClient,
    names: Sequence[BlockName],
    start: int = 0,
    stop: int | None = None,
    *,
    keep_lease: bool = False,
) -> list[int]:
    """Write blocks of a chain, each with the content of its depth; returns the outcomes of `begin_put`."""
    blocks = blocks_of(names, start, stop)
    outcomes, writes = client.begin_put(blocks), []
    for (name, _parent, depth), slot in zip(blocks, outcomes):
        if slot >= 0:
            payload = content(depth)
            client.slot_view(SlotIndex(slot))[: LAYOUT.payload_bytes] = payload
            writes.append((name, SlotIndex(slot), digest(payload)))
    client.commit_put(writes, keep_lease=keep_lease)
    return outcomes


def put_bytes(client: StoreClient, names: Sequence[BlockName], payload: bytes) -> None:
    """Write all blocks of a chain with one content. AssertionError if one does not fit."""
    taken, writes = digest(payload), []
    for name, slot in zip(names, client.begin_put(blocks_of(names))):
        assert slot >= 0, f"no room: {slot}"
        client.slot_view(SlotIndex(slot))[: len(payload)] = payload
        writes.append((name, SlotIndex(slot), taken))
    client.commit_put(writes, keep_lease=False)


def content(depth: int) -> bytes:
    return bytes([depth % 251]) * LAYOUT.payload_bytes
