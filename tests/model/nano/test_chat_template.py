"""The chat template renders every case as GLM-5.2's does."""

import json
from typing import Any

import jinja2.sandbox
import pytest

from headrace.model.nano import checkpoint_path

MAX = "[gMASK]<sop><|system|>Reasoning Effort: Max"
PLAIN = "[gMASK]<sop>"
USER = {"role": "user", "content": "U"}
TOOL = {
    "type": "function",
    "strict": True,
    "function": {
        "name": "read",
        "description": "Lit « é »",
        "strict": True,
        "parameters": {"type": "object", "properties": {}},
    },
}


def render(messages: list[dict[str, Any]], **options: Any) -> str:
    """Renders as servers do: sandboxed, block lines trimmed, JSON not escaped for HTML."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, ensure_ascii=True: json.dumps(value, ensure_ascii=ensure_ascii)
    template = environment.from_string((checkpoint_path() / "chat_template.jinja").read_text())
    return template.render(messages=messages, **options)


def test_thinking_is_on_by_default():
    assert render([USER], add_generation_prompt=True) == f"{MAX}<|user|>U<|assistant|><think>"
    assert render([USER], enable_thinking=True) == f"{MAX}<|user|>U"


def test_thinking_off_has_no_effort_block():
    text = render([USER], enable_thinking=False, reasoning_effort="high", add_generation_prompt=True)
    assert text == f"{PLAIN}<|user|>U<|assistant|><think></think>"


@pytest.mark.parametrize(("effort", "word"), [("high", "High"), ("max", "Max"), ("low", "Max"), (None, "Max")])
def test_effort_levels(effort, word):
    assert render([USER], reasoning_effort=effort) == f"{PLAIN}<|system|>Reasoning Effort: {word}<|user|>U"


def test_system_message_follows_the_effort_block():
    assert render([{"role": "system", "content": "S"}, USER]) == f"{MAX}<|system|>S<|user|>U"


def test_tools_block_lists_one_json_object_a_line_without_flags():
    text = render([USER], tools=[TOOL, TOOL], enable_thinking=False)
    head, rest = text.split("<tools>\n")
    listed, tail = rest.split("</tools>")
    assert head.startswith(f"{PLAIN}<|system|>\n# Tools\n\nYou may call one or more functions")
    lines = listed.splitlines()
    assert len(lines) == 2
    expected = {"type": "function", "function": {k: v for k, v in TOOL["function"].items() if k != "strict"}}
    assert json.loads(lines[0]) == expected
    assert "«" in lines[0]
    assert tail.endswith("<|user|>U")


def test_deferred_loading_flag_is_dropped_from_bare_tools():
    text = render([USER], tools=[{"name": "f", "defer_loading": True, "description": "<b>&"}])
    assert '{"name": "f", "description": "<b>&"}\n' in text


def test_old_reasoning_is_dropped_and_recent_kept():
    turn = {"role": "assistant", "reasoning_content": " R ", "content": "  A\n"}
    assert render([USER, turn, USER], enable_thinking=False) == (
        f"{PLAIN}<|user|>U<|assistant|><think></think>A<|user|>U"
    )
    assert render([USER, turn], enable_thinking=False) == f"{PLAIN}<|user|>U<|assistant|><think>R</think>A"


def test_clear_thinking_false_keeps_old_reasoning():
    turn = {"role": "assistant", "reasoning_content": "R", "content": "A"}
    text = render([USER, turn, USER], enable_thinking=False, clear_thinking=False)
    assert text == f"{PLAIN}<|user|>U<|assistant|><think>R</think>A<|user|>U"
    assert render([USER, turn, USER], enable_thinking=False, clear_thinking=True).count("R") == 0


def test_reasoning_inside_the_content_is_recognised():
    turn = {"role": "assistant", "content": "<think>R</think>\nA"}
    assert render([USER, turn], enable_thinking=False) == f"{PLAIN}<|user|>U<|assistant|><think>R</think>A"
    assert render([USER, turn, USER], enable_thinking=False).count("R") == 0


def test_tool_loop_keeps_reasoning_and_groups_results():
    call = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "R",
        "tool_calls": [
            {
                "id": "1",
                "type": "function",
                "function": {"name": "f", "arguments": {"s": "a b", "n": 3, "l": ["é", None]}},
            },
            {"name": "g", "arguments": {}},
        ],
    }
    results = [{"role": "tool", "tool_call_id": "1", "content": "one"}, {"role": "tool", "content": "two"}]
    text = render([USER, call, *results], enable_thinking=False, add_generation_prompt=True)
    assert text == (
        f"{PLAIN}<|user|>U<|assistant|><think>R</think>"
        "<tool_call>f<arg_key>s</arg_key><arg_value>a b</arg_value><arg_key>n</arg_key><arg_value>3</arg_value>"
        '<arg_key>l</arg_key><arg_value>["é", null]</arg_value></tool_call><tool_call>g</tool_call>'
        "<|observation|><tool_response>one</tool_response><tool_response>two</tool_response>"
        "<|assistant|><think></think>"
    )


def test_two_runs_of_results_get_two_observations():
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]}
    tool = {"role": "tool", "content": "x"}
    assert render([USER, call, tool, call, tool]).count("<|observation|>") == 2


def test_content_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "x"}, {"type": "text", "text": "b"}]
    assert render([{"role": "user", "content": parts}], enable_thinking=False) == f"{PLAIN}<|user|>ab"


def test_a_longer_conversation_extends_the_shorter_one_inside_a_tool_loop():
    calls = [{"name": "f", "arguments": {}}]
    call = {"role": "assistant", "content": "", "reasoning_content": "R", "tool_calls": calls}
    tool = {"role": "tool", "content": "x"}
    first = render([USER, call, tool])
    assert render([USER, call, tool, call, tool]).startswith(first)
