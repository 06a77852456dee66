"""Stream and non-stream agree on every field, over a grid of requests to all generating endpoints."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from headrace.model.nano import checkpoint_path
from headrace.router.fake import Script
from headrace.router.testing import running_stack
from headrace.router.tokens.tokenizer import Tokenizer

TOKENIZER = Tokenizer(checkpoint_path())
EOS = 3776
TEXTS = {
    "call": "Hm, 日本.</think>Reading it."
    "<tool_call>read<arg_key>path</arg_key><arg_value>ä.py</arg_value><arg_key>n</arg_key><arg_value>7</arg_value></tool_call>"
    "<tool_call>read<arg_key>path</arg_key><arg_value>b</arg_value></tool_call>",
    "text": "thinking</think>One two three, 👩‍👩‍👧 four five.\n",
    "empty": "",
}
FUNCTION = {
    "name": "read",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "integer"}}},
}
VOLATILE = {"id", "created", "created_at", "completed_at", "call_id", "request_id", "cached_tokens",
            "cached_tokens_by_tier", "cache_read_input_tokens", "cache_creation_input_tokens"}  # fmt: skip


def says(text: str) -> Script:
    ids = [*TOKENIZER.encode(text), EOS]

    def script(prompt: Sequence[int], index: int) -> int:
        return ids[min(index, len(ids) - 1)]

    return script


def stable(value: Any) -> Any:
    """Without what two runs of one request may differ in: ids, times, and hits, since the second run hits."""
    if isinstance(value, dict):
        return {k: stable(v) for k, v in value.items() if k not in VOLATILE}
    return [stable(v) for v in value] if isinstance(value, list) else value


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def joined_chat(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """A chat answer as a client puts it together from its chunks."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            found = choices.setdefault(
                part["index"], {"index": part["index"], "message": {"refusal": None, "content": None}, "logprobs": None}
            )
            message = found["message"]
            for key, value in part["delta"].items():
                if key == "tool_calls":
                    for call in value:
                        calls = message.setdefault("tool_calls", [])
                        if call["index"] == len(calls):
                            calls.append({"type": call["type"], "function": dict(call["function"])})
                        else:
                            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
                elif key == "role" or not value:
                    message.setdefault(key, value or None)
                else:
                    message[key] = (message.get(key) or "") + value
            if part["logprobs"]:
                found["logprobs"] = found["logprobs"] or {"content": [], "refusal": None}
                found["logprobs"]["content"] += part["logprobs"]["content"]
            for key in ("finish_reason", "stop_reason"):
                if part.get(key) is not None or key not in found:
                    found[key] = part.get(key)
            if "token_ids" in part:
                found["token_ids"] = found.get("token_ids", []) + part["token_ids"]
    head = {key: chunks[0][key] for key in ("model", "system_fingerprint")}
    ids = {"prompt_token_ids": chunks[0]["prompt_token_ids"]} if "prompt_token_ids" in chunks[0] else {}
    return {**head, **ids, "choices": [choices[i] for i in sorted(choices)], "usage": chunks[-1]["usage"]}


def joined_text(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    choices: dict[int, dict[str, Any]] = {}
    for part in (part for chunk in chunks for part in chunk["choices"]):
        found = choices.setdefault(part["index"], {**part, "text": "", "logprobs": None, "token_ids": []})
        found["text"] += part["text"]
        found["token_ids"] = found["token_ids"] + part.get("token_ids", [])
        if part["logprobs"]:
            found["logprobs"] = found["logprobs"] or {key: [] for key in part["logprobs"]}
            for key, values in part["logprobs"].items():
                found["logprobs"][key] = found["logprobs"][key] + values
        for key in ("finish_reason", "stop_reason"):
            found[key] = part[key] if part[key] is not None else found[key]
    for found in choices.values():
        if not found["token_ids"]:
            del found["token_ids"]
    head = {key: chunks[0][key] for key in ("object", "model", "system_fingerprint")}
    return {**head, "choices": [choices[i] for i in sorted(choices)], "usage": chunks[-1]["usage"]}


def joined_message(parts: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {}
    for event in parts:
        if event["type"] == "message_start":
            message = dict(event["message"])
        elif event["type"] == "content_block_start":
            message["content"].append(dict(event["content_block"]))
            arguments = ""
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], message["content"][event["index"]]
            if delta["type"] == "input_json_delta":
                arguments += delta["partial_json"]
            else:
                key = delta["type"].removesuffix("_delta")
                block[key] += delta[key]
        elif event["type"] == "content_block_stop" and message["content"][event["index"]]["type"] == "tool_use":
            complete = arguments.endswith("}")
            message["content"][event["index"]]["input"] = json.loads(arguments) if complete else {}
        elif event["type"] == "message_delta":
            message |= {**event["delta"], "usage": event["usage"]}
    return message


LIMITS = [{"max_tokens": 1}, {"max_tokens": 7}, {"max_tokens": 400}]
GRIDS: dict[str, list[list[dict[str, Any]]]] = {
    "/v1/chat/completions": [
        LIMITS,
        [{}, {"stop": ["two", "zz"]}, {"logprobs": True, "top_logprobs": 2, "n": 2}, {"return_token_ids": True}],
        [{}, {"tools": [{"type": "function", "function": FUNCTION}]}, {"reasoning_effort": "none"}],
    ],
    "/v1/completions": [
        LIMITS,
        [
            {},
            {"stop": ["two", "zz"]},
            {"logprobs": 2},
            {"echo": True, "n": 2},
            {"echo": True, "logprobs": 1, "n": 2},
            {"return_token_ids": True},
        ],
    ],
    "/v1/responses": [
        [{"max_output_tokens": 1}, {"max_output_tokens": 7}, {"max_output_tokens": 400}],
        [{}, {"tools": [{"type": "function", **FUNCTION}]}, {"include": ["message.output_text.logprobs"]}],
    ],
    "/v1/messages": [
        LIMITS,
        [{}, {"stop_sequences": ["two"]}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}],
        [{}, {"tools": [{"name": "read", "input_schema": FUNCTION["parameters"]}]}],
    ],
}


@pytest.mark.parametrize("text", list(TEXTS))
@pytest.mark.parametrize("path", list(GRIDS))
async def test_stream_equals_whole_on_every_field(path: str, text: str) -> None:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "look " * 40}]}
    if path == "/v1/completions":
        prompt = {"prompt": ["look " * 40, [5, 6, 7]]}
    elif path == "/v1/responses":
        prompt = {"input": "look " * 40}
    async with running_stack(script=says(TEXTS[text])) as stack, httpx.AsyncClient(base_url=stack.url) as client:
        for parts in itertools.product(*GRIDS[path]):
            body = {**prompt, "seed": 3} if path != "/v1/messages" else dict(prompt)
            for part in parts:
                body |= part
            whole = (await client.post(path, json=body)).json()
            streaming = {"stream": True}
            if path.endswith("completions"):
                streaming["stream_options"] = {"include_usage": True}  # type: ignore[assignment]
            found = events((await client.post(path, json={**body, **streaming})).text)
            if path == "/v1/chat/completions":
                joined, whole["object"] = joined_chat(found) | {"object": "chat.completion"}, whole["object"]
            elif path == "/v1/completions":
                joined = joined_text(found)
            elif path == "/v1/responses":
                joined = found[-1]["response"]
            else:
                joined = joined_message(found)
            assert stable(joined) == stable(whole), body
        await stack.idle()
