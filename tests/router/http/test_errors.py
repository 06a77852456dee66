"""What a client gets when something is wrong: status, OpenAI-shaped body, the field at fault; never a 500."""

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest

from headrace.router.testing import Stack, running_stack

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return dict(error)


BAD: list[tuple[str, dict[str, Any], int, str | None, str | None]] = [
    (COMPLETIONS, {"model": "gpt-4", "prompt": "x"}, 404, "model", "model_not_found"),
    (COMPLETIONS, {"model": "nano"}, 400, "prompt", None),
    (COMPLETIONS, {"model": "nano", "prompt": []}, 400, "prompt", None),
    (COMPLETIONS, {"model": "nano", "prompt": ""}, 400, "prompt", None),
    (COMPLETIONS, {"model": "nano", "prompt": [1, "x"]}, 400, "prompt[0]", None),
    (COMPLETIONS, {"model": "nano", "prompt": [1, 99999999]}, 400, "prompt", None),
    (COMPLETIONS, {"model": "nano", "prompt": [True]}, 400, "prompt[0]", None),
    (COMPLETIONS, {"model": "nano", "prompt": "x", "max_tokens": "5"}, 400, "max_tokens", None),
    (COMPLETIONS, {"model": "nano", "prompt": "x", "max_tokens": 0}, 400, "max_tokens", None),
    (COMPLETIONS, {"model": "nano", "prompt": "x", "temperature": 2.5}, 400, "temperature", None),
    (COMPLETIONS, {"model": "nano", "prompt": "x", "stop": [""]}, 400, "stop.0", None),
    (COMPLETIONS, {"model": "nano", "prompt": "x", "n": 1000}, 400, "n", None),
    (COMPLETIONS, {"model": "nano", "prompt": "x", "stream": "yes"}, 400, "stream", None),
    (COMPLETIONS, {"model": "nano", "prompt": "x", "logit_bias": {"abc": 1}}, 400, "logit_bias", None),
    (COMPLETIONS, {"model": "nano", "prompt": "x", "suffix": "y"}, 400, "suffix", None),
    (COMPLETIONS, {"model": "nano", "prompt": "x", "min_tokens": 9, "max_tokens": 3}, 400, "min_tokens", None),
    (COMPLETIONS, {"model": "nano", "prompt": "x", "max_tokens": 70000}, 400, None, "context_length_exceeded"),
    (COMPLETIONS, {"model": "nano", "prompt": [1] * 65536}, 400, None, "context_length_exceeded"),
    (COMPLETIONS, {"model": "nano", "prompt": "\ud800"}, 400, None, None),
    (CHAT, {"model": "nano"}, 400, "messages", None),
    (CHAT, {"model": "nano", "messages": []}, 400, "messages", None),
    (CHAT, {"model": "nano", "messages": "hi"}, 400, "messages", None),
    (CHAT, {"model": "nano", "messages": [{"role": "alien", "content": "x"}]}, 400, "messages[0].role", None),
    (CHAT, {"model": "nano", "messages": [{"role": "user"}]}, 400, "messages[0].content", None),
    (CHAT, {"model": "nano", "messages": [USER], "tools": [{"type": "function"}]}, 400, "tools[0].function.name", None),
    (CHAT, {"model": "nano", "messages": [USER], "tool_choice": "required"}, 400, "tool_choice", None),
    *[
        (CHAT, {"model": "nano", "messages": [USER], **fields}, 400, param, None)
        for fields, param in (
            ({"response_format": {"type": "xml"}}, "response_format.type"),
            ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
            ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}}, None),
            ({"structured_outputs": {"regex": "(a"}}, None),
            ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
            ({"structured_outputs": {"words": ["b"]}}, "structured_outputs"),
            ({"guided_choice": []}, "guided_choice"),
            ({"guided_json": "{"}, "guided_json"),
            ({"guided_grammar": "start: nowhere"}, None),
            ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
            ({"tool_choice": "always"}, "tool_choice"),
            ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "some"}}}, "tool_choice"),
        )
    ],
    (CHAT, {"model": "nano", "messages": [USER], "temprature": 1}, 400, "temprature", None),
    (CHAT, {"model": "nano", "messages": [USER], "repetition_penalty": 1.1}, 400, "repetition_penalty", None),
    (CHAT, {"model": "nano", "messages": [USER], "modalities": ["audio"]}, 400, "modalities", None),
    (CHAT, {"model": "nano", "messages": [USER], "thinking": {"type": "x"}}, 400, "thinking.type", None),
    (COMPLETIONS, {"model": "nano", "prompt": "x", "messages": []}, 400, "messages", None),
    (CHAT, {"model": "nano", "messages": [USER], "top_logprobs": 3}, 400, "top_logprobs", None),
    (
        CHAT,
        {"model": "nano", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages[0].content",
        None,
    ),
    (
        CHAT,
        {"model": "nano", "messages": [USER], "chat_template_kwargs": {"enable_thinking": "no"}},
        400,
        "chat_template_kwargs.enable_thinking",
        None,
    ),
]


async def test_wrong_requests_name_the_field() -> None:
    async with running_stack() as stack, httpx.AsyncClient(base_url=stack.url) as client:
        for path, body, status, param, code in BAD:
            response = await client.post(path, content=json.dumps(body))
            assert response.status_code == status, (body, response.text)
            error = error_of(response)
            if param is not None:
                assert error["param"] == param, (body, error)
            if code is not None:
                assert error["code"] == code, (body, error)
        too_long = await client.post(COMPLETIONS, json={"model": "nano", "prompt": [1] * 65536})
        assert "65536" in error_of(too_long)["message"]
        assert stack.held() == 0


async def test_fields_that_change_nothing_are_taken() -> None:
    harmless = {"store": False, "metadata": {"a": "b"}, "repetition_penalty": 1.0, "cache_salt": "s", "lora_path": None}
    body = {"model": "nano", "messages": [USER], "max_tokens": 2, **harmless}
    async with running_stack() as stack, httpx.AsyncClient(base_url=stack.url) as client:
        assert (await client.post(CHAT, json=body)).status_code == 200
    async with running_stack(router={"unknown_fields": "ignore"}) as stack, httpx.AsyncClient() as client:
        assert (await client.post(stack.url + CHAT, json={**body, "temprature": 1})).status_code == 200


async def test_broken_bodies_paths_and_methods() -> None:
    async with running_stack(router={"max_body_bytes": 4096}) as stack, httpx.AsyncClient(base_url=stack.url) as client:
        nested = b"[" * 3000
        for content in (b"", b"{", b"[1]", b"\xff\xfe", b"null", nested, b'{"prompt": ' + b"9" * 4000):
            assert (await client.post(COMPLETIONS, content=content)).status_code == 400
        large = await client.post(COMPLETIONS, content=b" " * 5000)
        assert large.status_code == 413
        error_of(large)

        async def chunks():  # type: ignore[no-untyped-def]
            for _ in range(10):
                yield b" " * 1000

        assert (await client.post(COMPLETIONS, content=chunks())).status_code == 413
        wrong_method = await client.get(COMPLETIONS)
        assert wrong_method.status_code == 405
        assert "POST" in wrong_method.headers["allow"]
        error_of(wrong_method)
        missing = await client.post("/v1/nothing")
        assert missing.status_code == 404
        error_of(missing)
        assert (await client.get("/v1/models/other")).status_code == 404
        assert (await client.get("/v1/models/nano")).json()["id"] == "nano"


async def test_the_official_client_raises_its_own_errors() -> None:
    async with running_stack() as stack:
        client = openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as long:
            await client.completions.create(model="nano", prompt="x", max_tokens=10**6)
        assert long.value.code == "context_length_exceeded"


async def test_an_error_after_the_first_byte_is_a_typed_event() -> None:
    async with running_stack(ranks=1, router={"request_timeout_s": 1.0}) as stack:
        client = openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)
        stack.decode[0].step_s = 0.2
        stream = await client.completions.create(model="nano", prompt="abc", max_tokens=500, stream=True)
        with pytest.raises(openai.APIError, match="not finished after"):
            async for _ in stream:
                pass
        await stack.idle()


async def test_429_only_when_there_is_no_room_and_no_place_in_the_queue() -> None:
    async with running_stack(ranks=1) as stack, httpx.AsyncClient(base_url=stack.url) as client:
        admission = stack.router.placer.admission
        admission._queue_limit = 1
        stack.decode[0].step_s = 0.05
        room = admission.rooms["decode-0.0"]
        body = {"model": "nano", "prompt": [5] * 10, "max_tokens": (room.blocks - 2) * 64, "ignore_eos": True}
        running = asyncio.create_task(client.post(COMPLETIONS, json=body, timeout=30))
        await _until(lambda: bool(stack.decode[0].held))
        waiting = asyncio.create_task(client.post(COMPLETIONS, json={**body, "max_tokens": 640}, timeout=30))
        await _until(lambda: admission.queued == 1)
        refused = await client.post(COMPLETIONS, json={**body, "max_tokens": 640})
        assert refused.status_code == 429
        assert error_of(refused)["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        fits = await client.post(COMPLETIONS, json={**body, "max_tokens": 3}, timeout=30)
        assert fits.status_code == 200, fits.text
        running.cancel()
        stack.decode[0].step_s = 0.0
        assert (await waiting).status_code == 200
        await stack.idle()


async def test_what_never_fits_is_a_400() -> None:
    async with running_stack() as stack, httpx.AsyncClient(base_url=stack.url) as client:
        for room in stack.router.placer.admission.rooms.values():
            room.blocks = 10
        response = await client.post(COMPLETIONS, json={"model": "nano", "prompt": "x", "max_tokens": 1000})
        assert response.status_code == 400
        assert "10" in error_of(response)["message"]


async def test_too_many_in_the_house() -> None:
    async with running_stack(router={"max_inflight": 1}) as stack, httpx.AsyncClient(base_url=stack.url) as client:
        stack.prefill[0].compute_s = 0.5
        first = asyncio.create_task(client.post(COMPLETIONS, json={"model": "nano", "prompt": "x", "max_tokens": 1}))
        await _until(lambda: stack.router.service.inflight == 1)
        assert (await client.post(COMPLETIONS, json={"model": "nano", "prompt": "x"})).status_code == 429
        assert (await first).status_code == 200
        await stack.idle()


async def _until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


def random_value(dice: random.Random, depth: int = 0) -> Any:
    kind = dice.randrange(10 if depth < 3 else 7)
    if kind == 7:
        return [random_value(dice, depth + 1) for _ in range(dice.randrange(4))]
    if kind >= 8:
        return {dice.choice("abcdef"): random_value(dice, depth + 1) for _ in range(dice.randrange(4))}
    return dice.choice(
        [None, True, 0, -1, 3, 2**70, 1.5, -0.0, 1e308, "", "x", "\u0000", "\ud800", "日", "<think>", "[gMASK]", "user"]
    )


async def test_some_hundred_malformed_bodies_never_give_a_500() -> None:
    dice = random.Random(11)
    async with running_stack(script=soon_over) as stack, httpx.AsyncClient(base_url=stack.url, timeout=20) as client:
        for i in range(500):
            path, body = random_request(dice)
            content = json.dumps(body).encode()
            if i % 5 == 0:
                cut = dice.randrange(len(content) + 1)
                content = (
                    content[:cut] + bytes(dice.randrange(256) for _ in range(dice.randrange(5))) + content[cut + 1 :]
                )
            response = await client.post(path, content=content)
            assert response.status_code < 500, (path, body, response.text)
            if response.status_code >= 400:
                error_of(response)
        await stack.idle()


FIELDS = [
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "seed", "n",
    "logit_bias", "logprobs", "top_logprobs", "stream", "stream_options", "echo", "tools", "tool_choice", "messages",
    "prompt", "model", "reasoning_effort", "chat_template_kwargs", "response_format", "presence_penalty", "best_of",
    "ignore_eos", "tokens",
]  # fmt: skip


def soon_over(prompt: Sequence[int], index: int) -> int:
    return prompt[index % len(prompt)] if index < 5 else 3776


def random_request(dice: random.Random) -> tuple[str, dict[str, Any]]:
    path = dice.choice([CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
    body: dict[str, Any] = {"model": "nano", "max_tokens": 4}
    if path == COMPLETIONS:
        body["prompt"] = "hello"
    elif path == CHAT:
        message = {**USER, dice.choice(["content", "role", "tool_calls", "name"]): random_value(dice)}
        body["messages"] = [USER, dice.choice([USER, message, random_value(dice)])]
    for _ in range(dice.randrange(4)):
        body[dice.choice(FIELDS)] = random_value(dice)
    return path, body


async def test_half_sent_requests_leave_nothing() -> None:
    async with running_stack() as stack:
        await _half_sent(stack)
        await stack.idle()


async def _half_sent(stack: Stack) -> None:
    host, port = stack.url.removeprefix("http://").split(":")
    for text in (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
        b"GET / HT",
        b"\x16\x03\x01",
    ):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(text)
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.close()
