"""OpenAI's responses API through the official client: events put together = whole, items come back and hit, errors."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest

from headrace.errors import RankLost
from headrace.model.nano import checkpoint_path
from headrace.router.fake import Script
from headrace.router.testing import Stack, running_stack
from headrace.router.tokens.tokenizer import Tokenizer

TOKENIZER = Tokenizer(checkpoint_path())
EOS = 3776
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "read",
        "description": "Read a file",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}},
        "strict": True,
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


def client_of(stack: Stack) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)


def without_ids(value: Any) -> Any:
    """What two runs of the same request must share."""
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in ("id", "call_id", "created_at", "completed_at")}
    return [without_ids(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("script", "fields"),
    [
        (says(CALL), {"tools": TOOLS}),
        (says(CALL), {"tools": TOOLS, "max_output_tokens": 20}),
        (says(CALL), {"tools": TOOLS, "max_output_tokens": 1}),
        (says("Hello there</think>you"), {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
        (says("plain"), {"reasoning": {"effort": "none"}, "instructions": "Be brief.", "metadata": {"a": "b"}}),
        (says(""), {"reasoning": {"effort": "none"}}),
    ],
)
async def test_events_put_together_are_the_whole_response(script: Script, fields: dict[str, Any]) -> None:
    async with running_stack(script=script) as stack:
        client = client_of(stack)
        ask: dict[str, Any] = {"model": "nano", "input": "look " * 100, "store": False, **fields}
        whole = await client.responses.create(**ask)
        kinds, numbers, texts = [], [], {}
        async for event in await client.responses.create(**ask, stream=True):
            kinds.append(event.type)
            numbers.append(event.sequence_number)
            if event.type.endswith(".delta"):
                texts[event.output_index] = texts.get(event.output_index, "") + event.delta
        final = event.response
        left, right = without_ids(whole.model_dump()), without_ids(final.model_dump())
        for one in (left, right):  # the second run hits what the first computed
            one["usage"].pop("input_tokens_details")
        assert left == right
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == f"response.{whole.status}"
        assert numbers == list(range(len(numbers)))
        for i, item in enumerate(final.output):
            text = item.arguments if item.type == "function_call" else item.content[0].text
            assert texts.get(i, "") == text
        assert (
            kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == len(final.output)
        )
        assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
        await stack.idle()


async def test_a_turn_that_comes_back_as_items_hits_prompt_and_answer() -> None:
    async with running_stack(script=says(CALL)) as stack:
        client = client_of(stack)
        turn: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "look " * 100}]}]
        ask: dict[str, Any] = {"model": "nano", "tools": TOOLS, "store": False}
        first = await client.responses.create(input=turn, **ask)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        assert json.loads(first.output[2].arguments) == {"path": "日.py", "lines": 7}
        turn += [item.model_dump(exclude_none=True) for item in first.output]
        turn.append({"type": "function_call_output", "call_id": first.output[2].call_id, "output": "the file"})
        second = await client.responses.create(input=turn, **ask)
        prompts = [request.tokens for request in stack.prefill[0].seen]
        assert prompts[1].startswith(prompts[0])
        assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens // 64 * 64


async def test_what_is_wrong_is_named() -> None:
    async with running_stack() as stack, httpx.AsyncClient(base_url=stack.url) as client:
        for fields, param in (
            ({}, "input"),
            ({"input": []}, "input"),
            ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
            ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
            ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
            ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]"),
            ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
            ({"input": "x", "background": True}, "background"),
            ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
            ({"input": "x", "tool_choice": "required"}, "tool_choice"),
            ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.json_schema.schema"),
            ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ):
            answer = await client.post("/v1/responses", json={"model": "nano", **fields})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_a_failure_after_the_first_token_is_a_failed_response() -> None:
    async with running_stack(ranks=1) as stack:
        stack.decode[0].fail_next = [RankLost("gone")] * 99
        ask: dict[str, Any] = {"model": "nano", "input": "x", "max_output_tokens": 9, "stream": True}
        # Retries go on until the deadline.
        stack.router.service.config = dataclasses.replace(stack.router.service.config, request_timeout_s=1.0)
        post = httpx.AsyncClient(base_url=stack.url, timeout=30)
        async with post as client, client.stream("POST", "/v1/responses", json=ask) as answer:
            kinds = [line[7:] async for line in answer.aiter_lines() if line.startswith("event: ")]
        assert kinds[-1] == "response.failed"
