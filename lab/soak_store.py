"""Soak of the store: two nodes with host and disk tiers that also fetch from each other, under clients that put, abort,
read and check every byte, while clients and daemons are killed with SIGKILL at random. Run it with
`python -m headrace.lab.soak_store --help`.

It ends well if no client ever saw a wrong byte, every counter balances once all is quiet (no lease, no half-written or
quarantined slot, each slot free or holding a block, on disk too), and every block that is still there, in any tier, is
byte-equal to what was written and to its digest.
"""

import argparse
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

from headrace.kvstore.disk.file import slot_start
from headrace.kvstore.testing import LAYOUT, DaemonFixture
from headrace.lab.soak_client import CHAINS, WRONG, WrongBytes, bring_up, read

NODES = ("node-a", "node-b")
CLIENTS = 2
"""A node."""
HOST_SLOTS, DISK_SLOTS = 60, 150
QUIET_S = 15.0


class Client:
    """One client process; it is started again whenever it was killed."""

    def __init__(self, node: DaemonFixture, home: Path, name: str) -> None:
        self._node, self._home, self._name = node, home, name
        self._runs = 0
        self.start()

    def start(self) -> None:
        self._runs += 1
        tally = self._home / f"{self._name}.{self._runs}.json"
        command = [sys.executable, "-m", "headrace.lab.soak_client", f"unix:{self._node.socket}", self._name]
        self._process = subprocess.Popen(
            [*command, str(zlib.crc32(tally.name.encode())), str(tally)], stdout=subprocess.PIPE
        )

    def ready(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.readline()

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def end(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(30)


class Soak:
    def __init__(self, home: Path, seed: int) -> None:
        self._dice = random.Random(seed)
        self.events: Counter[str] = Counter()
        self.problems: list[str] = []
        self.home = home
        self.nodes = _nodes(home)
        self.clients = [
            Client(node, home, f"client-{number}-{i}") for number, node in enumerate(self.nodes) for i in range(CLIENTS)
        ]

    def run(self, seconds: float, log_s: float) -> None:
        end, report = time.monotonic() + seconds, time.monotonic() + log_s
        while time.monotonic() < end and not self.problems:
            time.sleep(self._dice.uniform(0.2, 1.5))
            self._disturb()
            for client in self.clients:
                if client.code is not None:
                    wrong = "saw a wrong byte" if client.code == WRONG else f"ended with {client.code}"
                    self.problems.append(f"a client {wrong}")
            if time.monotonic() > report:
                report += log_s
                print(json.dumps({"left_s": round(end - time.monotonic()), **self.tally()}), flush=True)

    def _disturb(self) -> None:
        luck = self._dice.random()
        if luck < 0.35:
            client = self._dice.choice(self.clients)
            client.kill()
            client.start()
            self.events["clients killed"] += 1
        elif luck < 0.55:
            node = self._dice.choice(self.nodes)
            node.kill()
            time.sleep(self._dice.uniform(0.0, 0.5))
            node.start()
            self.events["daemons killed"] += 1

    def finish(self) -> None:
        """Let all come to rest, then look at everything."""
        for client in self.clients:
            client.ready()
            code = client.end()
            if code:
                self.problems.append(f"a client ended with {code}")
        for node in self.nodes:
            watcher = node.client("watcher", "prefill")
            self._wait_for_quiet(node.node_name, watcher)
            found: Counter[str] = Counter()
            try:
                for names in CHAINS:
                    bring_up(watcher, names)
                    read(watcher, names, found)
            except WrongBytes as error:
                self.problems.append(f"{node.node_name}: {error}")
            self.events["blocks checked at the end"] += sum(found.values()) - found["misses"]
            self.events["torn blocks found on disk"] += int(watcher.stats()["disk_checksum_failures_total"])

    def _wait_for_quiet(self, name: str, watcher: Any) -> None:
        end, wrong = time.monotonic() + QUIET_S, ["never looked"]
        while wrong and time.monotonic() < end:
            time.sleep(0.1)
            wrong = _unbalanced(watcher.stats())
        self.problems += [f"{name}: {line}" for line in wrong]

    def close(self) -> None:
        for client in self.clients:
            if client.code is None:
                client.kill()
        for node in self.nodes:
            node.close()

    def tally(self) -> dict[str, int]:
        total = Counter(self.events)
        for path in self.home.glob("client-*.json"):
            total.update(json.loads(path.read_text()))
        return dict(sorted(total.items()))


def _unbalanced(stats: dict[str, float]) -> list[str]:
    idle = ["host_leased", "host_writing", "host_quarantined", "promoting", "peer_out_tickets"]
    idle += ["disk_writing", "disk_reading", "disk_quarantined", "disk_queue_running"]
    wrong = [f"{key} is {stats[key]:.0f}" for key in idle if stats[key]]
    for tier in ("host", "disk"):
        free, ready, slots = (stats[f"{tier}_{key}"] for key in ("free", "ready", "slots"))
        if free + ready != slots:
            wrong.append(f"{tier}: free {free:.0f} + ready {ready:.0f} != slots {slots:.0f}")
    if not stats["disk_on"]:
        wrong.append("the disk tier is off")
    return wrong


def _nodes(home: Path) -> list[DaemonFixture]:
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in NODES]
    ports = [listener.getsockname()[1] for listener in taken]
    for listener in taken:
        listener.close()
    peers = ",".join(f"{name}=127.0.0.1:{port}" for name, port in zip(NODES, ports))
    nodes = []
    for name, port in zip(NODES, ports):
        (home / name).mkdir()
        settings = [
            f"store.disk_bytes={slot_start(DISK_SLOTS, LAYOUT.slot_bytes)}",
            f"store.disk_dir={home / name}",
            f"store.disk_write_policy={'through' if name == NODES[0] else 'back'}",
            f"store.peer_listen=127.0.0.1:{port}",
            f"store.peers=[{peers}]",
            "store.peer_token=soak",
            "store.peer_retry_s=1",
        ]
        nodes.append(DaemonFixture(home / name, slots=HOST_SLOTS, lease_s=2.0, name=name, settings=settings))
    return nodes


def soak(seconds: float, seed: int, home: Path, log_s: float = 60.0) -> dict[str, Any]:
    """Run it. `home`: an empty directory for the disk tiers. Returns tallies and `problems`, sentences."""
    work = Soak(home, seed)
    try:
        work.run(seconds, log_s)
        work.finish()
    finally:
        work.close()
    return {"seconds": seconds, **work.tally(), "problems": work.problems}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="headrace.lab.soak_store", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", type=Path, help="where the disk tiers lie; default: a temporary one")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=args.directory) as home:
        report = soak(args.seconds, args.seed, Path(home))
    print(json.dumps(report, indent=2))
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
