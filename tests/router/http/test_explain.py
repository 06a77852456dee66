"""/requests/{id}: where a request went and why, what it hit, and where its prompt parted from the nearest one."""

from typing import Any

import httpx
import pytest

from headrace.deploy.commands import explain
from headrace.errors import RankLost
from headrace.router.testing import running_stack

KEYS = {"api_keys": ["a1=a", "b1=b"]}


async def ask(client: httpx.AsyncClient, prompt: list[int], key: str = "a1", **fields: Any) -> str:
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, **fields}
    answer = await client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-request-id"] == answer.json()["id"]
    return str(answer.json()["id"])


async def why(client: httpx.AsyncClient, request_id: str, key: str = "a1") -> dict[str, Any]:
    answer = await client.get(f"/requests/{request_id}", headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_the_place_where_prompts_part_is_shown_with_both_texts() -> None:
    async with running_stack(groups=2, router=KEYS) as stack, httpx.AsyncClient(base_url=stack.url) as client:
        shared, one, two = list(range(300, 500)), [600] * 60, [700] * 60
        first = await ask(client, shared + one)
        second = await ask(client, shared + two)
        found = await why(client, second)
        [prompt] = found["prompts"]
        assert prompt["nearest"] == first
        assert (prompt["shared_tokens"], prompt["cached_tokens"]) == (200, 192)
        assert (prompt["parted"]["token"], prompt["parted"]["block"]) == (200, 3)
        text = stack.router.service.model.tokenizer.decode
        assert prompt["parted"]["this"] == text(two[:16], skip_special=False)
        assert prompt["parted"]["nearest"] == text(one[:16], skip_special=False)
        assert "part at token 200" in prompt["why"]
        [attempt] = found["attempts"]
        assert {c["name"] for c in attempt["placed"]["groups"]} == {"prefill-0", "prefill-1"}
        assert attempt["placed"]["matched_blocks"]["host"] == 3
        assert attempt["prefill"]["cached_tokens"] == {"device": 0, "host": 192}
        assert 0 <= found["ready_s"] <= attempt["at_s"] <= attempt["prefill"]["first_token_s"] <= found["ended_s"]
        assert found["outcome"] == "ok"
        lines = "\n".join(explain.report(found))
        assert "prefill-1" in lines
        assert "part at token 200" in lines


async def test_what_was_dropped_is_told_apart_from_what_differs() -> None:
    async with running_stack(router=KEYS) as stack, httpx.AsyncClient(base_url=stack.url) as client:
        prompt = list(range(300, 500))
        alone = await why(client, await ask(client, prompt))
        assert "no earlier prompt" in alone["prompts"][0]["why"]
        stack.store.blocks.clear()
        assert (
            "192 shared tokens were in no tier" in (await why(client, await ask(client, prompt)))["prompts"][0]["why"]
        )
        again = (await why(client, await ask(client, prompt)))["prompts"][0]
        assert "beginning of the other" in again["why"]
        assert "parted" not in again


async def test_nothing_of_another_tenant_is_shown() -> None:
    async with running_stack(router=KEYS) as stack, httpx.AsyncClient(base_url=stack.url) as client:
        prompt = list(range(300, 500))
        theirs = await ask(client, prompt, "b1")
        mine = await ask(client, prompt)
        assert "no earlier prompt" in (await why(client, mine))["prompts"][0]["why"]
        hidden = await client.get(f"/requests/{theirs}", headers={"authorization": "Bearer a1"})
        assert hidden.status_code == 404
        listed = await client.get("/requests", headers={"authorization": "Bearer a1"})
        assert [r["id"] for r in listed.json()["data"]] == [mine]
        everybody = await client.get("/requests")
        assert [r["id"] for r in everybody.json()["data"]] == [mine, theirs]
        assert (await client.get("/requests/none")).status_code == 404


async def test_failed_attempts_are_in_the_report_and_memory_is_bounded() -> None:
    settings = {**KEYS, "explain_bytes": 4000}
    async with running_stack(ranks=1, router=settings) as stack, httpx.AsyncClient(base_url=stack.url) as client:
        stack.prefill[0].fail_next = [RankLost("gone")]
        found = await why(client, await ask(client, [5] * 300))
        assert ["error" in attempt for attempt in found["attempts"]] == [True, False]
        for i in range(20):
            await ask(client, [i + 5] * 300)
        assert stack.router.service.journal.held_bytes <= 4000
        found = await why(client, await ask(client, [5] * 2000))
        assert found["prompts"] == []


async def test_pool_and_drain() -> None:
    async with running_stack(groups=2, ranks=2) as stack, httpx.AsyncClient(base_url=stack.url) as client:
        pool = (await client.get("/pool")).json()
        assert set(pool["prefill"]) == {"prefill-0", "prefill-1"}
        assert all(
            box["usable"] and not box["drained"] for box in (*pool["prefill"].values(), *pool["decode"].values())
        )
        for box in ("prefill-0", "decode-0.1"):
            assert (await client.post("/drain", json={"box": box})).json()["drained"]
        for i in range(6):
            await ask(client, [i + 5] * 100)
        assert not stack.prefill[0].seen
        assert not stack.decode[1].seen
        assert (await client.get("/pool")).json()["prefill"]["prefill-0"]["drained"]
        await client.post("/drain", json={"box": "prefill-0", "undo": True})
        for i in range(6):
            await ask(client, [i + 50] * 100)
        assert stack.prefill[0].seen
        assert (await client.post("/drain", json={"box": "prefill-9"})).status_code == 400
        assert (await client.post("/drain")).json()["draining"]
        assert (await client.get("/health")).status_code == 503
        refused = await client.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        assert not (await client.post("/drain", json={"undo": True})).json()["draining"]
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/health")).headers["x-request-id"]


async def test_admin_endpoints_want_the_admin_key() -> None:
    settings = {"admin_key": "root", "api_keys": ["a1=a"]}
    async with running_stack(router=settings) as stack, httpx.AsyncClient(base_url=stack.url) as client:
        for method, path in (("GET", "/pool"), ("POST", "/drain"), ("GET", "/requests"), ("GET", "/requests/x")):
            for headers in ({}, {"authorization": "Bearer wrong"}):
                assert (await client.request(method, path, headers=headers)).status_code == 401
        assert (await client.get("/pool", headers={"authorization": "Bearer root"})).status_code == 200
        for path in ("/pool", "/drain"):
            answer = await client.request("POST" if path == "/drain" else "GET", path, headers={"x-api-key": "a1"})
            assert answer.status_code == 401


@pytest.mark.parametrize("path", ["/requests", "/pool"])
async def test_remote_clients_are_refused_without_an_admin_key(path: str) -> None:
    async with running_stack() as stack:
        transport = httpx.ASGITransport(app=stack.router.app, client=("10.1.2.3", 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            assert (await client.get(path)).status_code == 403
