"""Hits on every generating endpoint, streamed and whole: the second request with a prefix reports what it did not
compute, another tenant's never does, and what is counted is what the pool found."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from headrace.router.testing import Stack, running_stack

KEYS = ("a1=acme", "a2=acme", "b1=bolt")
LONG = "def read(path):\n    return open(path).read()\n" * 20
BLOCK = 64


def completion(text: str) -> dict[str, Any]:
    return {"prompt": text}


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def message(text: str) -> dict[str, Any]:
    return {**chat(text), "max_tokens": 2}


def response(text: str) -> dict[str, Any]:
    return {"input": text}


def openai_counts(usage: dict[str, Any]) -> tuple[int, int]:
    details = usage["prompt_tokens_details"]
    assert sum(details["cached_tokens_by_tier"].values()) == details["cached_tokens"]
    return usage["prompt_tokens"], details["cached_tokens"]


def anthropic_counts(usage: dict[str, Any]) -> tuple[int, int]:
    read = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + usage["cache_creation_input_tokens"] + read, read


def responses_counts(usage: dict[str, Any]) -> tuple[int, int]:
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


ENDPOINTS: dict[str, tuple[Callable[[str], dict[str, Any]], str, Callable[[dict[str, Any]], tuple[int, int]]]] = {
    "/v1/completions": (completion, "max_tokens", openai_counts),
    "/v1/chat/completions": (chat, "max_tokens", openai_counts),
    "/v1/messages": (message, "max_tokens", anthropic_counts),
    "/v1/responses": (response, "max_output_tokens", responses_counts),
}


def usages(value: Any) -> list[dict[str, Any]]:
    """Every usage in an answer or an event, also those of what it encloses."""
    if not isinstance(value, dict):
        return []
    own = value.get("usage")
    found = [own] if own else []
    return found + [usage for key in ("message", "response") for usage in usages(value.get(key))]


async def ask(client: httpx.AsyncClient, path: str, text: str, *, stream: bool, key: str = "a1") -> tuple[int, int]:
    """(prompt tokens, cached tokens) as the answer reports them; every usage of a stream says the same."""
    body, limit, counts = ENDPOINTS[path]
    fields = {**body(text), limit: 2, "stream": stream, "model": "nano"}
    if stream and path in ("/v1/completions", "/v1/chat/completions"):
        fields["stream_options"] = {"include_usage": True}
    answer = await client.post(path, json=fields, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    if stream:
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        found = [usage for line in lines for usage in usages(json.loads(line))]
    else:
        found = usages(answer.json())
    assert found, answer.text
    said = {counts(usage) for usage in found}
    assert len(said) == 1, said
    return said.pop()


def pool_hit(stack: Stack, before: set[bytes]) -> int:
    """Tokens of the last prompt that the pool had, `before` being what it held."""
    request = stack.prefill[0].seen[-1]
    run = 0
    for name in request.block_names:
        if name not in before:
            break
        run += 1
    return int(min(run * BLOCK, len(request.tokens) // 4 - 1))


@pytest.mark.parametrize("streams", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("path", list(ENDPOINTS))
async def test_the_second_request_reports_the_hit_and_only_its_tenants(path: str, streams: tuple[bool, bool]) -> None:
    async with running_stack(router={"api_keys": KEYS}) as stack, httpx.AsyncClient(base_url=stack.url) as client:
        cold = await ask(client, path, LONG, stream=streams[0])
        assert cold[1] == 0
        before = set(stack.store.blocks)
        same = await ask(client, path, LONG, stream=streams[1], key="a2")
        assert same == (cold[0], pool_hit(stack, before))
        assert same[1] >= cold[0] // BLOCK * BLOCK - 1 > 0
        longer = await ask(client, path, LONG + "# and then\n" * 30, stream=streams[1])
        # A template closes the turn after the text: the block in which the texts part is not shared.
        assert cold[0] - 2 * BLOCK < longer[1] <= cold[0] < longer[0]
        other = await ask(client, path, LONG, stream=streams[1], key="b1")
        assert other == (cold[0], 0)
        assert (await ask(client, path, LONG, stream=streams[1], key="b1")) == same


@pytest.mark.parametrize("path", list(ENDPOINTS))
async def test_a_hit_that_was_flushed_is_reported_as_none(path: str) -> None:
    async with running_stack() as stack, httpx.AsyncClient(base_url=stack.url) as client:
        for stream in (False, True):
            assert (await ask(client, path, LONG, stream=stream))[1] == 0
            assert (await ask(client, path, LONG, stream=stream))[1] > 0
            assert (await client.post("/flush_cache")).status_code == 200


async def test_a_conversation_hits_over_chat_and_messages_alike() -> None:
    """The two forms of one conversation are one prompt: what came through one endpoint is hit through the other."""
    async with running_stack() as stack, httpx.AsyncClient(base_url=stack.url) as client:
        cold = await ask(client, "/v1/chat/completions", LONG, stream=False)
        warm = await ask(client, "/v1/responses", LONG, stream=True)
        assert cold[1] == 0
        assert warm[0] == cold[0]
        assert warm[1] >= cold[0] // BLOCK * BLOCK - 1


async def test_tenants_never_share_a_name_on_any_endpoint() -> None:
    """What time cannot tell: nothing of one tenant's prompt has a name that another's has, so no block that one of them
    left could answer the other faster."""
    async with running_stack(router={"api_keys": KEYS}) as stack, httpx.AsyncClient(base_url=stack.url) as client:
        names: dict[str, set[bytes]] = {}
        for key in ("a1", "b1"):
            first = len(stack.prefill[0].seen)
            for path in ENDPOINTS:
                for stream in (False, True):
                    await ask(client, path, LONG, stream=stream, key=key)
            seen = stack.prefill[0].seen[first:]
            assert len(seen) == 2 * len(ENDPOINTS)
            assert all(request.block_names for request in seen)
            names[key] = {name for request in seen for name in request.block_names}
        assert len(names["a1"]) == len(names["b1"])
        assert not names["a1"] & names["b1"]
