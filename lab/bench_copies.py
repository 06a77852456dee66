"""Slab copies between pinned host memory and a GPU, beside the plain pinned copy of the same run:
`python -m headrace.lab.bench_copies --help`. Needs a GPU. Slabs are GLM-5.2's.
"""

import argparse
import itertools
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headrace.ids import new_incarnation
from headrace.kvstore.arena import Arena
from headrace.kvstore.copiers.pinning import Pinning
from headrace.kvstore.pool import DevicePool
from headrace.kvstore.transfer import begin_load, load_slabs, store_slabs
from headrace.lab.bench_store import COLUMNS, GLM, Row, row
from headrace.lab.report.files import to_json, to_text

LAYERS = 78


class Bench:
    """`host_slabs` slabs of pinned shared memory; restores of more reuse them in turn. `slots` device slots."""

    def __init__(self, host_slabs: int, slots: int, shm_dir: Path) -> None:
        began = time.perf_counter()
        self.arena = Arena.create(
            shm_dir, "bench-copies", host_bytes=host_slabs * GLM.slot_bytes, slot_bytes=GLM.slot_bytes,
            owner=new_incarnation(),
        )  # fmt: skip
        self.populate_s = time.perf_counter() - began
        self.pinning = Pinning()
        began = time.perf_counter()
        self.pinning.mapped(self.arena.region(), GLM.slot_bytes, lambda: None)
        self.pin_s = time.perf_counter() - began
        self.pool = DevicePool(GLM, slots, "cuda")
        self.views = [self.arena.slot(i)[: GLM.payload_bytes] for i in range(host_slabs)]

    def part(self, count: int, start: int = 0) -> tuple[list[int], list[memoryview]]:
        """Device slots and slabs of `count` blocks."""
        return [(start + i) % self.pool.slots for i in range(count)], [
            self.views[(start + i) % len(self.views)] for i in range(count)
        ]

    def close(self) -> None:
        self.pinning.unmapping(self.arena.region())
        self.views = []
        self.arena.close()


def seconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def peaks(bench: Bench, size: int) -> tuple[float, float]:
    """GB/s of one plain pinned copy of `size` bytes, to the device and back; best of seven."""
    host = torch.frombuffer(bench.arena.region(), dtype=torch.uint8, count=size)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    there = min(seconds(lambda: device.copy_(host, non_blocking=True)) for _ in range(7))
    back = min(seconds(lambda: host.copy_(device, non_blocking=True)) for _ in range(7))
    return size / 1e9 / there, size / 1e9 / back


def one_way(bench: Bench, count: int, there: float, back: float) -> list[Row]:
    slots, views = bench.part(count)
    size = count * GLM.payload_bytes / 1e9
    load = statistics.median(seconds(lambda: load_slabs(bench.pool, slots, views)) for _ in range(3))
    store = statistics.median(seconds(lambda: store_slabs(bench.pool, slots, views)) for _ in range(3))
    return [
        row(f"restore of {count} slabs", size / load, "GB/s", "≥ 0.92", "pinned copy", size / load / there),
        row(f"store of {count} slabs", size / store, "GB/s", "", "pinned copy", size / store / back),
    ]


def both_ways(bench: Bench, count: int, there: float, back: float) -> list[Row]:
    half = min(count, bench.pool.slots // 2, len(bench.views) // 2)
    down, up = bench.part(half), bench.part(half, half)
    took: dict[str, float] = {}

    def run(name: str, call: Callable[..., None], part: tuple[list[int], list[memoryview]]) -> None:
        barrier.wait()
        began = time.perf_counter()
        for _ in range(3):
            call(bench.pool, *part)
        took[name] = (time.perf_counter() - began) / 3

    barrier = threading.Barrier(2)
    threads = [
        threading.Thread(target=run, args=("restore", load_slabs, down)),
        threading.Thread(target=run, args=("store", store_slabs, up)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    size = half * GLM.payload_bytes / 1e9
    return [
        row(f"{name} of {half} slabs, both directions at once", size / took[name], "GB/s", "≥ 0.80", "pinned copy",
            size / took[name] / peak)
        for name, peak in (("restore", there), ("store", back))
    ]  # fmt: skip


def layer_ahead(bench: Bench, count: int) -> list[Row]:
    """A restore and a forward pass of about the same length: whole blocks first, then layers as they come."""
    slots, views = bench.part(count)
    alone = statistics.median(seconds(lambda: load_slabs(bench.pool, slots, views)) for _ in range(3))
    work = LayerWork(alone / LAYERS)
    compute = statistics.median(seconds(lambda: work.run(bench.pool.latent)) for _ in range(3))
    rows = [row(f"restore of {count} slabs", alone * 1e3, "ms"), row("forward pass beside it", compute * 1e3, "ms")]

    copies: list[float] = []

    def together(groups: int) -> None:
        loading = begin_load(bench.pool, slots, views, groups)
        work.run(loading.latent)
        copies.append(loading.finish())

    whole = 0.0
    for groups in (1, 2, 4, 8, 16):
        copies.clear()
        total = statistics.median(seconds(partial(together, groups)) for _ in range(3))
        whole = whole or total
        rows.append(row(f"both, in {groups} groups of layers", total * 1e3, "ms", "", "whole blocks", total / whole))
        rows.append(row(f"  its copies, {groups} groups", statistics.median(copies) * 1e3, "ms"))
    return rows


class LayerWork:
    """Stands for a forward pass: per layer, matrix products that take about `layer_s`, after the layer's plane."""

    def __init__(self, layer_s: float) -> None:
        self._a = torch.randn((4096, 4096), device="cuda", dtype=torch.bfloat16)
        self._out = torch.empty_like(self._a)
        for _ in range(3):
            torch.matmul(self._a, self._a, out=self._out)
        one = min(seconds(lambda: torch.matmul(self._a, self._a, out=self._out)) for _ in range(20))
        self._times = max(1, round(layer_s / one))

    def run(self, planes: Any) -> None:
        for layer in range(LAYERS):
            planes[layer][0, 0, :1].clone()
            for _ in range(self._times):
                torch.matmul(self._a, self._a, out=self._out)


class DecodeStep:
    """Stands for a decode step: a captured graph of small-batch products over weights that fill HBM bandwidth."""

    def __init__(self, rows: int = 80, width: int = 6144, weights: int = 60, passes: int = 8) -> None:
        self._passes = passes
        self._weights = [torch.randn((width, width), device="cuda", dtype=torch.bfloat16) for _ in range(weights)]
        self._x = torch.randn((rows, width), device="cuda", dtype=torch.bfloat16)
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self._forward()
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph):
            self._forward()

    def _forward(self) -> None:
        x = self._x
        for weight in self._weights * self._passes:
            x = torch.nn.functional.rms_norm(x @ weight, (x.shape[1],))

    def times_ms(self, steps: int) -> list[float]:
        """GPU time of each step, by events."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        events[0].record()
        for event in events[1:]:
            self._graph.replay()
            event.record()
            event.synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


class Restores:
    """Restores of `count` blocks on a thread of their own, one after the other, while the context lasts. Not on
    `own_stream`, each first waits for the step that runs."""

    def __init__(self, bench: Bench, count: int, own_stream: bool = True) -> None:
        self._pool, self._part = bench.pool, bench.part(count)
        self._stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
        self.blocks, self.seconds = 0, 0.0

    def __enter__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._began = time.perf_counter()
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.seconds += time.perf_counter() - self._began

    def _run(self) -> None:
        with torch.cuda.stream(self._stream):
            while not self._stop.is_set():
                load_slabs(self._pool, *self._part)
                self.blocks += len(self._part[0])


def disturbance(bench: Bench, steps: int) -> list[Row]:
    """Step times without and with restores, in turns: p99 of all turns of a kind."""
    step = DecodeStep()
    step.times_ms(50)
    quiet: list[float] = []
    kinds = {
        "restores of 64 on their own stream": (Restores(bench, 64), list[float]()),
        "restores of 1 on the steps' stream": (Restores(bench, 1, own_stream=False), list[float]()),
    }
    for _ in range(4):
        quiet += step.times_ms(steps)
        for restores, busy in kinds.values():
            with restores:
                busy += step.times_ms(steps)
    rows = [row(f"decode step alone, {name}", at(quiet, pick), "ms") for name, pick in PICKS.items()]
    for kind, (restores, busy) in kinds.items():
        rows.append(row(kind, restores.blocks * GLM.payload_bytes / 1e9 / restores.seconds, "GB/s"))
        for name, pick in PICKS.items():
            beside, alone = at(busy, pick), at(quiet, pick)
            goal = "≤ 1.05" if name == "p99" else ""
            rows.append(row(f"  decode step beside them, {name}", beside, "ms", goal, "alone", beside / alone))
    return rows


PICKS = {"median": 0.5, "p99": 0.99}


def at(times: list[float], share: float) -> float:
    return sorted(times)[int(share * (len(times) - 1))]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="headrace.lab.bench_copies", description=__doc__)
    parser.add_argument("--slabs", type=int, default=4000, help="blocks of one restore, and slots of the pool")
    parser.add_argument("--host-slabs", type=int, default=1600, help="slabs of pinned memory; used in turn")
    parser.add_argument("--steps", type=int, default=150, help="decode steps of each of four turns")
    parser.add_argument("--shm-dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    bench = Bench(args.host_slabs, args.slabs, args.shm_dir)
    try:
        gigabytes = args.host_slabs * GLM.slot_bytes / 1e9
        rows = [
            row(f"pages for {gigabytes:.1f} GB", gigabytes / bench.populate_s, "GB/s"),
            row("pinning them", gigabytes / bench.pin_s, "GB/s"),
        ]
        there, back = peaks(bench, min(768 << 20, bench.arena.region().nbytes))
        rows += [row("pinned copy to the device", there, "GB/s"), row("pinned copy to the host", back, "GB/s")]
        rows += one_way(bench, args.slabs, there, back)
        rows += both_ways(bench, args.slabs, there, back)
        rows += layer_ahead(bench, args.slabs // 4)
        rows += disturbance(bench, args.steps)
    finally:
        bench.close()
    print(to_json(rows, []) if args.json else to_text(rows, COLUMNS))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
