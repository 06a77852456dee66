"""What tenants may use: rates with a Retry-After that is true, requests at a time, and shares while others wait."""

import asyncio
import math

import httpx
import pytest

from headrace.errors import CapacityError, ConfigError
from headrace.router.http.limits import BURST_S, Limits, TenantLimits, parse_limits
from headrace.router.testing import running_stack

KEYS = ["a1=a", "b1=b"]


def test_entries() -> None:
    found = parse_limits(["a:requests_per_s=5,weight=2", "team:x:concurrency=3", "*:priority=-1"])
    assert found["a"] == Limits(requests_per_s=5.0, weight=2.0)
    assert found["team:x"].concurrency == 3
    assert found["*"].priority == -1
    for wrong in ("a", "a:", "a:speed=3", "a:weight=0", "a:weight=x", ":weight=1", "a:weight=nan"):
        with pytest.raises(ConfigError, match="requests_per_s"):
            parse_limits([wrong])


def test_a_bucket_refuses_and_says_when_it_will_not() -> None:
    now = 0.0
    limits = TenantLimits(parse_limits(["*:requests_per_s=2,tokens_per_s=100"]), lambda: now)

    def one() -> None:
        with limits.request("t"):
            pass

    for _ in range(int(2 * BURST_S)):
        one()
    with pytest.raises(CapacityError) as refused:
        one()
    assert refused.value.retry_after_s == pytest.approx(0.5)
    with limits.request("somebody else"):
        pass
    now = 0.5
    one()
    limits.charge_tokens("t", 50_000)  # larger than the bucket: let through, and paid for afterwards
    with pytest.raises(CapacityError) as refused:
        limits.charge_tokens("t", 10)
    assert refused.value.retry_after_s == pytest.approx((50_000 - 1000 + 10) / 100)


def test_without_limits_nothing_is_counted_out() -> None:
    limits = TenantLimits({}, lambda: 0.0)
    assert math.isinf(limits.of("t").requests_per_s)
    for _ in range(1000):
        with limits.request("t"):
            limits.charge_tokens("t", 10**9)


async def test_limits_at_the_door() -> None:
    settings = {"api_keys": KEYS, "tenant_limits": ["a:concurrency=1", "b:requests_per_s=0.1"]}
    async with running_stack(router=settings) as stack, httpx.AsyncClient(base_url=stack.url) as client:
        stack.decode[0].step_s = stack.decode[1].step_s = 0.05

        async def ask(key: str, tokens: int) -> httpx.Response:
            body = {"prompt": "x", "max_tokens": tokens, "ignore_eos": True}
            return await client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})

        first = asyncio.create_task(ask("a1", 30))
        await asyncio.sleep(0.2)
        assert (await ask("a1", 1)).status_code == 429
        assert (await first).status_code == 200
        assert (await ask("a1", 1)).status_code == 200
        assert (await ask("b1", 1)).status_code == 200
        refused = await ask("b1", 1)
        assert refused.status_code == 429
        assert 9 <= int(refused.headers["retry-after"]) <= 10
        assert "requests a second" in refused.json()["error"]["message"]
        await stack.idle()


async def test_a_flood_of_one_tenant_does_not_keep_another_out() -> None:
    async with running_stack(ranks=1, router={"api_keys": KEYS}) as stack:
        stack.router.placer.admission.rooms["decode-0.0"].sequences_limit = 2
        stack.decode[0].step_s = 0.01
        done: list[str] = []

        async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:

            async def ask(key: str) -> None:
                body = {"prompt": [5] * 200, "max_tokens": 12, "ignore_eos": True}
                headers = {"authorization": f"Bearer {key}"}
                assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
                done.append(key)

            flood = [asyncio.create_task(ask("a1")) for _ in range(50)]
            while stack.router.placer.admission.queued < 40:
                await asyncio.sleep(0.01)
            others = [asyncio.create_task(ask("b1")) for _ in range(5)]
            await asyncio.gather(*flood, *others)
        # In turns of a quantum: the other tenant's five are through long before the flood's fifty.
        assert max(i for i, key in enumerate(done) if key == "b1") < 45
