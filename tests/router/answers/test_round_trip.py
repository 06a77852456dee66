"""From a message to the text and tokens that a model would write, and back through detokeniser and parser, token by
token or in steps of any size: what comes out is what was meant, and what was shown is never taken back."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.model.nano import checkpoint_path
from headrace.router.answers.arguments import ToolTypes
from headrace.router.answers.glm import CallArguments, CallStart, Content, GlmParser, Piece, Reasoning
from headrace.router.answers.text import AnswerText, TextRules
from headrace.router.base import NewTokens
from headrace.router.tokens.template import ChatTemplate
from headrace.router.tokens.tokenizer import Tokenizer

TOKENIZER, TEMPLATE = Tokenizer(checkpoint_path()), ChatTemplate(checkpoint_path())
TYPES = {"text": "string", "count": "integer", "ratio": "number", "flag": "boolean", "list": "array", "map": "object"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {key: {"type": kind} for key, kind in TYPES.items()}},
        },
    }
    for name in ("edit", "run_it")
]
PARTS = [
    "def f(x):\n", "    return x", " ", "\n\n", "<", "</", "a < b > c", "<thin", "</arg_value", "<tool_cal", "arg_key>",
    "é", "日本語", "👩‍👩‍👧", '"', "\\", "\\n", "'", "{", "}", "null", "12", "\t", "‍", "\u2028", "&lt;",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PARTS), max_size=12).map("".join)
NUMBERS = st.integers(-(10**12), 10**12)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS, lambda inner: st.lists(inner, max_size=3), max_leaves=5
)
VALUES = {
    "text": TEXTS,
    "count": NUMBERS,
    "ratio": st.floats(allow_nan=False, allow_infinity=False) | NUMBERS,
    "flag": st.booleans(),
    "list": st.lists(JSON, max_size=3),
    "map": st.dictionaries(TEXTS, JSON, max_size=3),
}
ARGUMENTS = st.fixed_dictionaries({}, optional=VALUES)
CALLS = st.lists(st.tuples(st.sampled_from(["edit", "run_it"]), ARGUMENTS), max_size=3)
SIZES = st.lists(st.integers(1, 9), max_size=40)


def free_of_tags(text: str) -> bool:
    return not any(tag in text for tag in ("<think>", "</think>", "<tool_call>", "</arg_value>"))


def written(reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """What the template makes of the message, after what it makes of the prompt: the model's own text."""
    user = {"role": "user", "content": "U"}
    answer = {
        "role": "assistant", "content": content, "reasoning_content": reasoning,
        "tool_calls": [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls],
    }  # fmt: skip
    before = TEMPLATE.render([user], TOOLS)
    whole = TEMPLATE.render([user, answer, {"role": "tool", "content": ""}], TOOLS)
    assert whole.startswith(before)
    text, _, _ = whole.removeprefix(before).rpartition("<|observation|>")
    return text


class Reader:
    """Reads an answer as the chat API does, and checks after every step that nothing shown is taken back."""

    def __init__(self) -> None:
        self._text = AnswerText(TOKENIZER, TextRules(skip_special=False))
        self._parser = GlmParser(in_reasoning=True, tools=ToolTypes(TOOLS))
        self.reasoning, self.content, self.calls = "", "", list[tuple[str, str]]()

    def feed(self, ids: list[int], finish: str | None) -> None:
        delta = self._text.feed(NewTokens(tuple(ids), (), finish))
        self._take(self._parser.push(delta.text))
        if finish is not None:
            self._take(self._parser.finish())

    def _take(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, Reasoning):
                assert not self.content
                assert not self.calls
                self.reasoning += piece.text
            elif isinstance(piece, Content):
                self.content += piece.text
            elif isinstance(piece, CallStart):
                assert piece.index == len(self.calls)
                self.calls.append((piece.name, ""))
            else:
                assert isinstance(piece, CallArguments)
                assert piece.index == len(self.calls) - 1, "arguments come for the last call only"
                self.calls[-1] = (self.calls[-1][0], self.calls[-1][1] + piece.text)

    @property
    def result(self) -> tuple[str, str, list[tuple[str, Any]]]:
        return self.reasoning, self.content, [(name, json.loads(arguments)) for name, arguments in self.calls]


def read(ids: list[int], sizes: list[int]) -> Reader:
    reader, at = Reader(), 0
    for size in sizes:
        reader.feed(ids[at : at + size], None)
        at += size
    reader.feed(ids[at:], "stop")
    return reader


@settings(max_examples=300, deadline=None)
@given(TEXTS.map(str.strip).filter(free_of_tags), TEXTS.map(str.strip).filter(free_of_tags), CALLS, SIZES)
def test_a_message_survives(
    reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]], sizes: list[int]
) -> None:
    if any("</arg_value>" in json.dumps(arguments, ensure_ascii=False) for _, arguments in calls):
        return
    ids = TOKENIZER.encode(written(reasoning, content, calls))
    assert read(ids, sizes).result == (reasoning, content, calls)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.size - 1), max_size=60), SIZES)
def test_any_tokens_in_any_steps_read_the_same(ids: list[int], sizes: list[int]) -> None:
    """Also broken UTF-8 and tags in nonsensical order."""
    whole = read(ids, [])
    for cut in (sizes, [1] * len(ids)):
        again = read(ids, cut)
        assert (again.reasoning, again.content, again.calls) == (whole.reasoning, whole.content, whole.calls)


TAGS = [TOKENIZER.encode(tag)[0] for tag in ("</think>", "<tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
                                             "</arg_value>", "</tool_call>", "<think>")]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(TAGS) | st.sampled_from(TOKENIZER.encode('edit text count 1 "é日\n')), max_size=40), SIZES
)
def test_tags_in_any_order_read_the_same(ids: list[int], sizes: list[int]) -> None:
    whole, again = read(ids, []), read(ids, sizes)
    assert (again.reasoning, again.content, again.calls) == (whole.reasoning, whole.content, whole.calls)
