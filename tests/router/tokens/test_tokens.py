"""Tokenizer, incremental detokenisation and stop strings: incremental = whole, for any input and any cut."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import CheckpointError, InputError
from headrace.model.nano import checkpoint_path
from headrace.router.tokens.detokenize import Detokenizer, StopMatcher
from headrace.router.tokens.template import ChatTemplate
from headrace.router.tokens.tokenizer import Tokenizer

TOKENIZER = Tokenizer(checkpoint_path())
TEMPLATE = ChatTemplate(checkpoint_path())


@given(st.text(max_size=200))
def test_text_survives_a_round_trip(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special=False) == text


@given(st.lists(st.integers(0, TOKENIZER.size + 5), max_size=60), st.booleans())
def test_incremental_text_is_the_whole_text(ids: list[int], skip_special: bool) -> None:
    detokenizer = Detokenizer(TOKENIZER, skip_special=skip_special)
    pieces = [detokenizer.push(i) for i in ids] + [detokenizer.flush()]
    assert "".join(pieces) == TOKENIZER.decode(ids, skip_special=skip_special)


@pytest.mark.parametrize("text", ["日本語のテキスト", "👩‍👩‍👧‍👦 é ñ", "a\u0301\u200d🏳️‍🌈"])
def test_never_half_a_character(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    shown = ""
    for token in TOKENIZER.encode(text):
        shown += detokenizer.push(token)
        assert text.startswith(shown)
        assert "\ufffd" not in shown
    assert shown == text


def settled(data: bytes) -> str:
    """The definition of what may be shown after some bytes: all but an end that more bytes could make a character."""
    for held in range(1, min(3, len(data)) + 1):
        if is_open(data[-held:]):
            return data[:-held].decode("utf-8", "replace")
    return data.decode("utf-8", "replace")


def is_open(tail: bytes) -> bool:
    """Whether some continuation makes `tail` one valid character."""
    for leads, size in {range(0xC2, 0xE0): 2, range(0xE0, 0xF0): 3, range(0xF0, 0xF5): 4}.items():
        if tail[0] in leads and len(tail) < size:
            for middle in (0x80, 0x90, 0xA0, 0xBF):
                try:
                    (tail + bytes([middle] * (size - len(tail)))).decode()
                except UnicodeDecodeError:
                    continue
                return True
    return False


SPECIAL = sorted(TOKENIZER.special_ids) + [i for i in map(TOKENIZER.id_of, ("<think>", "</think>", "<tool_call>")) if i]
BYTES = [i for i in range(TOKENIZER.size) if len(TOKENIZER.bytes_of(i)) == 1]


@settings(max_examples=400)
@given(st.lists(st.sampled_from(BYTES) | st.sampled_from(SPECIAL) | st.integers(0, TOKENIZER.size - 1), max_size=40))
def test_what_is_shown_is_whole_at_every_step(ids: list[int]) -> None:
    """Never part of a character, never part of a special token, and nothing is held longer than it must be."""
    detokenizer = Detokenizer(TOKENIZER, skip_special=False)
    shown, data = "", b""
    for token in ids:
        piece = detokenizer.push(token)
        shown += piece
        data += TOKENIZER.bytes_of(token)
        assert shown == settled(data)
        if token in SPECIAL:
            assert piece.endswith(TOKENIZER.bytes_of(token).decode())
    assert shown + detokenizer.flush() == data.decode("utf-8", "replace")


def test_lone_surrogates_are_the_clients_mistake() -> None:
    with pytest.raises(InputError, match="not valid Unicode"):
        TOKENIZER.encode("x\ud800y")


def test_a_folder_without_tokenizer_is_named(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="chat_template"):
        ChatTemplate(tmp_path)


def cut_by_reading(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The definition: read character by character, stop at the first complete stop string."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


SMALL = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=400)
@given(SMALL, STOPS, st.lists(st.integers(1, 5), max_size=30))
def test_stop_strings_for_any_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher, shown, at = StopMatcher(stops), "", 0
    for size in [*cuts, len(text)]:
        shown += matcher.push(text[at : at + size])
        at += size
        expected, _ = cut_by_reading(text, stops)
        assert expected.startswith(shown)
    shown += matcher.flush()
    assert (shown, matcher.matched) == cut_by_reading(text, stops)


def test_what_cannot_be_a_stop_string_goes_out_at_once() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("abc S") == "abc "
    assert matcher.push("T") == ""
    assert matcher.push("x") == "STx"
    assert matcher.push("ST") == ""
    assert matcher.push("OPzzz") == ""
    assert matcher.matched == "STOP"
    assert matcher.flush() == ""


def test_template_renders_a_conversation_with_tools() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": {"path": "/tmp", "depth": 2}}}
    tools = [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "list <tmp> & more"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "a.txt", "tool_call_id": "c1"},
    ]
    text = TEMPLATE.render(messages, tools, options={"enable_thinking": False})
    assert text.startswith("[gMASK]<sop>")
    assert "list <tmp> & more" in text
    assert "<arg_key>depth</arg_key><arg_value>2</arg_value>" in text
    assert "<tool_response>a.txt</tool_response>" in text
    assert text.endswith("<|assistant|><think></think>")
    assert TEMPLATE.render(messages, tools).endswith("<|assistant|><think>")


def test_template_errors_are_the_clients() -> None:
    with pytest.raises(InputError, match="template"):
        TEMPLATE.render([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "x"}}]}])
