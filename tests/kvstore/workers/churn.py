"""A client process that puts, reads and checks blocks until SIGTERM, through daemon restarts. The content of a block
follows from its name, so any wrong byte is noticed. Prints one JSON line at the end; exit status 3 for a wrong byte."""

import contextlib
import json
import random
import signal
import sys
import threading
import time

from headrace.errors import DaemonUnavailable, LeaseExpired, StoreError
from headrace.ids import new_incarnation
from headrace.kvstore.checksum import digest
from headrace.kvstore.client import NodeClient
from headrace.kvstore.names import chain, namespace, tenant_id
from headrace.kvstore.testing import FINGERPRINT, LAYOUT
from headrace.messages import Hello

SIZE = LAYOUT.payload_bytes
ROOTS = [namespace(FINGERPRINT, f"tenant {i}") for i in range(4)]
CHAINS = [chain(root, range(64 * 6)) for root in ROOTS]
TENANT = {names[0]: tenant_id(root) for root, names in zip(ROOTS, CHAINS)}


def content(name):
    return (name * (SIZE // len(name) + 1))[:SIZE]


def put(client, names, dice):
    start = dice.randrange(len(names))
    blocks = [(names[i], names[i - 1] if i else None, i) for i in range(start, len(names))]
    writes = []
    for (name, _, _), slot in zip(blocks, client.begin_put(blocks, TENANT[names[0]])):
        if slot >= 0:
            view = client.slot_view(slot)
            data = content(name)
            for at in range(0, SIZE, 4096):  # in pieces, so that a kill leaves a torn block
                view[at : min(at + 4096, SIZE)] = data[at : at + 4096]
            writes.append((name, slot, digest(view[:SIZE])))
    if dice.random() < 0.2:
        client.abort_put([(name, slot) for name, slot, _ in writes])
        return 0
    client.commit_put(writes, keep_lease=dice.random() < 0.3)
    return len(writes)


def read(client, names, dice, tally):
    for lease in client.lease(names):
        if lease is None:
            continue
        got = bytes(client.slot_view(lease.slot)[:SIZE])
        if not client.lease_valid():
            tally["expired"] += 1  # never used, so never wrong
        elif got != content(lease.name) or digest(got) != lease.digest:
            print(json.dumps({"wrong": lease.name.hex(), "slot": lease.slot}), flush=True)
            sys.exit(3)
        else:
            tally["reads"] += 1
    for _ in range(2):  # the second covers what a put has kept leased
        client.release(names)


def main(endpoint, name, seed):
    dice = random.Random(int(seed))
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    hello = Hello(name=name, role="decode", incarnation=new_incarnation(), fingerprint=FINGERPRINT)
    client = NodeClient(endpoint, hello, LAYOUT)
    print("ready", flush=True)
    tally = {"puts": 0, "reads": 0, "expired": 0, "lost": 0, "refused": 0}
    while not stop.is_set():
        names = dice.choice(CHAINS)
        try:
            if dice.random() < 0.5:
                tally["puts"] += put(client, names, dice)
            else:
                read(client, names, dice, tally)
        except DaemonUnavailable:
            tally["lost"] += 1
            time.sleep(0.05)
            with contextlib.suppress(StoreError):
                client.reconnect()
        except LeaseExpired:
            tally["refused"] += 1
    client.close()
    print(json.dumps(tally), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
