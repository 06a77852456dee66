"""The service through litellm, as tools that speak to many providers use it."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.model.nano import checkpoint_path
from headrace.router.fake import Script
from headrace.router.testing import running_stack
from headrace.router.tokens.tokenizer import Tokenizer

litellm = pytest.importorskip("litellm")
TOKENIZER = Tokenizer(checkpoint_path())
EOS = 3776
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "read", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
    }
]
CALL = "Look.</think>Reading.<tool_call>read<arg_key>path</arg_key><arg_value>a.py</arg_value></tool_call>"


def says(text: str) -> Script:
    ids = [*TOKENIZER.encode(text), EOS]

    def script(prompt: Sequence[int], index: int) -> int:
        return ids[min(index, len(ids) - 1)]

    return script


def target(url: str, provider: str) -> dict[str, Any]:
    base = url if provider == "anthropic" else f"{url}/v1"
    return {"model": f"{provider}/nano", "api_base": base, "api_key": "k", "num_retries": 0}


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
async def test_chat_with_tools_stream_equals_whole(provider: str) -> None:
    async with running_stack(script=says(CALL)) as stack:
        ask: dict[str, Any] = {
            **target(stack.url, provider),
            "messages": [{"role": "user", "content": "look"}],
            "tools": TOOLS,
            "max_tokens": 2000,
        }
        if provider == "anthropic":
            ask |= {"thinking": {"type": "enabled", "budget_tokens": 1024}, "allowed_openai_params": ["thinking"]}
        whole = await litellm.acompletion(**ask)
        message = whole.choices[0].message
        assert message.content == "Reading."
        assert message.reasoning_content == "Look."
        assert json.loads(message.tool_calls[0].function.arguments) == {"path": "a.py"}
        assert whole.choices[0].finish_reason == "tool_calls"
        chunks = [chunk async for chunk in await litellm.acompletion(**ask, stream=True)]
        built = litellm.stream_chunk_builder(chunks)
        assert built.choices[0].message.content == "Reading."
        assert json.loads(built.choices[0].message.tool_calls[0].function.arguments) == {"path": "a.py"}
        assert built.choices[0].finish_reason == "tool_calls"


async def test_text_completions_responses_and_errors() -> None:
    async with running_stack(script=says("Done.")) as stack:
        text = await litellm.atext_completion(**target(stack.url, "text-completion-openai"), prompt="x", max_tokens=9)
        assert text.choices[0].text == "Done."
        ask = {**target(stack.url, "openai"), "input": "x", "reasoning": {"effort": "none"}}
        answer = await litellm.aresponses(**ask)
        assert answer.output[0].content[0].text == "Done."
        with pytest.raises(litellm.BadRequestError):
            await litellm.acompletion(
                **target(stack.url, "openai"), messages=[{"role": "user", "content": "x"}], temperature=9
            )
        wrong = {**target(stack.url, "openai"), "model": "openai/other"}
        with pytest.raises(litellm.NotFoundError):
            await litellm.acompletion(**wrong, messages=[{"role": "user", "content": "x"}])
