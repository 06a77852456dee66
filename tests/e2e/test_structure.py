"""Structured output through the whole service: what the real model writes has the form that was asked for."""

import json
from typing import Any

import httpx
import jsonschema
import pytest

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "size": {"type": "integer", "maximum": 999, "minimum": 0},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "maxLength": 12},
                    "lines": {"type": "integer", "maximum": 99, "minimum": 0},
                },
                "required": ["path", "lines"],
            },
        },
    }
    for name in ("read_file", "write_file")
]
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}


def chat(url: str, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "def f("}], "max_tokens": 200, "seed": 5, **fields}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120.0, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@pytest.mark.parametrize("temperature", [0, 1])
def test_json_of_a_schema(quick_service, temperature) -> None:
    choice = chat(quick_service.url, response_format=FORMAT, temperature=temperature, **QUIET)
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_reasoning_runs_first_and_is_free(quick_service) -> None:
    answers = [chat(quick_service.url, response_format=FORMAT, seed=seed, max_tokens=400) for seed in range(3)]
    for choice in answers:
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        else:
            assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "write_file"}}])
def test_forced_tool_calls(quick_service, choice) -> None:
    for seed in range(2):
        got = chat(
            quick_service.url,
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            seed=seed,
            temperature=1,
            **QUIET,
        )
        assert got["finish_reason"] == "tool_calls"
        [call] = got["message"]["tool_calls"]
        assert call["function"]["name"] in (("write_file",) if choice != "required" else ("read_file", "write_file"))
        jsonschema.validate(json.loads(call["function"]["arguments"]), TOOLS[0]["function"]["parameters"])
        assert not got["message"]["content"]


def test_anthropic_and_completions(quick_service) -> None:
    url = quick_service.url
    tools = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TOOLS]
    ask = {"max_tokens": 200, "messages": [{"role": "user", "content": "x = "}], "tools": tools}
    forced = {"type": "any", "disable_parallel_tool_use": True}
    got = httpx.post(f"{url}/v1/messages", json={**ask, "tool_choice": forced}, timeout=120.0, trust_env=False).json()
    assert [block["type"] for block in got["content"]] == ["tool_use"]
    for fields, fits in (
        ({"structured_outputs": {"choice": ["red", "green"]}}, ("red", "green")),
        ({"guided_regex": "[0-9]{3}"}, [f"{n:03}" for n in range(1000)]),
    ):
        body = {"prompt": "colour =", "max_tokens": 30, **fields}
        text = httpx.post(f"{url}/v1/completions", json=body, timeout=120.0, trust_env=False).json()["choices"][0][
            "text"
        ]
        assert text in fits
