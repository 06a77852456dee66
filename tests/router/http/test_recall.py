"""An answer that a client sends back becomes the ids it was generated as, through every API and however it ended."""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import pytest

from headrace.messages import PrefillRequest
from headrace.model.nano import checkpoint_path
from headrace.router.fake import Script
from headrace.router.testing import Stack, running_stack
from headrace.router.tokens.tokenizer import Tokenizer

TOKENIZER = Tokenizer(checkpoint_path())
EOS, USER_ID = 3776, 3783
ASK: dict[str, Any] = {"role": "user", "content": "Tell me."}
MORE: dict[str, Any] = {"role": "user", "content": "And then?"}
PLAIN: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "read", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
    }
]


def letters(text: str) -> list[int]:
    """Never how the tokenizer would write words; added tokens stay themselves."""
    ids = TOKENIZER.encode(text)
    return [t for i in ids for t in ([i] if TOKENIZER.is_added(i) else map(byte_id, TOKENIZER.bytes_of(i)))]


BYTES = {TOKENIZER.bytes_of(i): i for i in range(TOKENIZER.size - 1, -1, -1)}


def byte_id(value: int) -> int:
    return BYTES[bytes([value])]


def writes(ids: Sequence[int]) -> Script:
    return lambda _prompt, index: ids[min(index, len(ids) - 1)]


def prompts(stack: Stack) -> list[list[int]]:
    """Token ids of the prompts that prefill has seen."""
    seen = [r for box in stack.prefill for r in box.seen if isinstance(r, PrefillRequest)]
    return [np.frombuffer(request.tokens, "<u4").tolist() for request in seen]


async def post(stack: Stack, path: str, fields: dict[str, Any], key: str = "k") -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=20) as client:
        headers = {"authorization": f"Bearer {key}"}
        response = await client.post(f"{stack.url}{path}", json=fields, headers=headers)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found


async def chat(stack: Stack, messages: list[Any], key: str = "k", **fields: Any) -> dict[str, Any]:
    body = await post(stack, "/v1/chat/completions", {"messages": messages, "max_tokens": 300, **fields}, key)
    message: dict[str, Any] = body["choices"][0]["message"]
    return message


def starts_with(ids: list[int], *parts: list[int]) -> bool:
    expected = [token for part in parts for token in part]
    return ids[: len(expected)] == expected


SENTENCE = "A long enough answer, written letter by letter: the quick brown fox jumps over the lazy dog."


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (letters(SENTENCE), letters(SENTENCE)),
        (letters(SENTENCE + " \n\n"), letters(SENTENCE)),
        (letters(SENTENCE[:-1]) + TOKENIZER.encode(".\n"), letters(SENTENCE)),
        (letters("日本語 é " + SENTENCE), letters("日本語 é " + SENTENCE)),
    ],
)
@pytest.mark.parametrize("end", [EOS, USER_ID])
async def test_the_next_turn_begins_with_prompt_and_answer(said: list[int], kept: list[int], end: int) -> None:
    async with running_stack(script=writes([*said, end])) as stack:
        answer = await chat(stack, [ASK], **PLAIN)
        await chat(stack, [ASK, answer, MORE], **PLAIN)
        first, second = prompts(stack)
        assert starts_with(second, first, kept, [USER_ID])
        names = [r.block_names for r in stack.prefill[0].seen]
        assert len(names[1]) > len(names[0])
        assert TOKENIZER.decode(second, skip_special=False).count(answer["content"].strip()) == 1


async def test_leading_white_space_only_costs_hits() -> None:
    async with running_stack(script=writes([*letters("  " + SENTENCE), EOS])) as stack:
        answer = await chat(stack, [ASK], **PLAIN)
        await chat(stack, [ASK, answer, MORE], **PLAIN)
        first, second = prompts(stack)
        assert starts_with(second, first, TOKENIZER.encode(SENTENCE), [USER_ID])


async def test_a_stop_string_cuts_what_is_remembered() -> None:
    said = letters("one two three") + TOKENIZER.encode(" STOPPED here") + letters("never seen")
    async with running_stack(script=writes([*said, EOS])) as stack:
        answer = await chat(stack, [ASK], stop="TOPP", **PLAIN)
        assert answer["content"] == "one two three S"
        await chat(stack, [ASK, answer, MORE], **PLAIN)
        first, second = prompts(stack)
        assert starts_with(second, first, letters("one two three"), TOKENIZER.encode(" S"), [USER_ID])


async def test_reasoning_and_calls_of_a_tool_loop() -> None:
    call = "<tool_call>read<arg_key>path</arg_key><arg_value>a/b.py</arg_value></tool_call>"
    said = letters(f"I should look at it.</think>I will read it.{call}")
    async with running_stack(script=writes([*said, 3785])) as stack:
        answer = await chat(stack, [ASK], tools=TOOLS)
        assert answer["tool_calls"]
        result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "text"}
        await chat(stack, [ASK, answer, result], tools=TOOLS)
        first, second = prompts(stack)
        assert starts_with(second, first, said, [3785])


async def test_reasoning_that_the_template_drops_is_not_remembered() -> None:
    async with running_stack(script=writes([*letters("Hm.</think>Yes."), EOS])) as stack:
        answer = await chat(stack, [ASK])
        await chat(stack, [ASK, answer, MORE])
        text = TOKENIZER.decode(prompts(stack)[1], skip_special=False)
        assert prompts(stack)[1] == TOKENIZER.encode(text)
        assert "Hm." not in text
        keep = {"chat_template_kwargs": {"clear_thinking": False}}
        answer = await chat(stack, [ASK], **keep)
        await chat(stack, [ASK, answer, MORE], **keep)
        assert starts_with(prompts(stack)[3], prompts(stack)[2], letters("Hm.</think>Yes."), [USER_ID])


async def test_tenants_do_not_share_ids() -> None:
    keys = {"api_keys": ["k=one", "q=two"]}
    async with running_stack(script=writes([*letters(SENTENCE), EOS]), router=keys) as stack:
        answer = await chat(stack, [ASK], **PLAIN)
        await chat(stack, [ASK, answer, MORE], key="q", **PLAIN)
        await chat(stack, [ASK, answer, MORE], key="k", **PLAIN)
        first, other, own = prompts(stack)
        assert starts_with(own, first, letters(SENTENCE))
        assert other == TOKENIZER.encode(TOKENIZER.decode(other, skip_special=False))


async def test_every_choice_comes_back_as_its_own_ids() -> None:
    ids = letters(SENTENCE)
    async with running_stack(script=writes([*ids, EOS])) as stack:
        body = await post(stack, "/v1/chat/completions", {"messages": [ASK], "n": 2, "max_tokens": 20, **PLAIN})
        for choice in body["choices"]:
            await chat(stack, [ASK, choice["message"], MORE], **PLAIN)
        assert all(starts_with(p, prompts(stack)[0], ids[:20], [USER_ID]) for p in prompts(stack)[2:])


async def read_until_quiet(stack: Stack, fields: dict[str, Any]) -> str:
    """What a client has seen of a streamed answer when the pool falls silent in the middle and the client leaves."""
    seen = ""
    async with httpx.AsyncClient(timeout=20) as client:
        with contextlib.suppress(TimeoutError):
            async with (
                asyncio.timeout(2),
                client.stream("POST", f"{stack.url}/v1/chat/completions", json=fields) as response,
            ):
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        seen += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
                    if len(seen) > 30:
                        for box in stack.decode:
                            box.step_s = 30.0
    return seen


async def test_an_aborted_answer_comes_back_as_far_as_it_was_seen() -> None:
    async with running_stack(script=writes([*letters(SENTENCE * 3), EOS])) as stack:
        for box in stack.decode:
            box.step_s = 0.02
        seen = await read_until_quiet(stack, {"messages": [ASK], "max_tokens": 300, "stream": True, **PLAIN})
        for box in stack.decode:
            box.step_s = 0.0
        assert 30 < len(seen) < len(SENTENCE)
        await post(stack, "/v1/chat/completions", {"messages": [ASK, assistant(seen), MORE], "max_tokens": 1, **PLAIN})
        await post(
            stack, "/v1/chat/completions", {"messages": [ASK, assistant(seen[:9]), MORE], "max_tokens": 1, **PLAIN}
        )
        first, second, less = prompts(stack)
        assert starts_with(second, first, letters(seen.strip()), [USER_ID])
        assert starts_with(less, first, TOKENIZER.encode(seen[:9].strip()), [USER_ID])


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


async def test_raw_completions_go_on_with_prompt_and_answer() -> None:
    ids = letters(SENTENCE)
    async with running_stack(script=writes([*ids, EOS])) as stack:
        prompt = "<|user|>hi<|assistant|>"
        body = await post(stack, "/v1/completions", {"prompt": ["other", prompt], "max_tokens": 300, "echo": True})
        text = body["choices"][1]["text"]
        assert text == prompt + SENTENCE
        await post(stack, "/v1/completions", {"prompt": f"{text}<|user|>more", "max_tokens": 1})
        await post(stack, "/v1/completions", {"prompt": f"{text}more", "max_tokens": 1})
        apart, glued = prompts(stack)[-2:]
        assert apart == [*TOKENIZER.encode(prompt), *ids, *TOKENIZER.encode("<|user|>more")]
        assert glued == TOKENIZER.encode(f"{text}more")


async def test_anthropic_messages_with_thinking_and_a_call() -> None:
    call = "<tool_call>read<arg_key>path</arg_key><arg_value>a.py</arg_value></tool_call>"
    said = letters(f"I look.</think>Reading it now.{call}")
    tools = [{"name": "read", "input_schema": TOOLS[0]["function"]["parameters"]}]  # type: ignore[index]
    fields: dict[str, Any] = {"max_tokens": 300, "tools": tools, "thinking": {"type": "enabled"}}
    async with running_stack(script=writes([*said, 3785])) as stack:
        body = await post(stack, "/v1/messages", {**fields, "messages": [ASK]})
        result = {"type": "tool_result", "tool_use_id": body["content"][-1]["id"], "content": "text"}
        messages = [ASK, {"role": "assistant", "content": body["content"]}, {"role": "user", "content": [result]}]
        await post(stack, "/v1/messages", {**fields, "messages": messages})
        first, second = prompts(stack)
        assert starts_with(second, first, said, [3785])


async def test_it_can_be_switched_off() -> None:
    async with running_stack(script=writes([*letters(SENTENCE), EOS]), router={"known_text_bytes": 0}) as stack:
        answer = await chat(stack, [ASK], **PLAIN)
        await chat(stack, [ASK, answer, MORE], **PLAIN)
        second = prompts(stack)[1]
        assert second == TOKENIZER.encode(TOKENIZER.decode(second, skip_special=False))
