"""Replay and benchmark against a whole router with fake pools on a real port."""

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from headrace.errors import CapacityError, HeadraceError, InputError
from headrace.lab import cli
from headrace.lab.analysis.ideal import ideal_hits
from headrace.lab.live.figures import compare, figures
from headrace.lab.live.http import Client
from headrace.lab.live.profiles import PROFILES, profile_trace
from headrace.lab.live.prompts import Prompts
from headrace.lab.live.replay import Measured, Replay, ReplaySettings
from headrace.lab.traces import read_trace
from headrace.lab.traces.form import Trace
from headrace.lab.traces.shrink import shrink
from headrace.router.testing import running_stack

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def small() -> Trace:
    """Two agent sessions with prompts of a few hundred tokens and one or two of answer."""
    trace = shrink(read_trace(DATA / "weka.jsonl.gz"), 256)
    sessions = tuple(dataclasses.replace(s, requests=s.requests[:12]) for s in trace.sessions[:1])
    return dataclasses.replace(trace, sessions=sessions)


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    """URL of a router that runs in a thread of its own."""
    ready, url = threading.Event(), []

    async def main() -> None:
        stop = asyncio.Event()
        async with running_stack() as stack:
            url.extend([stack.url, asyncio.get_running_loop(), stop])
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(60)
    yield url[0]
    url[1].call_soon_threadsafe(url[2].set)
    thread.join(30)


def test_shrinking_keeps_what_is_shared() -> None:
    trace = read_trace(DATA / "weka.jsonl.gz")
    less = shrink(trace, 16)
    assert less.block_tokens == 64
    assert ideal_hits(less).block_weighted == pytest.approx(ideal_hits(trace).block_weighted, abs=0.03)
    for big, tiny in zip(trace.requests(), less.requests(), strict=True):
        assert tiny.input_tokens == max(big.input_tokens // 16, 1)
        assert tiny.num_blocks == tiny.input_tokens // 64


def test_a_512_token_trace_becomes_one_of_64(small: Trace) -> None:
    trace = read_trace(DATA / "mooncake.jsonl.gz")
    less = shrink(trace, 8)
    first, tiny = next(trace.requests()), next(less.requests())
    assert tiny.blocks() == first.blocks()[: tiny.input_tokens // 64]
    with pytest.raises(InputError, match="cannot be divided"):
        shrink(trace, 3)


def test_prompts_share_tokens_exactly_where_chains_share_blocks(small: Trace) -> None:
    prompts = Prompts()
    one, two = small.sessions[0].requests[:2]
    first, second = prompts.tokens(one, 0), prompts.tokens(two, 0)
    shared = next((i for i, (a, b) in enumerate(zip(one.blocks(), two.blocks())) if a != b), one.num_blocks)
    assert first[: shared * 64] == second[: shared * 64]
    assert first[shared * 64 :] != second[shared * 64 : len(first)]
    assert len(first) == one.input_tokens
    assert Prompts(seed=1).tokens(one, 0) != first


def test_replay_measures_the_ideal_hits_of_an_endless_store(service: str, small: Trace) -> None:
    async def go() -> list[Measured]:
        client = Client(service)
        await client.call("POST", "/flush_cache")
        return await Replay(client, small, ReplaySettings(time_scale=1e6)).run()

    results = asyncio.run(go())
    assert [r.error for r in results] == [""] * sum(1 for _ in small.requests())
    assert all(0 < r.ttft_s <= r.total_s for r in results)
    row = figures(results)
    assert row["hit"] == pytest.approx(ideal_hits(small).token_weighted, abs=0.01)
    assert row["failed"] == 0


def test_command_compares_with_the_simulation(service: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = str(tmp_path / "costs.json")
    source = str(DATA / "weka.jsonl.gz")
    arguments = ["replay", source, "--url", service, "--sessions", "1", "--shrink", "256", "--time-scale", "1e6"]
    assert (
        cli.main(
            [*arguments, "--compare", "--max-output", "3", "--csv", str(tmp_path / "c.csv"), "--save-costs", costs]
        )
        == 0
    )
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert abs(float(lines["hit"][1]) - float(lines["hit"][2])) < 0.01
    assert lines["hit"][-1] == "points"
    assert float(lines["hit_host"][1]) == float(lines["hit"][1]), "the fake's hits all come from its host tier"
    assert "ttft_p50_s" in (tmp_path / "c.csv").read_text()
    assert cli.main([*arguments, "--compare", "--max-output", "3", "--costs", costs]) == 0


def test_bench_shares_nine_tenths(service: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "nano-64k", "--concurrency", "1,3", "--url", service]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    table = [dict(zip(head.split(), row.split())) for row in rows]
    assert [row["concurrency"] for row in table] == ["1", "3"]
    # The first request computes the shared prefix, the others hit 14 of 16 blocks.
    assert float(table[0]["hit"]) == pytest.approx(3 / 4 * 14 / 16, abs=0.01)
    assert [row["failed"] for row in table] == ["0", "0"]


@pytest.mark.parametrize("name", list(PROFILES))
def test_profiles_have_their_length_and_share(name: str) -> None:
    trace = profile_trace(name, 2)
    profile = PROFILES[name]
    for request in trace.requests():
        assert request.num_blocks * 64 == request.input_tokens == profile.prompt_tokens
    if profile.shared:
        assert ideal_hits(trace).hit_blocks > 0
    else:
        assert ideal_hits(trace).hit_blocks == 0


def test_wrong_requests_carry_the_words_of_the_service(service: str) -> None:
    with pytest.raises(HeadraceError, match="nosuch"):
        asyncio.run(Client(service).call("POST", "/v1/completions", {"model": "nosuch", "prompt": "x"}))


def test_no_service_is_said_plainly() -> None:
    with pytest.raises(HeadraceError, match="does not answer"):
        asyncio.run(Client("http://127.0.0.1:9").call("GET", "/health"))
    with pytest.raises(InputError, match="URL"):
        Client("localhost:8000")


async def _serve_once(raw: bytes) -> AsyncIterator[str]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in (raw[:40], raw[40:]):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def fetch_events(raw: bytes) -> list[dict]:  # type: ignore[type-arg]
    async def go() -> list[dict]:  # type: ignore[type-arg]
        async for url in _serve_once(raw):
            async with Client(url).request("GET", "/") as answer:
                return [event async for event in answer.events()]
        return []

    return asyncio.run(go())


def test_events_survive_any_chunking() -> None:
    body = b'data: {"a": 1}\n\nda' + b'ta: {"b": 2}\r\n\r\n: comment\n\ndata: [DONE]\n\n'
    chunked = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in (body[:7], body[7:21], body[21:])) + b"0\r\n\r\n"
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert fetch_events(head + chunked) == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize(
    "raw", [b"", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nda", b"nonsense\r\n\r\n"]
)
def test_a_broken_answer_is_an_error_not_a_hang(raw: bytes) -> None:
    with pytest.raises(HeadraceError, match="broke off"):
        fetch_events(raw)


def test_a_refusal_is_counted_apart() -> None:
    from headrace.lab.live.http import refusal

    assert isinstance(refusal(429, {"error": {"message": "full"}}), CapacityError)
    row = figures([Measured(10, refused=True, error="full"), Measured(10, error="broken"), Measured(10, total_s=1.0)])
    assert (row["requests"], row["refused"], row["failed"]) == (3, 1, 1)


def test_comparison_names_points_and_percent() -> None:
    rows = compare({"hit": 0.5, "ttft_p50_s": 2.0}, {"hit": 0.52, "ttft_p50_s": 1.0})
    assert [row["error"] for row in rows] == ["+2.00 points", "-50.0%"]
