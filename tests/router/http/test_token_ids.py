"""`return_token_ids`: the ids of prompt and answer, the same with and without streaming."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from headrace.model.nano import checkpoint_path
from headrace.router.fake import Script
from headrace.router.testing import Stack, running_stack
from headrace.router.tokens.tokenizer import Tokenizer

TOKENIZER = Tokenizer(checkpoint_path())
EOS = 3776
ANSWER = [*TOKENIZER.encode("Thinking 日本語.</think>The answer, at length."), EOS]
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def answers(prompt: Any, index: int) -> int:
    return ANSWER[min(index, len(ANSWER) - 1)]


async def chunks(client: httpx.AsyncClient, url: str, fields: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    async with client.stream("POST", url, json={**fields, "stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield httpx.Response(200, content=line[6:]).json()


async def both(stack: Stack, path: str, fields: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    async with httpx.AsyncClient(timeout=20) as client:
        whole = await client.post(f"{stack.url}{path}", json=fields)
        assert whole.status_code == 200, whole.text
        return whole.json(), [chunk async for chunk in chunks(client, f"{stack.url}{path}", fields)]


def joined(parts: list[dict[str, Any]], index: int) -> list[int]:
    choices = [choice for chunk in parts for choice in chunk["choices"] if choice["index"] == index]
    return [token for choice in choices for token in choice.get("token_ids") or ()]


@pytest.mark.parametrize(
    ("fields", "prompts"),
    [
        ({"prompt": "some text", "max_tokens": 60}, [TOKENIZER.encode("some text")]),
        ({"prompt": [[5, 6, 7], [8, 9]], "n": 2, "max_tokens": 9}, [[5, 6, 7], [5, 6, 7], [8, 9], [8, 9]]),
        ({"prompt": [5, 6], "max_tokens": 60, "stop": ["answer"]}, [[5, 6]]),
        ({"prompt": [5, 6], "max_tokens": 1}, [[5, 6]]),
    ],
)
async def test_completions(fields: dict[str, Any], prompts: list[list[int]]) -> None:
    async with running_stack(script=answers) as stack:
        whole, parts = await both(stack, "/v1/completions", {**fields, "return_token_ids": True})
        assert [choice["prompt_token_ids"] for choice in whole["choices"]] == prompts
        for choice in whole["choices"]:
            index, ids = choice["index"], choice["token_ids"]
            assert ids == ANSWER[: len(ids)] == joined(parts, index)
            of_choice = [c for chunk in parts for c in chunk["choices"] if c["index"] == index]
            assert of_choice[0]["prompt_token_ids"] == prompts[index]
            assert not any("prompt_token_ids" in c for c in of_choice[1:])
        assert sum(len(c["token_ids"]) for c in whole["choices"]) == whole["usage"]["completion_tokens"]
        await stack.idle()


@pytest.mark.parametrize("extra", [{}, {"n": 2, "max_tokens": 7}, {"logprobs": True}, {"stop": "answer"}])
async def test_chat(extra: dict[str, Any]) -> None:
    async with running_stack(script=answers) as stack:
        fields = {**CHAT, "max_tokens": 60, **extra, "return_token_ids": True}
        whole, parts = await both(stack, "/v1/chat/completions", fields)
        async with httpx.AsyncClient() as client:
            prompt = (await client.post(f"{stack.url}/tokenize", json=CHAT)).json()["tokens"]
        assert whole["prompt_token_ids"] == prompt == parts[0]["prompt_token_ids"]
        for choice in whole["choices"]:
            ids = choice["token_ids"]
            assert ids == ANSWER[: len(ids)] == joined(parts, choice["index"])
            own = [chunk for chunk in parts if chunk["choices"][0]["index"] == choice["index"]]
            assert ["prompt_token_ids" in chunk for chunk in own] == [True] + [False] * (len(own) - 1)
        assert sum(len(c["token_ids"]) for c in whole["choices"]) == whole["usage"]["completion_tokens"]
        if not extra:
            assert whole["choices"][0]["token_ids"] == ANSWER


@pytest.mark.parametrize("wanted", [{}, {"return_token_ids": False}, {"return_token_ids": None}])
async def test_only_when_asked(wanted: dict[str, Any]) -> None:
    script: Script = answers
    async with running_stack(script=script) as stack:
        for path, fields in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", CHAT)):
            whole, parts = await both(stack, path, {**fields, "max_tokens": 5, **wanted})
            assert "token_ids" not in str(whole)
            assert "token_ids" not in str(parts)
