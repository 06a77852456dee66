"""One client process of `lab.soak_store`: puts, aborts, reads and checks blocks until SIGTERM, through restarts of its
daemon. The content of a block follows from its name, so any wrong byte is noticed: exit status 3 then.

    python -m headrace.lab.soak_client <endpoint> <name> <seed> <tally file>
"""

import contextlib
import json
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from headrace.errors import DaemonUnavailable, LeaseExpired, StoreError
from headrace.ids import BlockName, SlotIndex, new_incarnation
from headrace.kvstore.base import StoreClient
from headrace.kvstore.checksum import digest
from headrace.kvstore.client import NodeClient
from headrace.kvstore.names import chain, namespace
from headrace.kvstore.testing import FINGERPRINT, LAYOUT
from headrace.messages import Hello

SIZE = LAYOUT.payload_bytes
CHAIN_BLOCKS = 10
CHAINS = [chain(namespace(FINGERPRINT, f"soak {i}"), range(64 * CHAIN_BLOCKS)) for i in range(30)]
WAIT_S = 1.0
PAUSE_S = 0.002
SAVE_S = 0.5
DIAL_S = 15.0
WRONG = 3


class WrongBytes(Exception):
    """A served block is not what was written."""


def content(name: BlockName) -> bytes:
    return (name * (SIZE // len(name) + 1))[:SIZE]


def bring_up(client: StoreClient, names: Sequence[BlockName]) -> None:
    """Wait, not for ever, for what lower tiers and other nodes have."""
    end = time.monotonic() + WAIT_S
    while client.promote(names).coming and time.monotonic() < end:
        time.sleep(PAUSE_S)


def read(client: StoreClient, names: Sequence[BlockName], tally: Counter[str]) -> None:
    """Lease, check every byte, release. Raises WrongBytes."""
    for lease in client.lease(names):
        if lease is None:
            tally["misses"] += 1
            continue
        got = bytes(client.slot_view(lease.slot)[:SIZE])
        if not client.lease_valid():
            tally["expired"] += 1  # Never used, so never wrong.
        elif got != content(lease.name) or digest(got) != lease.digest:
            raise WrongBytes(f"{lease.name.hex()} in slot {lease.slot}, tier {lease.tier}")
        else:
            tally[f"read from {lease.tier}"] += 1
    client.release(names)


def put(client: StoreClient, names: Sequence[BlockName], dice: random.Random, tally: Counter[str]) -> None:
    blocks = [(name, names[i - 1] if i else None, i) for i, name in enumerate(names)]
    writes = []
    for (name, _, _), slot in zip(blocks, client.begin_put(blocks)):
        if slot >= 0:
            view, data = client.slot_view(SlotIndex(slot)), content(name)
            for at in range(0, SIZE, 16384):  # In pieces: a kill leaves a torn block.
                view[at : min(at + 16384, SIZE)] = data[at : at + 16384]
            writes.append((name, SlotIndex(slot), digest(view[:SIZE])))
    if dice.random() < 0.15:
        client.abort_put([(name, slot) for name, slot, _ in writes])
        tally["aborts"] += 1
        return
    keep = dice.random() < 0.3
    client.commit_put(writes, keep_lease=keep)
    tally["puts"] += len(writes)
    if keep:
        client.release([name for name, _, _ in writes])


def turn(client: StoreClient, dice: random.Random, tally: Counter[str]) -> None:
    """One request: a prompt that hits what it can and publishes the rest."""
    # Some conversations go on, most are forgotten: squares of a uniform number favour the first chains.
    names = CHAINS[int(len(CHAINS) * dice.random() ** 2)][: dice.randrange(1, CHAIN_BLOCKS + 1)]
    bring_up(client, names)
    read(client, names, tally)
    if dice.random() < 0.7:
        put(client, names, dice, tally)
    if dice.random() < 0.02:
        client.drop(names[-1:])
        tally["drops"] += 1


def main(endpoint: str, name: str, seed: str, path: str) -> int:
    dice, stop, tally = random.Random(int(seed)), threading.Event(), Counter[str]()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    hello = Hello(name=name, role="prefill", incarnation=new_incarnation(), fingerprint=FINGERPRINT)
    client, saved_s = _dial(endpoint, hello), 0.0
    print("ready", flush=True)
    while not stop.is_set():
        try:
            turn(client, dice, tally)
        except DaemonUnavailable:
            tally["daemon lost"] += 1
            time.sleep(0.05)
            with contextlib.suppress(StoreError):
                client.reconnect()
        except LeaseExpired:
            tally["lease expired"] += 1
        except WrongBytes as error:
            print(error, file=sys.stderr, flush=True)
            return WRONG
        if time.monotonic() - saved_s > SAVE_S:
            saved_s = time.monotonic()
            _save(Path(path), tally)
    client.close()
    _save(Path(path), tally)
    return 0


def _dial(endpoint: str, hello: Hello) -> NodeClient:
    """The daemon may just be starting again."""
    end = time.monotonic() + DIAL_S
    while True:
        try:
            return NodeClient(endpoint, hello, LAYOUT)
        except DaemonUnavailable:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def _save(path: Path, tally: Counter[str]) -> None:
    """Whole or not at all: this process may be killed any time."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(tally))
    fresh.replace(path)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
