"""Whatever a client does, both pools and the store give back everything."""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import httpx

HELD = ("leased", "writing", "quarantined")


def held(values: dict[str, dict[str, float]]) -> dict[str, float]:
    """Everything that a request could still hold, by box and gauge; zero when nothing does."""
    found: dict[str, float] = {}
    for box, gauges in values.items():
        if "device_blocks" in gauges:
            found[f"{box} device blocks"] = gauges["device_blocks"] - gauges["device_free_blocks"]
            found[f"{box} requests"] = gauges["running"] + gauges["queued"]
        for gauge in HELD:
            if gauge in gauges:
                found[f"{box} {gauge}"] = gauges[gauge]
    return found


def wait_released(url: str, boxes: Callable[[str], dict[str, Any]], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while any(held(boxes(url)).values()):
        assert time.monotonic() < deadline, {k: v for k, v in held(boxes(url)).items() if v}
        time.sleep(0.05)


def test_a_client_that_leaves_frees_both_sides_at_once(quick_service, boxes, code_tokens) -> None:
    url = quick_service.url
    body = {"prompt": code_tokens[:200], "max_tokens": 400, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(base_url=url, timeout=60.0, trust_env=False) as client,
        client.stream("POST", "/v1/completions", json=body) as stream,
    ):
        lines = stream.iter_lines()
        for _ in range(4):
            next(lines)
        assert any(held(boxes(url)).values()), "the request should hold something while it streams"
    wait_released(url, boxes, 2.0)


def test_200_mixed_requests_with_random_aborts_leave_nothing_held(quick_service, boxes, code_tokens) -> None:
    url = quick_service.url
    wait_released(url, boxes, 5.0)
    outcomes = asyncio.run(storm(url, code_tokens, random.Random(5)))
    assert len(outcomes) == 200
    assert set(outcomes) <= {"done", "left", "busy"}
    assert outcomes.count("done") > 30
    assert outcomes.count("left") > 30
    wait_released(url, boxes, 5.0)


async def storm(url: str, tokens: list[int], dice: random.Random) -> list[str]:
    gate = asyncio.Semaphore(12)
    limits = httpx.Limits(max_connections=16)
    async with httpx.AsyncClient(base_url=url, timeout=120.0, trust_env=False, limits=limits) as client:

        async def one(plan: dict[str, Any]) -> str:
            async with gate:
                return await request(client, plan)

        plans = [make_plan(tokens, dice) for _ in range(200)]
        return await asyncio.gather(*(one(plan) for plan in plans))


def make_plan(tokens: list[int], dice: random.Random) -> dict[str, Any]:
    start, length = dice.choice((0, 64, 700)), dice.choice((1, 40, 64, 130, 300))
    body = {
        "prompt": tokens[start : start + length],
        "max_tokens": dice.choice((1, 4, 12, 40)),
        "temperature": dice.choice((0, 0.8)),
        "stream": dice.random() < 0.6,
        "n": dice.choice((1, 1, 1, 2)),
    }
    return {"body": body, "leave_after_s": dice.choice((None, dice.random() * 0.05, dice.random()))}


async def request(client: httpx.AsyncClient, plan: dict[str, Any]) -> str:
    async def read() -> int:
        async with client.stream("POST", "/v1/completions", json=plan["body"]) as answer:
            async for _ in answer.aiter_bytes():
                pass
            return answer.status_code

    try:
        status = await asyncio.wait_for(read(), plan["leave_after_s"])
    except TimeoutError:
        return "left"
    return {200: "done", 429: "busy"}.get(status, f"status {status}")
