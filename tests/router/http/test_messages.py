"""Anthropic's API through its official client: streaming = whole, thinking, tools, usage, errors."""

import json
from collections.abc import Sequence
from typing import Any

import anthropic
import httpx
import pytest

from headrace.model.nano import checkpoint_path
from headrace.router.fake import Script
from headrace.router.testing import Stack, running_stack
from headrace.router.tokens.tokenizer import Tokenizer

TOKENIZER = Tokenizer(checkpoint_path())
EOS = 3776
TOOLS: list[Any] = [
    {
        "name": "read",
        "description": "Read a file",
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}},
        "cache_control": {"type": "ephemeral"},
    }
]
CALL = (
    "I look.</think>Reading."
    "<tool_call>read<arg_key>path</arg_key><arg_value>日.py</arg_value>"
    "<arg_key>lines</arg_key><arg_value>7</arg_value></tool_call>"
)


def says(text: str) -> Script:
    ids = [*TOKENIZER.encode(text), EOS]

    def script(prompt: Sequence[int], index: int) -> int:
        return ids[min(index, len(ids) - 1)]

    return script


def client_of(stack: Stack) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=stack.url, api_key="none", max_retries=0)


async def test_thinking_text_and_a_tool_call_stream_equals_whole() -> None:
    async with running_stack(script=says(CALL)) as stack:
        fields: dict[str, Any] = {
            "model": "nano",
            "max_tokens": 2000,
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": [{"role": "user", "content": "look"}],
            "tools": TOOLS,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }
        whole = await client_of(stack).messages.create(**fields)
        async with client_of(stack).messages.stream(**fields) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_message()
        assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
        assert whole.content[2].input == {"path": "日.py", "lines": 7}
        assert whole.stop_reason == streamed.stop_reason == "tool_use"
        for a, b in zip(whole.content, streamed.content):
            assert a.model_dump(exclude={"id"}) == b.model_dump(exclude={"id", "parsed_output"})
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"
        assert whole.usage.output_tokens == streamed.usage.output_tokens
        await stack.idle()


async def test_a_tool_round_trip_and_cache_usage() -> None:
    async with running_stack(script=says("Done.")) as stack:
        client = client_of(stack)
        messages: list[Any] = [
            {"role": "user", "content": "look " * 200},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "Reading."},
                    {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "file"}]},
                    {"type": "text", "text": "and now?"},
                ],
            },
        ]
        fields: dict[str, Any] = {"model": "nano", "max_tokens": 100, "messages": messages, "tools": TOOLS}
        cold = await client.messages.create(**fields)
        warm = await client.messages.create(**fields)
        assert cold.content[0].text == "Done."
        assert cold.stop_reason == "end_turn"
        assert cold.usage.cache_read_input_tokens == 0
        assert warm.usage.cache_read_input_tokens > 100
        total = warm.usage.cache_read_input_tokens + warm.usage.cache_creation_input_tokens + warm.usage.input_tokens
        counted = await client.messages.count_tokens(model="nano", messages=messages, tools=TOOLS)
        assert counted.input_tokens == total


async def test_stop_sequences_and_limits_are_told() -> None:
    async with running_stack(script=says("one two three four")) as stack:
        client = client_of(stack)
        ask: dict[str, Any] = {"model": "nano", "messages": [{"role": "user", "content": "count"}]}
        stopped = await client.messages.create(**ask, max_tokens=50, stop_sequences=[" thr"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " thr")
        assert stopped.content[0].text == "one two"
        short = await client.messages.create(**ask, max_tokens=1)
        assert short.stop_reason == "max_tokens"
        assert short.usage.output_tokens == 1


async def test_errors_have_anthropics_shape() -> None:
    async with running_stack(router={"api_keys": ["k"]}) as stack:
        client = anthropic.AsyncAnthropic(base_url=stack.url, api_key="k", max_retries=0)
        ask: dict[str, Any] = {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(model="other", **ask)
        with pytest.raises(anthropic.AuthenticationError):
            await client_of(stack).messages.create(model="nano", **ask)
        async with httpx.AsyncClient(base_url=stack.url, headers={"x-api-key": "k"}) as plain:
            for body in (
                {"model": "nano", "messages": ask["messages"]},
                {**ask, "messages": [{"role": "robot", "content": "x"}]},
                {**ask, "messages": [{"role": "user", "content": [{"type": "image"}]}]},
                {**ask, "messages": [{"role": "user", "content": []}]},
                {**ask, "tools": [{"input_schema": {}}]},
                {**ask, "tool_choice": {"type": "any"}},
            ):
                response = await plain.post("/v1/messages", content=json.dumps(body))
                assert response.status_code == 400, response.text
                assert response.json()["type"] == "error"
                assert response.json()["error"]["type"] == "invalid_request_error"
