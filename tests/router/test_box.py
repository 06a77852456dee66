"""The router as a process's box: starts from endpoints, follows moved boxes, stops within its grace."""

import asyncio
import dataclasses
import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.config import Config, from_dict
from headrace.errors import ConfigError, RankLost
from headrace.router import box as box_module
from headrace.router.box import ENDPOINTS_FILE, RouterBox
from headrace.router.fake import FakeDecode, FakePrefill, FakeStore

BODY = {"model": "nano", "prompt": "def f(x):", "max_tokens": 200, "ignore_eos": True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    config: Config
    run_dir: str
    token: str
    fingerprint: bytes = b"f" * 32
    endpoints: dict[str, str]


def context_of(tmp_path: Path, endpoints: dict[str, str], **router: Any) -> Context:
    config = from_dict({"router": {"port": 0, **router}, "deploy": {"start_timeout_s": 2.0}})
    return Context(config=config, run_dir=str(tmp_path), token="t", endpoints=endpoints)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    """The directory answers from the fakes' store instead of a node daemon."""
    store = FakeStore()
    monkeypatch.setattr(box_module, "open_directory", lambda *_: store)
    monkeypatch.setattr(box_module, "open_nodes", lambda *_: {})
    return store


async def pools(store: FakeStore) -> tuple[FakePrefill, FakeDecode, dict[str, str]]:
    prefill, decode = (
        FakePrefill(name="prefill-0", store=store, token="t"),
        FakeDecode(name="decode-0.0", store=store, token="t"),
    )
    endpoints = {"prefill-0": await prefill.start(), "decode-0.0": await decode.start(), "node-0": "unix:/none"}
    return prefill, decode, endpoints


async def test_starts_serves_and_lets_streams_finish(store: FakeStore, tmp_path: Path) -> None:
    prefill, decode, endpoints = await pools(store)
    box = RouterBox(context_of(tmp_path, endpoints))
    url = (await asyncio.to_thread(box.start))["router"]
    assert box.status()["ready"]
    decode.step_s = 0.01
    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
        running = asyncio.create_task(client.post("/v1/completions", json=BODY))
        while not decode.held:
            await asyncio.sleep(0.005)
        stopping = asyncio.create_task(asyncio.to_thread(box.stop, 10.0))
        while box.status()["ready"]:
            await asyncio.sleep(0.005)
        assert (await client.post("/v1/completions", json=BODY)).status_code == 503
        assert (await client.get("/health")).status_code == 503
        response = await running
        assert response.json()["usage"]["completion_tokens"] == 200
        await stopping
    assert not [t for t in threading.enumerate() if t.name == "router"]
    await prefill.stop()
    await decode.stop()


async def test_the_grace_period_is_kept(store: FakeStore, tmp_path: Path) -> None:
    prefill, decode, endpoints = await pools(store)
    box = RouterBox(context_of(tmp_path, endpoints))
    url = (await asyncio.to_thread(box.start))["router"]
    decode.step_s = 0.5
    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
        running = asyncio.create_task(client.post("/v1/completions", json=BODY))
        while not decode.held:
            await asyncio.sleep(0.005)
        began = time.monotonic()
        await asyncio.to_thread(box.stop, 0.3)
        assert time.monotonic() - began < 4.0
        response = (await asyncio.gather(running, return_exceptions=True))[0]
        assert isinstance(response, httpx.HTTPError) or response.status_code >= 500
    assert not decode.held
    assert not prefill.held
    await prefill.stop()
    await decode.stop()


async def test_a_missing_box_and_a_taken_port_are_named(store: FakeStore, tmp_path: Path) -> None:
    prefill, decode, endpoints = await pools(store)
    missing = RouterBox(context_of(tmp_path, {**endpoints, "decode-0.0": "127.0.0.1:1"}))
    with pytest.raises(RankLost, match=r"127\.0\.0\.1:1"):
        await asyncio.to_thread(missing.start)
    first = RouterBox(context_of(tmp_path, endpoints))
    url = (await asyncio.to_thread(first.start))["router"]
    second = RouterBox(context_of(tmp_path, endpoints, port=int(url.rpartition(":")[2])))
    with pytest.raises(ConfigError, match=r"router\.port"):
        await asyncio.to_thread(second.start)
    await asyncio.to_thread(first.stop, 0.0)
    assert not [t for t in threading.enumerate() if t.name == "router"]
    await prefill.stop()
    await decode.stop()


async def test_a_box_that_was_started_again_elsewhere_is_followed(store: FakeStore, tmp_path: Path) -> None:
    prefill, decode, endpoints = await pools(store)
    box = RouterBox(context_of(tmp_path, endpoints))
    url = (await asyncio.to_thread(box.start))["router"]
    for fake in (prefill, decode):
        await fake.stop()
        moved = await fake.start()
        assert moved != endpoints[fake.name]
        endpoints[fake.name] = moved
    written = tmp_path / "new"
    written.write_text(json.dumps(endpoints))
    written.rename(tmp_path / ENDPOINTS_FILE)
    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
        response = await client.post("/v1/completions", json=BODY)
        assert response.status_code == 200, response.text
    await asyncio.to_thread(box.stop, 0.0)
    await prefill.stop()
    await decode.stop()
