"""Malformed requests by the thousand: bodies, headers, encodings, nesting, slow and half-closed sockets. Never a 500,
nothing held afterwards, memory bounded, and honest requests are served meanwhile."""

import asyncio
import gc
import json
import random
from typing import Any

import httpx
import psutil
import pytest

from headrace.router.http import connection
from headrace.router.testing import Stack, running_stack

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 2, "logprobs": 1, "stop": ["a"], "logit_bias": {"5": 1}, "n": 1},
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 2, "tools": [TOOL], "tool_choice": "auto"},
    "/v1/responses": {"input": [USER], "max_output_tokens": 2, "text": {"format": {"type": "text"}}},
    "/v1/messages": {"messages": [USER], "max_tokens": 2, "system": [{"type": "text", "text": "x"}], "thinking": None},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5, 6]},
}
ODD: list[Any] = [
    None, True, -1, 0, 1e308, -(2**70), 2**63, "", "x", "\ud800", "\0", [], [[]], {}, {"": None}, {"type": "function"},
    {"$ref": "#/x"}, [1, "a", None], "9" * 5000, {"a": {"b": {"c": []}}}, float("nan"), float("inf"), [USER] * 3,
]  # fmt: skip
FINE = {100, 200, 400, 401, 403, 404, 405, 408, 413, 415, 429, 431}


def mutated(draw: random.Random, value: Any, depth: int = 0) -> Any:
    if draw.random() < 0.15 or depth > 6:
        return draw.choice(ODD)
    if isinstance(value, dict):
        found = {k: mutated(draw, v, depth + 1) for k, v in value.items() if draw.random() > 0.05}
        if draw.random() < 0.3:
            extra = [
                "stream",
                "n",
                "seed",
                "temperature",
                "tools",
                "tool_choice",
                "response_format",
                "stop",
                "reasoning",
            ]
            found[draw.choice([*extra, "guided_regex", "structured_outputs", "input", "min_tokens"])] = draw.choice(ODD)
        return found
    if isinstance(value, list):
        return [mutated(draw, v, depth + 1) for v in value * draw.choice([1, 1, 2])]
    return value if draw.random() > 0.15 else draw.choice(ODD)


def body_of(draw: random.Random, path: str) -> bytes:
    kind = draw.randrange(10)
    if kind < 6:
        return json.dumps(mutated(draw, VALID[path])).encode("utf-8", "surrogatepass")
    good = json.dumps(VALID[path]).encode()
    if kind == 6:
        return good[: draw.randrange(len(good))]
    if kind == 7:
        at = draw.randrange(len(good))
        return good[:at] + draw.randbytes(3) + good[at:]
    if kind == 8:
        depth = draw.choice([10, 500, 5000, 100_000])
        opening, closing = draw.choice([(b"[", b"]"), (b'{"a":', b"}")])
        return b'{"messages": ' + opening * depth + b"1" + closing * draw.choice([0, depth]) + b"}"
    return draw.choice([b"", b"null", b"\xff\xfe{}", b"\xef\xbb\xbf{}", good.decode().encode("utf-16"), b"9" * 9000])


def request_of(draw: random.Random) -> bytes:
    """One raw request; mostly well-formed HTTP around a bad body, sometimes bad HTTP."""
    path = draw.choice(list(VALID))
    body = body_of(draw, path)
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", "content-type: application/json"]
    kind = draw.randrange(24)
    if kind == 0:
        lines[0] = draw.choice(["GARBAGE", "POST", f"BREW {path} HTTP/1.1", f"POST {path} HTTP/9.9", "POST  HTTP/1.1"])
    elif kind == 1:
        lines[0] = f"{draw.choice(['PUT', 'DELETE', 'PATCH', 'HEAD', 'OPTIONS'])} {path} HTTP/1.1"
    elif kind == 2:
        lines[0] = f"POST {path}{draw.choice(['%00', '/../x', '?a=%ff', '%zz', '/', ';x', '%e9'])} HTTP/1.1"
    elif kind == 3:
        lines[2] = draw.choice(["content-length: -5", "content-length: abc", f"content-length: {len(body) + 1}"])
    elif kind == 4:
        lines.append(f"content-length: {len(body) + 7}")
    elif kind == 5:
        lines[2] = "transfer-encoding: chunked"
        body = draw.choice([b"zz\r\n" + body, b"5\r\nab", b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"])
    elif kind == 6:
        lines.append("x: " + "y" * draw.choice([100, 9000, 70_000]))
    elif kind == 7:
        lines += [f"x-{i}: y" for i in range(draw.choice([50, 3000]))]
    elif kind == 8:
        lines.append(
            draw.choice(["content-encoding: gzip", "expect: 100-continue", "upgrade: websocket", "bad header"])
        )
    elif kind == 9:
        lines.append(
            draw.choice(["authorization: Bearer \xff", "authorization:", "x-api-key: \x7f", "anthropic-version: 1"])
        )
    elif kind == 10:
        lines[3] = draw.choice(["content-type: text/plain", "content-type: multipart/form-data", "content-type: \x80"])
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


async def send(address: tuple[str, int], raw: bytes, draw: random.Random) -> int | None:
    """The status, or None when the server closed without a word."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(raw)
        if draw.random() < 0.2:
            writer.write_eof()
        async with asyncio.timeout(1.0 if draw.random() < 0.5 else 3.0):
            line = await reader.readline()
            if draw.random() < 0.7:
                await reader.read(1 << 16)
    except (TimeoutError, ConnectionError):
        return None
    finally:
        writer.close()
    return int(line.split()[1]) if line.startswith(b"HTTP/") else None


def address_of(stack: Stack) -> tuple[str, int]:
    return "127.0.0.1", int(stack.url.rpartition(":")[2])


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_malformed_requests_are_the_clients_mistake(count: int) -> None:
    asyncio.run(_flood(count))


async def _flood(count: int) -> None:
    draw = random.Random(count)
    process = psutil.Process()
    async with running_stack() as stack:
        address = address_of(stack)
        seen: dict[int | None, int] = {}

        async def some(share: int) -> None:
            for _ in range(share):
                raw = request_of(draw)
                status = await send(address, raw, draw)
                seen[status] = seen.get(status, 0) + 1
                assert status is None or status in FINE, (status, raw[:2000])

        await some(200)
        await stack.idle()
        gc.collect()
        before = process.memory_info().rss, process.num_fds()
        await asyncio.gather(*(some(count // 16) for _ in range(16)))
        await stack.idle(20.0)
        async with httpx.AsyncClient(base_url=stack.url) as client:
            assert (await client.post("/v1/completions", json=VALID["/v1/completions"])).status_code == 200
        await stack.idle()
        gc.collect()
        await asyncio.sleep(0.1)
        assert process.memory_info().rss - before[0] < 128 << 20
        assert process.num_fds() - before[1] < 40
        assert stack.router.service.bodies.held_bytes == 0
        assert seen[400] > count / 4


async def test_slow_and_silent_clients_hold_nothing_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.5)
    async with running_stack(router={"keep_alive_s": 1}) as stack:
        address = address_of(stack)

        async def drip(first: bytes) -> bytes:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(first)
            got = b""
            for _ in range(40):
                try:
                    async with asyncio.timeout(0.1):
                        got += await reader.read(4096)
                    if reader.at_eof():
                        break
                except TimeoutError:
                    if first:
                        writer.write(b"x")
            writer.close()
            return got if reader.at_eof() else b"open"

        slow = [asyncio.create_task(drip(b"POST /v1/completions HTTP/1.1\r\nx-")) for _ in range(50)]
        silent = asyncio.create_task(drip(b""))
        async with httpx.AsyncClient(base_url=stack.url) as client:
            for _ in range(10):
                assert (await client.post("/v1/completions", json=VALID["/v1/completions"])).status_code == 200
        assert all(b" 408 " in answer for answer in await asyncio.gather(*slow))
        assert await silent == b""


async def test_headers_without_end_are_cut_off() -> None:
    async with running_stack() as stack:
        reader, writer = await asyncio.open_connection(*address_of(stack))
        writer.write(b"POST /v1/completions HTTP/1.1\r\n")
        for i in range(40):
            writer.write(b"x-%d: %s\r\n" % (i, b"y" * 4000))
        async with asyncio.timeout(5):
            assert b" 431 " in await reader.readline()
        writer.close()


async def test_bodies_that_are_being_read_share_a_bound() -> None:
    async with running_stack(router={"max_body_bytes": 20_000}) as stack:
        address = address_of(stack)
        budget = stack.router.service.bodies
        budget.limit_bytes = 50_000
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 19000\r\n\r\n"
        open_ones = [await asyncio.open_connection(*address) for _ in range(2)]
        for _, writer in open_ones:
            writer.write(head + b" " * 18_000)
        while budget.held_bytes < 36_000:
            await asyncio.sleep(0.01)
        assert await send(address, head + b" " * 19_000, random.Random(1)) == 429
        for _, writer in open_ones:
            writer.close()
        while budget.held_bytes:
            await asyncio.sleep(0.01)


async def test_a_connection_stays_open_between_turns() -> None:
    async with running_stack() as stack:
        assert stack.router.service.config.keep_alive_s == 900
        reader, writer = await asyncio.open_connection(*address_of(stack))
        for pause in (0.0, 1.5, 0.1):
            await asyncio.sleep(pause)
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b" 200 " in await reader.readline()
            await reader.readuntil(b'"ok"}')
        writer.close()
