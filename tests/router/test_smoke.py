"""Completions and chat, streaming and not, through HTTP and gRPC against the fake pools."""

import asyncio

import openai

from headrace.router.testing import running_stack


async def test_completion_is_the_same_with_and_without_stream() -> None:
    async with running_stack() as stack:
        client = openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)
        whole = await client.completions.create(model="nano", prompt="def fib(n):\n    return", max_tokens=20)
        stream = await client.completions.create(
            model="nano",
            prompt="def fib(n):\n    return",
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, usage, finish = "", None, None
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.text
                finish = choice.finish_reason or finish
            usage = chunk.usage or usage
        assert text == whole.choices[0].text
        assert finish == whole.choices[0].finish_reason == "length"
        assert usage.completion_tokens == whole.usage.completion_tokens == 20
        await stack.idle()
        await asyncio.sleep(0)


async def test_chat() -> None:
    async with running_stack() as stack:
        client = openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)
        answer = await client.chat.completions.create(
            model="nano", messages=[{"role": "user", "content": "Hello there"}], max_tokens=30
        )
        print(answer)
        await stack.idle()
