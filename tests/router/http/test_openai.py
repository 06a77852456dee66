"""The OpenAI endpoints through the official client: stream = whole, choices, stops, logprobs, usage, tools."""

import json
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from headrace.model.nano import checkpoint_path
from headrace.router.fake import Script
from headrace.router.testing import Stack, running_stack
from headrace.router.tokens.tokenizer import Tokenizer

TOKENIZER = Tokenizer(checkpoint_path())
EOS = 3776


def says(text: str) -> Script:
    """A model that answers `text` and ends its turn."""
    ids = [*TOKENIZER.encode(text), EOS]

    def script(prompt: Sequence[int], index: int) -> int:
        return ids[min(index, len(ids) - 1)]

    return script


def client_of(stack: Stack) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)


async def both_completions(client: openai.AsyncOpenAI, **fields: Any) -> tuple[Any, dict[int, dict[str, Any]], Any]:
    """(whole answer, choices put together from the stream, usage of the stream)."""
    whole = await client.completions.create(**fields)
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    stream = await client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    async for chunk in stream:
        usage = chunk.usage or usage
        for part in chunk.choices:
            found = choices.setdefault(part.index, {"text": "", "finish": None, "logprobs": []})
            found["text"] += part.text
            found["finish"] = part.finish_reason or found["finish"]
            if part.logprobs:
                found["logprobs"] += zip(part.logprobs.tokens, part.logprobs.token_logprobs, part.logprobs.text_offset)
    return whole, choices, usage


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "hello world, this is", "max_tokens": 1},
        {"prompt": "hello world, this is", "max_tokens": 2},
        {"prompt": ["first prompt", "second longer prompt"], "max_tokens": 17, "n": 2},
        {"prompt": [5, 6, 7, 8], "max_tokens": 9, "logprobs": 2},
        {"prompt": [[5, 6], [7, 8, 9]], "max_tokens": 9, "echo": True},
        {"prompt": "日本語 👩‍👩‍👧 text", "max_tokens": 40},
        {"prompt": "one two three STOP four", "max_tokens": 40, "stop": ["ee STO", "zzz"]},
    ],
)
async def test_completions_stream_equals_whole(fields: dict[str, Any]) -> None:
    async with running_stack() as stack:
        whole, choices, usage = await both_completions(client_of(stack), model="nano", **fields)
        assert len(whole.choices) == len(choices)
        for choice in whole.choices:
            streamed = choices[choice.index]
            assert streamed["text"] == choice.text
            assert streamed["finish"] == choice.finish_reason
            if choice.logprobs:
                logprobs = choice.logprobs
                assert streamed["logprobs"] == list(zip(logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset))
                assert len(logprobs.tokens) == usage.completion_tokens
        assert usage.completion_tokens == whole.usage.completion_tokens
        assert usage.prompt_tokens == whole.usage.prompt_tokens
        await stack.idle()


async def test_a_stop_string_over_the_prefill_border_is_cut() -> None:
    prompt = "ab cd ef gh"
    ids = TOKENIZER.encode(prompt)
    first, second = (TOKENIZER.decode([i]) for i in ids[:2])
    async with running_stack() as stack:
        answer = await client_of(stack).completions.create(
            model="nano", prompt=prompt, max_tokens=30, stop=[first[-1] + second[0]]
        )
        assert answer.choices[0].text == first[:-1]
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens == 2
        await stack.idle()


async def test_usage_tells_true_hits() -> None:
    async with running_stack() as stack:
        client = client_of(stack)
        prompt = list(range(5, 205))
        cold = await client.completions.create(model="nano", prompt=prompt, max_tokens=3)
        _, _, usage = await both_completions(client, model="nano", prompt=prompt, max_tokens=3)
        assert cold.usage.prompt_tokens_details.cached_tokens == 0
        assert usage.prompt_tokens_details.cached_tokens == 192
        assert usage.prompt_tokens_details.cached_tokens_by_tier == {"device": 0, "host": 192}
        full = list(range(5, 133))
        await client.completions.create(model="nano", prompt=full, max_tokens=1)
        again = await client.completions.create(model="nano", prompt=full, max_tokens=1, n=2)
        assert again.usage.prompt_tokens_details.cached_tokens == 127
        assert again.usage.prompt_tokens == 128


async def test_siblings_start_after_the_first_so_that_they_hit() -> None:
    async with running_stack() as stack:
        prompt = list(range(5, 205))
        await client_of(stack).completions.create(model="nano", prompt=prompt, max_tokens=4, n=3)
        seen = stack.prefill[0].seen
        assert [r.sampling.choice for r in seen] == [0, 1, 2]
        assert len({r.sampling.seed for r in seen}) == 1
        assert len({r.request_id for r in seen}) == 3


TOOLS = [
    {
        "type": "function",
        "function": {"name": "read", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
    }
]
CALLS = (
    "Let me look.</think>I will read it.\n"
    "<tool_call>read<arg_key>path</arg_key><arg_value>a/b.py</arg_value></tool_call>"
    "<tool_call>read<arg_key>path</arg_key><arg_value>日本.py</arg_value></tool_call>"
)


async def stream_message(client: openai.AsyncOpenAI, **fields: Any) -> tuple[dict[str, Any], Any]:
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None, "logprobs": []}
    usage = None
    stream = await client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    async for chunk in stream:
        usage = chunk.usage or usage
        for part in chunk.choices:
            message["content"] += part.delta.content or ""
            message["reasoning"] += getattr(part.delta, "reasoning_content", None) or ""
            message["finish"] = part.finish_reason or message["finish"]
            for call in part.delta.tool_calls or []:
                if call.id:
                    message["calls"].append([call.function.name, ""])
                message["calls"][call.index][1] += call.function.arguments or ""
            if part.logprobs:
                message["logprobs"] += [entry.token for entry in part.logprobs.content]
    return message, usage


async def test_chat_reasoning_and_tool_calls_stream_equals_whole() -> None:
    async with running_stack(script=says(CALLS)) as stack:
        client = client_of(stack)
        fields: dict[str, Any] = {
            "model": "nano",
            "messages": [{"role": "user", "content": "read both"}],
            "tools": TOOLS,
            "max_completion_tokens": 400,
            "logprobs": True,
            "top_logprobs": 1,
        }
        whole = await client.chat.completions.create(**fields)
        streamed, usage = await stream_message(client, **fields)
        choice = whole.choices[0]
        assert choice.message.content == streamed["content"] == "I will read it."
        assert choice.message.reasoning_content == streamed["reasoning"] == "Let me look."
        assert choice.finish_reason == streamed["finish"] == "tool_calls"
        calls = [[c.function.name, c.function.arguments] for c in choice.message.tool_calls]
        assert calls == streamed["calls"]
        assert [json.loads(a)["path"] for _, a in calls] == ["a/b.py", "日本.py"]
        assert [entry.token for entry in choice.logprobs.content] == streamed["logprobs"]
        assert len(streamed["logprobs"]) == usage.completion_tokens
        assert whole.usage.completion_tokens_details == usage.completion_tokens_details
        reasoning = usage.completion_tokens_details.reasoning_tokens
        assert reasoning == len(TOKENIZER.encode("Let me look.</think>"))


async def test_thinking_switched_off_starts_with_content() -> None:
    async with running_stack(script=says("Plain answer.")) as stack:
        for extra in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
            answer = await client_of(stack).chat.completions.create(
                model="nano", messages=[{"role": "user", "content": "hi"}], max_tokens=50, extra_body=extra
            )
            assert answer.choices[0].message.content == "Plain answer."
            assert answer.choices[0].finish_reason == "stop"
            assert getattr(answer.choices[0].message, "reasoning_content", None) is None


async def test_a_conversation_with_tool_results_is_taken() -> None:
    async with running_stack(script=says("done</think>ok")) as stack:
        client = client_of(stack)
        first = await client.chat.completions.create(
            model="nano", messages=[{"role": "user", "content": "hi"}], max_tokens=50
        )
        messages: list[Any] = [
            {"role": "developer", "content": [{"type": "text", "text": "rules"}]},
            {"role": "user", "content": "hi"},
            first.choices[0].message.model_dump(exclude_none=True),
            {"role": "user", "content": "again"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "text"},
        ]
        answer = await client.chat.completions.create(model="nano", messages=messages, max_tokens=50, tools=TOOLS)
        assert answer.choices[0].message.content == "ok"


async def test_sampling_fields_reach_the_engine() -> None:
    async with running_stack() as stack:
        await client_of(stack).completions.create(
            model="nano",
            prompt="abc",
            max_tokens=2,
            temperature=0,
            top_p=0.5,
            presence_penalty=1,
            frequency_penalty=-1,
            seed=-3,
            logit_bias={"7": 5},
            extra_body={"top_k": 3, "min_p": 0.25, "min_tokens": 1, "ignore_eos": True, "stop_token_ids": [11]},
        )
        got = stack.prefill[0].seen[0].sampling
        assert (got.temperature, got.top_p, got.top_k, got.min_p) == (0.0, 0.5, 3, 0.25)
        assert (got.presence_penalty, got.frequency_penalty, got.min_tokens) == (1.0, -1.0, 1)
        assert got.logit_bias == {7: 5.0}
        assert got.stop_token_ids == (11,)
        assert got.seed == (-3) % (1 << 63)


async def test_an_echo_with_logprobs_scores_the_prompt() -> None:
    async with running_stack() as stack:
        client = client_of(stack)
        ask: dict[str, Any] = {"model": "nano", "prompt": "one two three", "echo": True, "logprobs": 1}
        length = len(TOKENIZER.encode("one two three"))
        for limit in (0, 1, 5):
            [choice] = (answer := await client.completions.create(**ask, max_tokens=limit)).choices
            assert choice.text.startswith("one two three")
            assert len(choice.logprobs.tokens) == length + limit
            assert "".join(choice.logprobs.tokens[:length]) == "one two three"
            assert choice.logprobs.token_logprobs[0] is None
            assert choice.logprobs.top_logprobs[0] is None
            assert choice.logprobs.token_logprobs[1] == -0.25
            assert answer.usage.completion_tokens == limit
            assert answer.usage.prompt_tokens_details.cached_tokens == 0
        assert not (await client.completions.create(**ask, max_tokens=0)).choices[0].text[len("one two three") :]
        with pytest.raises(openai.BadRequestError, match="8192"):
            await client.completions.create(**{**ask, "prompt": [5] * 9000}, max_tokens=1)
        with pytest.raises(openai.BadRequestError, match="echo"):
            await client.completions.create(model="nano", prompt="x", max_tokens=0)
        await stack.idle()
