"""Grammars of answers: what they let through is what the parser of answers reads back, valid against the schema."""

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers

from headrace.errors import InputError
from headrace.model.grammar import Grammars
from headrace.model.nano import checkpoint_path
from headrace.router.answers.arguments import ToolTypes
from headrace.router.answers.glm import CallArguments, CallStart, Content, GlmParser, Reasoning, merged
from headrace.router.answers.grammar import (
    Calls,
    choice_text,
    grammar_of,
    json_text,
    lark_text,
    regex_text,
)

PARAMETERS = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "maxLength": 8},
        "mode": {"enum": ["r", "w"]},
        "lines": {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 0}, "maxItems": 2},
        "level": {"$ref": "#/$defs/level"},
        "code": {"type": "string", "pattern": "^[a-z]{2}/[0-9]$"},
        "exact": {"const": 7},
    },
    "required": ["path", "lines", "code"],
    "$defs": {"level": {"type": "integer", "enum": [1, 2]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "open", "parameters": PARAMETERS}},
    {
        "type": "function",
        "function": {"name": "quit", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
    },
]


@pytest.fixture(scope="module")
def library() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(checkpoint_path() / "tokenizer.json"))


@pytest.fixture(scope="module")
def grammars(library: tokenizers.Tokenizer) -> Grammars:
    return Grammars(checkpoint_path(), library.get_vocab_size(), (3776, 3783, 3785))


def write(grammars: Grammars, library: tokenizers.Tokenizer, grammar: str, seed: int, most: int = 400) -> str:
    """A random answer of the grammar; tokens of one character or an added token are favoured, so that it ends."""
    matcher, ids = grammars.matcher(grammar), []
    draw = random.Random(seed)
    while not matcher.finished and len(ids) < most:
        allowed = np.flatnonzero(matcher.allowed()).tolist()
        added = [i for i in allowed if i >= 3776]
        ends = [i for i in added if i in (3776, 3783, 3785)]
        if ends and draw.random() < 0.3:
            break
        names = [i for i in added if i not in ends]
        token = (
            draw.choice(names) if names and draw.random() < 0.3 else draw.choice([i for i in allowed if i not in ends])
        )
        matcher.advance(token)
        ids.append(token)
    return str(library.decode(ids, skip_special_tokens=False))


def parsed(text: str, *, in_reasoning: bool) -> tuple[str, str, list[tuple[str, Any]]]:
    parser = GlmParser(in_reasoning=in_reasoning, tools=ToolTypes(TOOLS))
    reasoning, content, calls = "", "", []
    for piece in merged([*parser.push(text), *parser.finish()]):
        if isinstance(piece, Reasoning):
            reasoning += piece.text
        elif isinstance(piece, Content):
            content += piece.text
        elif isinstance(piece, CallStart):
            calls.append([piece.name, ""])
        elif isinstance(piece, CallArguments):
            calls[-1][1] += piece.text
    return reasoning, content, [(name, json.loads(text)) for name, text in calls]


@pytest.mark.parametrize("in_reasoning", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_required_calls_are_calls_with_valid_arguments(grammars, library, in_reasoning, several) -> None:
    seen: set[str] = set()
    for seed in range(30):
        grammar = grammar_of("", Calls(TOOLS, True, several), in_reasoning=in_reasoning)
        text = write(grammars, library, grammar, seed)
        if "</tool_call>" not in text or not text.endswith("</tool_call>"):
            continue
        reasoning, content, calls = parsed(text, in_reasoning=in_reasoning)
        assert content == ""
        assert len(calls) == 1 or several
        for name, arguments in calls:
            seen.add(name)
            if name == "open":
                jsonschema.validate(arguments, PARAMETERS)
            else:
                assert arguments == {}
        assert in_reasoning or reasoning == ""
    assert seen == {"open", "quit"}


def test_at_most_one_call_leaves_text_free(grammars, library) -> None:
    grammar = grammar_of("", Calls(TOOLS, False, False), in_reasoning=False)
    matcher = grammars.matcher(grammar)
    ids = library.encode("So I go.<tool_call>quit</tool_call>").ids
    assert matcher.accepting
    assert matcher.possible(ids) == len(ids)
    for token in ids:
        matcher.advance(token)
    assert matcher.finished


def test_one_tool_by_name_and_none_without_tools(grammars, library) -> None:
    grammar = grammar_of("", Calls(TOOLS[1:], True, False), in_reasoning=False)
    assert write(grammars, library, grammar, 1) == "<tool_call>quit</tool_call>"
    with pytest.raises(InputError, match="no tools"):
        grammar_of("", Calls([], True, False), in_reasoning=False)


@pytest.mark.parametrize("in_reasoning", [False, True])
@pytest.mark.parametrize(
    ("body", "good", "bad"),
    [
        (json_text({"type": "object"}), '{"a": [1, {"b": null}]}', "[1]"),
        (json_text({"type": "object"}), '{\n  "a": 1\n}', '{   "a": 1}'),
        (regex_text(r"a/b\d+\/c"), "a/b12/c", "a/b/c"),
        (regex_text("x\ny"), "x\ny", "xy"),
        (choice_text(['say "hi"', "<think>"]), 'say "hi"', "hi"),
        (lark_text('start: "a" b\nb: /[0-9]/'), "a7", "ab"),
    ],
)
def test_forms(grammars, library, body, good, bad, in_reasoning) -> None:
    before = "because\n</think>" if in_reasoning else ""
    for text, fits in ((good, True), (bad, False)):
        matcher = grammars.matcher(grammar_of(body, None, in_reasoning=in_reasoning))
        ids = library.encode(before + text).ids
        taken = matcher.possible(ids)
        for token in ids[:taken]:
            matcher.advance(token)
        assert (taken == len(ids) and matcher.accepting) == fits


def test_json_or_calls(grammars, library) -> None:
    grammar = grammar_of(json_text({"type": "object"}), Calls(TOOLS, False, True), in_reasoning=False)
    for text, fits in (("{}", True), ("<tool_call>quit</tool_call><tool_call>quit</tool_call>", True), ("hm", False)):
        ids = library.encode(text).ids
        assert (grammars.matcher(grammar).possible(ids) == len(ids)) == fits


def test_nothing_asked_is_no_grammar() -> None:
    assert grammar_of("", None, in_reasoning=True) == ""
