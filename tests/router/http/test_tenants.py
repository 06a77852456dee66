"""Keys, tenants and the admin key: same tenant, same names; another tenant, others; nothing a client can choose."""

import httpx

from headrace.messages import PrefillRequest
from headrace.router.testing import Stack, running_stack

PROMPT = list(range(5, 205))
KEYS = ("a1=acme", "a2=acme", "b1=bolt", "solo")


async def ask(stack: Stack, client: httpx.AsyncClient, key: str, **extra: object) -> tuple[object, int]:
    """(block names the pool saw, cached tokens)."""
    body = {"model": "nano", "prompt": PROMPT, "max_tokens": 1, **extra}
    response = await client.post(f"{stack.url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    assert response.status_code == 200, response.text
    request = stack.prefill[0].seen[-1]
    assert isinstance(request, PrefillRequest)
    return request.block_names, response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_tenants_do_not_share_names() -> None:
    async with running_stack(router={"api_keys": KEYS}) as stack, httpx.AsyncClient() as client:
        first, cold = await ask(stack, client, "a1")
        second, warm = await ask(stack, client, "a2")
        other, foreign = await ask(stack, client, "b1")
        alone, lonely = await ask(stack, client, "solo")
        assert first == second
        assert (cold, warm, foreign, lonely) == (0, 192, 0, 0)
        assert len({first, other, alone}) == 3
        chosen, hit = await ask(stack, client, "b1", cache_salt="acme", user="acme")
        assert chosen == other
        assert hit == 192


async def test_without_a_key_nothing_is_read() -> None:
    async with running_stack(router={"api_keys": KEYS}) as stack, httpx.AsyncClient(base_url=stack.url) as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic a1"}, {"x-api-key": "A1"}):
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
                response = await client.post(path, content=b"not json", headers=headers)
                assert response.status_code == 401
                assert response.json()["error"]["type"] == "authentication_error"
            assert (await client.get("/v1/models", headers=headers)).status_code == 401
        assert (await client.get("/v1/models", headers={"x-api-key": "a1"})).status_code == 200
        assert (await client.get("/health")).status_code == 200


async def test_admin_endpoints_want_the_admin_key() -> None:
    async with (
        running_stack(router={"admin_key": "root", "api_keys": KEYS}) as stack,
        httpx.AsyncClient(base_url=stack.url) as client,
    ):
        await ask(stack, client, "a1")
        for key in ("", "a1"):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            assert (await client.post("/flush_cache", headers=headers)).status_code == 401
        admin = {"authorization": "Bearer root"}
        flushed = await client.post("/flush_cache", headers=admin)
        assert flushed.status_code == 200
        assert flushed.json()["blocks"] == 3
        info = (await client.get("/get_server_info", headers=admin)).json()
        assert info["config"]["router"]["admin_key"] == "***"
        assert "a1" not in str(info["config"])
        _, cached = await ask(stack, client, "a1")
        assert cached == 0
