"""Speed of the router against pools that answer at once: `python -m headrace.lab.bench_router --help`.

The pools are fakes in a process of their own, the router in another, the client in this one; all speak over loopback.
What a request takes is then the router's doing, the fakes' and the client's: "direct" rows are the same client against
a bare HTTP server that answers a constant, measured in turn, so that a busy machine slows both.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import multiprocessing as mp
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import psutil

from headrace.config import from_dict
from headrace.ids import BlockName, new_incarnation
from headrace.kvstore.directory.index import PlaceIndex
from headrace.lab.report.files import to_json, to_text
from headrace.router.assemble import Backends, assemble
from headrace.router.fake import FakeDecode, FakePrefill, FakeStore
from headrace.router.http.server import HttpServer
from headrace.router.served import load_served_model

Row = dict[str, Any]
WORDS = [
    "def ",
    "return ",
    "self.",
    "value",
    " = ",
    "(",
    ")",
    "\n    ",
    "for ",
    " in ",
    "range",
    "import ",
    "if ",
    ":\n",
]
COLUMNS = ("what", "value", "unit", "note")


# --- processes ------------------------------------------------------------------------------------------------------


def run_pools(pipe: Connection, groups: int, ranks: int) -> None:
    async def run() -> None:
        store = FakeStore()
        prefill = [
            FakePrefill(name=f"prefill-{g}", store=store, token="t", device_blocks=1 << 20) for g in range(groups)
        ]
        decode = [FakeDecode(name=f"decode-0.{r}", store=store, token="t", device_blocks=1 << 20) for r in range(ranks)]
        boxes: list[FakePrefill | FakeDecode] = [*prefill, *decode]
        for box in boxes:
            await box.start()
        pipe.send([{b.name: b.address for b in prefill}, {b.name: b.address for b in decode}])
        while not pipe.poll():
            await asyncio.sleep(0.2)
            for box in boxes:
                box.seen.clear()
        for box in boxes:
            await box.stop()

    asyncio.run(run())


def run_router(pipe: Connection, addresses: list[dict[str, str]]) -> None:
    async def run() -> None:
        config = from_dict({"router": {"port": 0, "max_inflight": 4096}, "decode": {"max_queued": 4096}})
        backends = Backends(
            prefill=addresses[0], decode=addresses[1], nodes={}, token="t", incarnation=new_incarnation()
        )
        model = dataclasses.replace(load_served_model(config), context_tokens=1 << 20)
        router = await assemble(config, model, FakeStore(), backends)
        server = HttpServer(router.app, config.router)
        pipe.send(await server.start())
        while not pipe.poll():
            await asyncio.sleep(0.2)
        await server.stop()
        await router.close()

    asyncio.run(run())


def run_bare(pipe: Connection) -> None:
    """Answers every request on a connection with a constant."""
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                await reader.readexactly(length)
                writer.write(answer)

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 24)
        pipe.send(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        while not pipe.poll():
            await asyncio.sleep(0.2)

    asyncio.run(run())


@contextlib.contextmanager
def process(target: Callable[..., None], *args: Any) -> Iterator[tuple[Any, int]]:
    """(what it says first, its pid); it ends with the block."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=target, args=(theirs, *args), daemon=True)
    child.start()
    try:
        yield ours.recv(), child.pid or 0
    finally:
        ours.send(None)
        child.join(10)
        if child.is_alive():
            child.terminate()


# --- client ---------------------------------------------------------------------------------------------------------


class Lines:
    """Keep-alive connections to one server."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._address = host, int(port)
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, path: str, body: bytes) -> tuple[float, bytes]:
        """(seconds until the whole answer, its body)."""
        reader, writer = self._free.pop() if self._free else await asyncio.open_connection(*self._address)
        began = time.perf_counter()
        writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(body)) + body)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        answer = await reader.readexactly(length)
        took = time.perf_counter() - began
        self._free.append((reader, writer))
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{head[:40]!r} {answer[:300]!r}")
        return took, answer

    async def get(self, path: str) -> Any:
        reader, writer = await asyncio.open_connection(*self._address)
        writer.write(b"GET %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % path.encode())
        raw = await reader.read()
        writer.close()
        return json.loads(raw.partition(b"\r\n\r\n")[2])


async def offered(lines: Lines, path: str, bodies: list[bytes], rate: float) -> list[float]:
    """Seconds of each request; they leave at `rate` a second whatever became of those before."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    tasks = []
    for i, body in enumerate(bodies):
        await asyncio.sleep(max(0.0, began + i / rate - loop.time()))
        tasks.append(asyncio.create_task(lines.post(path, body)))
    return [took for took, _ in await asyncio.gather(*tasks)]


def code(draw: random.Random, tokens: int) -> str:
    return "".join(draw.choice(WORDS) for _ in range(tokens))


def percentiles(what: str, seconds: list[float], note: str) -> Iterator[Row]:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    for name, value in (("p50", cuts[49]), ("p99", cuts[98])):
        yield {"what": f"{what}, {name}", "value": round(value * 1e3, 2), "unit": "ms", "note": note}


# --- measurements ---------------------------------------------------------------------------------------------------


async def bench_load(router: Lines, bare: Lines, seconds: float) -> AsyncIterator[Row]:
    """Whole requests of one token: 2K prompts that nobody has seen, 128K prompts with 90% of an earlier one."""
    draw = random.Random(1)
    for tokens, shared, rates in ((2048, 0, (1, 50, 300)), (131_072, 117_964, (1, 5, 20))):
        begin = code(draw, shared)
        for rate in rates:
            count = max(10, int(rate * seconds))
            bodies = [
                json.dumps(
                    {
                        "messages": [
                            {"role": "user", "content": begin},
                            {"role": "assistant", "content": "ok"},
                            {"role": "user", "content": f"{i} {code(draw, tokens - shared)}"},
                        ],
                        "max_tokens": 1,
                    }
                ).encode()
                for i in range(count)
            ]
            if shared:
                first = json.loads(bodies[0])
                first["messages"] = first["messages"][:1]
                await router.post("/v1/chat/completions", json.dumps(first).encode())
            what = f"{tokens // 1024}K tokens, {rate}/s"
            plain = await offered(bare, "/", bodies, rate)
            took = await offered(router, "/v1/chat/completions", bodies, rate)
            note = f"{count} requests of {len(bodies[0]) >> 10} KB"
            for row in (*percentiles(what, took, note), *percentiles(f"{what}, direct", plain, note)):
                yield row


async def bench_turn(router: Lines, turns: int) -> AsyncIterator[Row]:
    """A turn that adds 1 KB to a conversation of 500 KB: what the router itself spends before the prompt is sent."""
    draw = random.Random(2)
    messages: list[dict[str, str]] = []
    while sum(len(m["content"]) for m in messages) < 500_000:
        messages += [{"role": "user", "content": code(draw, 900)}, {"role": "assistant", "content": code(draw, 300)}]
    ready, placed, whole = [], [], []
    for turn in range(turns + 1):
        messages.append({"role": "user", "content": f"turn {turn}: {code(draw, 220)}"})
        body = json.dumps({"messages": messages, "max_tokens": 1}).encode()
        took, answer = await router.post("/v1/chat/completions", body)
        found = await router.get(f"/requests/{json.loads(answer)['id']}")
        messages.append({"role": "assistant", "content": "ok"})
        await asyncio.sleep(0.1)  # a client does something between turns; the answer is remembered meanwhile
        if turn:  # the first one tokenises everything
            ready.append(found["ready_s"])
            placed.append(found["attempts"][0]["at_s"])
            whole.append(took)
    note = f"{len(body) >> 10} KB body, {found['prompt_tokens']} tokens, {turns} turns"
    for what, values in (("tokenised", ready), ("placed", placed), ("whole request", whole)):
        for row in percentiles(f"1 KB turn on 500 KB, {what}", values, note):
            yield row


async def bench_memory(router: Lines, pid: int, requests: int) -> AsyncIterator[Row]:
    """Resident memory over distinct requests, after the bounded caches are full."""
    draw = random.Random(3)

    async def some(count: int) -> None:
        bodies = [json.dumps({"prompt": code(draw, 40), "max_tokens": 1}).encode() for _ in range(count)]
        for i in range(0, count, 64):
            await asyncio.gather(*(router.post("/v1/completions", body) for body in bodies[i : i + 64]))

    await some(5000)
    before = psutil.Process(pid).memory_info().rss
    began = time.perf_counter()
    await some(requests)
    rate = requests / (time.perf_counter() - began)
    grown = psutil.Process(pid).memory_info().rss - before
    yield {"what": "requests, 64 at a time", "value": round(rate), "unit": "1/s", "note": "40-token prompts, 1 token"}
    yield {
        "what": f"RSS grown over {requests} distinct requests", "value": round(grown / 2**20, 1), "unit": "MiB",
        "note": f"to {before + grown >> 20} MiB",
    }  # fmt: skip


def bench_index(blocks: int) -> Iterator[Row]:
    index = PlaceIndex()
    names = [BlockName(i.to_bytes(32, "little")) for i in range(blocks)]
    began = time.perf_counter()
    for i in range(0, blocks, 4096):
        index.change(("node-0", "host"), names[i : i + 4096], [])
    rate = blocks / (time.perf_counter() - began)
    prompt = names[blocks // 2 : blocks // 2 + 2048]
    times = []
    for _ in range(50):
        began = time.perf_counter()
        index.lookup(prompt)
        times.append(time.perf_counter() - began)
    yield {"what": "index: block events taken", "value": round(rate), "unit": "1/s", "note": f"up to {blocks} blocks"}
    yield {
        "what": "index: match of 2,048 blocks", "value": round(statistics.median(times) * 1e3, 3), "unit": "ms",
        "note": f"among {len(index)} blocks",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="load,turn,memory,index")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each offered load")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--blocks", type=int, default=10_000_000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    wanted = args.only.split(",")
    rows: list[Row] = []

    async def measure(url: str, bare: str, pid: int) -> None:
        lines = Lines(url)
        if "turn" in wanted:
            rows.extend([row async for row in bench_turn(lines, args.turns)])
        if "load" in wanted:
            rows.extend([row async for row in bench_load(lines, Lines(bare), args.seconds)])
        if "memory" in wanted:
            rows.extend([row async for row in bench_memory(lines, pid, args.requests)])

    if set(wanted) & {"load", "turn", "memory"}:
        with (
            process(run_pools, 4, 4) as (addresses, _),
            process(run_bare) as (bare, _),
            process(run_router, addresses) as (url, pid),
        ):
            asyncio.run(measure(url, bare, pid))
    if "index" in wanted:
        rows.extend(bench_index(args.blocks))
    print(to_json(rows, []) if args.json else to_text(rows, COLUMNS))


if __name__ == "__main__":
    main()
