"""GLM output to reasoning, content and tool calls: the result never depends on how the text was cut."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.router.answers.arguments import ToolTypes
from headrace.router.answers.glm import CallArguments, CallStart, Content, GlmParser, Piece, Reasoning, merged

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "edit",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "line": {"type": "integer"},
                    "ratio": {"type": "number"},
                    "options": {"type": "object"},
                    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "mode": {"enum": ["r", "w"]},
                },
            },
        },
    }
]


def parse(chunks: list[str], *, in_reasoning: bool, tools: bool = True) -> dict[str, Any]:
    parser = GlmParser(in_reasoning=in_reasoning, tools=ToolTypes(TOOLS) if tools else None)
    pieces: list[Piece] = []
    for chunk in chunks:
        pieces += parser.push(chunk)
    pieces += parser.finish()
    return whole(pieces)


def whole(pieces: list[Piece]) -> dict[str, Any]:
    found: dict[str, Any] = {"reasoning": "", "content": "", "calls": []}
    for piece in merged(pieces):
        if isinstance(piece, Reasoning):
            found["reasoning"] += piece.text
        elif isinstance(piece, Content):
            found["content"] += piece.text
        elif isinstance(piece, CallStart):
            found["calls"].append([piece.name, ""])
        else:
            assert isinstance(piece, CallArguments)
            found["calls"][piece.index][1] += piece.text
    return found


def test_reasoning_content_and_a_typed_call() -> None:
    text = (
        'I should edit.</think>Editing now.\n<tool_call>edit<arg_key>path</arg_key><arg_value>a "b".py</arg_value>'
        '<arg_key>line</arg_key>\n<arg_value>12</arg_value><arg_key>options</arg_key><arg_value>{"x": [1]}</arg_value>'
        "</tool_call>\n<tool_call>edit</tool_call>"
    )
    found = parse([text], in_reasoning=True)
    assert found["reasoning"] == "I should edit."
    assert found["content"] == "Editing now."
    assert [name for name, _ in found["calls"]] == ["edit", "edit"]
    assert json.loads(found["calls"][0][1]) == {"path": 'a "b".py', "line": 12, "options": {"x": [1]}}
    assert found["calls"][1][1] == "{}"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("path", "12", "12"),
        ("path", "", ""),
        ("line", "12", 12),
        ("line", "twelve", "twelve"),
        ("ratio", "3", 3),
        ("maybe", "null", None),
        ("maybe", "true", "true"),
        ("mode", "w", "w"),
        ("unknown", '{"a": 1}', {"a": 1}),
        ("unknown", "plain text", "plain text"),
        ("unknown", "NaN", "NaN"),
        ("unknown", "1e999", "1e999"),
        ("ratio", "-1e999", "-1e999"),
        ("unknown", '{"a": [1e999]}', '{"a": [1e999]}'),
        ("unknown", '{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        ("unknown", '{"\\udc00": 1}', '{"\\udc00": 1}'),
        ("unknown", '"\\ud83d\\ude00"', '"\\ud83d\\ude00"'),
        ("options", '{"a": "\\ud83d\\ude00"}', {"a": "\U0001f600"}),
        ("path", "line one\nline \\n two é", "line one\nline \\n two é"),
    ],
)
def test_values_follow_the_schema(key: str, value: str, expected: Any) -> None:
    text = f"<tool_call>edit<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>"
    found = parse(list(text), in_reasoning=False)
    assert json.loads(found["calls"][0][1]) == {key: expected}


def test_a_call_inside_reasoning_ends_it() -> None:
    found = parse(["hmm <tool_call>edit</tool_call>"], in_reasoning=True)
    assert found == {"reasoning": "hmm ", "content": "", "calls": [["edit", "{}"]]}


def test_without_tools_a_call_is_text() -> None:
    found = parse(["x <tool_call>edit</tool_call>\n"], in_reasoning=False, tools=False)
    assert found == {"reasoning": "", "content": "x <tool_call>edit</tool_call>\n", "calls": []}


def test_an_opening_tag_starts_reasoning_when_the_prompt_did_not() -> None:
    assert parse(["\n<think>why</think>so"], in_reasoning=False)["reasoning"] == "why"
    assert parse(["a <think> b"], in_reasoning=False)["content"] == "a <think> b"


def test_cut_off_inside_a_call() -> None:
    assert parse(["ok <tool_call>ed"], in_reasoning=False)["content"] == "ok <tool_call>ed"
    found = parse(["<tool_call>edit<arg_key>path</arg_key><arg_value>half"], in_reasoning=False)
    assert found["calls"] == [["edit", '{"path": "half']]


def test_strings_stream_before_they_are_complete() -> None:
    parser = GlmParser(in_reasoning=False, tools=ToolTypes(TOOLS))
    parser.push("<tool_call>edit<arg_key>path</arg_key><arg_value>")
    assert parser.push("abc") == [CallArguments(0, '"abc')]


TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
WORDS = [
    "edit",
    "path",
    "line",
    "options",
    "12",
    "1e999",
    "[",
    "]",
    "\\ud800",
    " ",
    "\n",
    '"',
    "\\",
    "é",
    "<",
    "</",
    "<arg",
    "x",
]
TEXTS = st.lists(st.sampled_from(TAGS + WORDS), max_size=25).map("".join)


def test_a_key_that_comes_again_is_left_out() -> None:
    twice = "<arg_key>path</arg_key><arg_value>a</arg_value><arg_key>path</arg_key><arg_value>b</arg_value>"
    found = parse(
        list(f"<tool_call>edit{twice}<arg_key>line</arg_key><arg_value>1</arg_value></tool_call>"), in_reasoning=False
    )
    assert found["calls"] == [["edit", '{"path": "a", "line": 1}']]


VALUES = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda text: "<" not in text),
    st.recursive(
        st.floats() | st.integers() | st.text(st.characters(), max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(), max_size=2), inner, max_size=2)
        ),
        max_leaves=6,
    )
    .map(json.dumps)
    .filter(lambda text: "<" not in text),
    st.sampled_from(["1e999", "[-1e999]", '["\\udfff"]', "9" * 5000, "[" * 5000]),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["path", "line", "ratio", "unknown", "options"]), VALUES), max_size=5))
def test_arguments_of_a_whole_call_are_json_with_each_key_once(pairs: list[tuple[str, str]]) -> None:
    body = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in pairs)
    ((_, text),) = parse([f"<tool_call>edit{body}</tool_call>"], in_reasoning=False)["calls"]
    keys = []

    def once(items: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({key for key, _ in items}) == len(items)
        keys.append([key for key, _ in items])
        return dict(items)

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is not JSON")

    json.loads(text.encode().decode(), object_pairs_hook=once, parse_constant=refuse)
    assert keys[-1] == list(dict.fromkeys(key for key, _ in pairs))


@settings(max_examples=600)
@given(TEXTS, st.lists(st.integers(1, 9), max_size=60), st.booleans(), st.booleans())
def test_any_cut_gives_the_same(text: str, cuts: list[int], in_reasoning: bool, tools: bool) -> None:
    chunks, at = [], 0
    for size in cuts:
        chunks.append(text[at : at + size])
        at += size
    chunks.append(text[at:])
    assert parse(chunks, in_reasoning=in_reasoning, tools=tools) == parse(
        [text], in_reasoning=in_reasoning, tools=tools
    )
