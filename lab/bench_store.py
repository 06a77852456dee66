"""Speed of the store beside yardsticks measured in the same run: `python -m headrace.lab.bench_store --help`.

The daemon is a process of its own, the client this one, slabs are GLM-5.2's. A yardstick and what it measures
alternate, so that a busy machine slows both. Figures are medians.
"""

import argparse
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from headrace.ids import BlockName, SlotIndex
from headrace.kvstore.base import StoreClient
from headrace.kvstore.checksum import digest
from headrace.kvstore.directory.index import PlaceIndex
from headrace.kvstore.fake import FakeNode
from headrace.kvstore.layout import SlabLayout
from headrace.kvstore.names import NameChain, chain, namespace
from headrace.kvstore.pool import DevicePool
from headrace.kvstore.testing import LAYOUT, DaemonFixture, blocks_of
from headrace.kvstore.transfer import load_slabs, store_slabs
from headrace.lab.bench_tiers import bench_disk, bench_peer
from headrace.lab.report.files import to_json, to_text
from headrace.lab.report.rows import Row, row

GLM = SlabLayout(78, (0, 1, 2, *range(6, 78, 4)), True, "tile656")
ROOT = namespace(bytes(32), "bench")
PROMPT_BLOCKS = 2048
SLABS = 64
"""Slabs of one put or get: about 4,000 tokens."""
COLUMNS = ("what", "value", "unit", "goal", "yardstick", "ratio")


def medians(rounds: int, *calls: Callable[[], object]) -> list[float]:
    """Median seconds of each call; the calls take turns."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, taken in zip(calls, seconds):
            began = time.perf_counter()
            call()
            taken.append(time.perf_counter() - began)
    return [statistics.median(taken) for taken in seconds]


def bench_names(rounds: int) -> Iterator[Row]:
    tokens = np.arange(64 * PROMPT_BLOCKS, dtype="<u4")
    grown = NameChain(ROOT)
    grown.extend(tokens)
    news = np.arange(1000, dtype="<u4")
    whole, turn = medians(rounds, lambda: chain(ROOT, tokens), lambda: grown.copy().extend(news))
    yield row("names of 131,072 tokens", whole * 1e3, "ms", "≤ 5")
    yield row("names of a turn of 1,000 tokens more", turn * 1e3, "ms", "≤ 0.2")


@contextmanager
def daemon(slots: int, layout: SlabLayout) -> Iterator[StoreClient]:
    with tempfile.TemporaryDirectory() as directory:
        node = DaemonFixture(Path(directory), slots=slots, lease_s=10.0, layout=layout)
        try:
            yield node.client()
        finally:
            node.close()


def fill(client: StoreClient, names: list[BlockName]) -> None:
    blocks = blocks_of(names)
    writes = zip(blocks, client.begin_put(blocks))
    client.commit_put([(block[0], SlotIndex(s), bytes(16)) for block, s in writes], keep_lease=False)


def bench_calls(rounds: int) -> Iterator[Row]:
    names = chain(ROOT, np.arange(64 * PROMPT_BLOCKS, dtype="<u4"))
    with daemon(PROMPT_BLOCKS, LAYOUT) as client:
        fill(client, names)
        empty, match, lease, _, both, _ = medians(
            rounds,
            lambda: client.match([]),
            lambda: client.match(names),
            lambda: client.lease(names),
            lambda: client.release(names),
            lambda: client.lease_leading(names),
            lambda: client.release(names),
        )
    yield row("an empty call", empty * 1e3, "ms")
    yield row("match + lease of 2,048 blocks, one call", both * 1e3, "ms", "≤ 2")
    yield row("match, then lease, of 2,048 blocks", (match + lease) * 1e3, "ms")


def bench_index(rounds: int) -> Iterator[Row]:
    prompts = 32
    blocks = prompts * PROMPT_BLOCKS
    chains = [chain(namespace(bytes(32), f"{i}"), np.arange(64 * PROMPT_BLOCKS, dtype="<u4")) for i in range(prompts)]
    names = chains[0]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    node = FakeNode(slots=blocks, slot_bytes=1)
    client = node.client()
    for prompt in chains:
        fill(client, prompt)
    used = tracemalloc.get_traced_memory()[0] - before
    place = PlaceIndex()
    before = tracemalloc.get_traced_memory()[0]
    place.apply("node-0", node.core.events.snapshot())
    routed = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()

    def lookups() -> None:
        for name in names:
            node.tier.match([name])

    (seconds,) = medians(rounds, lookups)
    yield row("single-block lookups in process", len(names) / seconds, "1/s", "≥ 100,000")
    yield row("memory of host tier and event log", used / blocks, "B a block", "≤ 400")
    yield row("memory of a router's index, one place", routed / blocks, "B a block", "≤ 400")


def bench_slabs(rounds: int) -> Iterator[Row]:
    """Puts and gets of SLABS slabs. The copies are also timed without the calls to the daemon around them: on a busy
    machine those wait for a processor."""
    torch.set_num_threads(1)
    pool = DevicePool(GLM, SLABS, "cpu")
    pool.latent.random_()
    pool.index.random_()
    payload = GLM.payload_bytes
    source, target = (torch.empty(SLABS, payload, dtype=torch.uint8).random_() for _ in range(2))
    names = chain(ROOT, np.arange(64 * SLABS, dtype="<u4"))
    every = list(range(SLABS))
    copied: dict[str, list[float]] = {"put": [], "get": []}

    def memcpy() -> None:
        for i in every:
            target[i].copy_(source[i])

    with daemon(SLABS, GLM) as client:

        def copy(kind: str, call: Callable[..., None], slots: Sequence[int]) -> list[memoryview]:
            views = [client.slot_view(SlotIndex(slot))[:payload] for slot in slots]
            began = time.perf_counter()
            call(pool, every, views)
            copied[kind].append(time.perf_counter() - began)
            return views

        def put(digests: bool) -> None:
            slots = client.begin_put(blocks_of(names))
            views = copy("put", store_slabs, slots)
            writes = [(n, SlotIndex(s), digest(v) if digests else bytes(16)) for n, s, v in zip(names, slots, views)]
            client.commit_put(writes, keep_lease=False)

        def get() -> None:
            copy("get", load_slabs, [lease.slot for lease in client.lease_leading(names)])
            client.release(names)

        plain, _, stored, _, visible, loaded = medians(
            rounds,
            memcpy,
            lambda: client.drop(names),
            lambda: put(False),
            lambda: client.drop(names),
            lambda: put(True),
            get,
        )
    total = SLABS * payload / 1e9
    store, load = (statistics.median(copied[kind]) for kind in ("put", "get"))
    yield row("one memcpy of 3.5 MB slabs", total / plain, "GB/s")
    yield row("host put, its copies", total / store, "GB/s", "≥ 0.85", "memcpy", plain / store)
    yield row("host get, its copies", total / load, "GB/s", "≥ 0.85", "memcpy", plain / load)
    yield row("host put with its calls, no digest", total / stored, "GB/s", "≥ 0.85", "memcpy", plain / stored)
    yield row("host get with its calls", total / loaded, "GB/s", "≥ 0.85", "memcpy", plain / loaded)
    yield row("host put to visible, digest", total / visible, "GB/s", "", "memcpy", plain / visible)


SUITES = {
    "names": bench_names,
    "calls": bench_calls,
    "index": bench_index,
    "slabs": bench_slabs,
    "disk": bench_disk,
    "peer": bench_peer,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="headrace.lab.bench_store", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", default=[], help=f"of {', '.join(SUITES)}; all")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    unknown = set(args.suites) - set(SUITES)
    if unknown:
        parser.error(f"no suite {', '.join(sorted(unknown))}; known: {', '.join(SUITES)}")
    rows = [found for suite in args.suites or SUITES for found in SUITES[suite](args.rounds)]
    print(to_json(rows, []) if args.json else to_text(rows, COLUMNS))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
