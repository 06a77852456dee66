"""Conversations as clients send them, rendered by the checkpoint's own template: the whole text of every case."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import CheckpointError, InputError
from headrace.model.nano import checkpoint_path
from headrace.router.http.conversation import check_tools, template_messages, template_options
from headrace.router.tokens.template import ChatTemplate
from headrace.router.tokens.tokenizer import Tokenizer

TEMPLATE, TOKENIZER = ChatTemplate(checkpoint_path()), Tokenizer(checkpoint_path())
Message = dict[str, Any]

U, MORE = {"role": "user", "content": "U"}, {"role": "user", "content": "M"}
S = {"role": "system", "content": "S"}
A = {"role": "assistant", "content": " A\n", "reasoning_content": "R"}
TOOL = {
    "type": "function",
    "function": {
        "name": "ls",
        "strict": True,
        "parameters": {"type": "object", "properties": {"p": {"type": "string"}}},
    },
}
TOOL_LINE = (
    '{"type": "function", "function": {"name": "ls", '
    '"parameters": {"type": "object", "properties": {"p": {"type": "string"}}}}}'
)


def call(number: int, arguments: Message) -> Message:
    return {"id": f"c{number}", "type": "function", "function": {"name": "ls", "arguments": json.dumps(arguments)}}


CALLS = {
    "role": "assistant", "content": None, "reasoning_content": "R",
    "tool_calls": [call(1, {"p": "<a> & b", "n": 2}), call(2, {})],
}  # fmt: skip
RESULTS = [
    {"role": "tool", "tool_call_id": "c1", "content": "one"},
    {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "two"}]},
]
CALL_TEXT = (
    "<tool_call>ls<arg_key>p</arg_key><arg_value><a> & b</arg_value><arg_key>n</arg_key><arg_value>2</arg_value>"
    "</tool_call><tool_call>ls</tool_call>"
)
RESULT_TEXT = "<|observation|><tool_response>one</tool_response><tool_response>two</tool_response>"
START = "[gMASK]<sop>"
MAX, HIGH = (f"{START}<|system|>Reasoning Effort: {word}" for word in ("Max", "High"))
ON, OFF = "<|assistant|><think>", "<|assistant|><think></think>"
TOOLS = (
    "<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    f"{TOOL_LINE}\n</tools>\n\n"
    "Write every function call in exactly this form, name first, then its arguments:\n"
    "<tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value>...</tool_call>"
)
KEEP = {"clear_thinking": False}
NO = {"enable_thinking": False}

CASES: dict[str, tuple[list[Message], bool, Message, str | None, str]] = {
    # messages, tools?, chat_template_kwargs, reasoning_effort, text
    "thinking by default": ([U], False, {}, None, f"{MAX}<|user|>U{ON}"),
    "thinking off": ([U], False, NO, None, f"{START}<|user|>U{OFF}"),
    "effort none": ([U], False, {}, "none", f"{START}<|user|>U{OFF}"),
    "effort high": ([S, U], False, {}, "high", f"{HIGH}<|system|>S<|user|>U{ON}"),
    "effort of a request without thinking": ([U], False, NO, "high", f"{START}<|user|>U{OFF}"),
    "tools": ([S, U], True, {}, None, f"{MAX}{TOOLS}<|system|>S<|user|>U{ON}"),
    "tools, thinking off": ([U], True, NO, None, f"{START}{TOOLS}<|user|>U{OFF}"),
    "tool results": (
        [U, CALLS, *RESULTS], True, {}, None,
        f"{MAX}{TOOLS}<|user|>U<|assistant|><think>R</think>{CALL_TEXT}{RESULT_TEXT}{ON}",
    ),
    "two rounds of tools": (
        [U, CALLS, *RESULTS, CALLS, *RESULTS], False, {}, None,
        f"{MAX}<|user|>U" + f"<|assistant|><think>R</think>{CALL_TEXT}{RESULT_TEXT}" * 2 + ON,
    ),
    "turns, reasoning dropped": (
        [U, A, MORE], False, {}, None, f"{MAX}<|user|>U<|assistant|><think></think>A<|user|>M{ON}"
    ),
    "turns, reasoning kept": (
        [U, A, MORE], False, KEEP, None, f"{MAX}<|user|>U<|assistant|><think>R</think>A<|user|>M{ON}"
    ),
    "turns without thinking": (
        [U, A, MORE], False, NO, None, f"{START}<|user|>U<|assistant|><think></think>A<|user|>M{OFF}"
    ),
    "tools of an earlier turn, dropped": (
        [U, CALLS, *RESULTS, A, MORE], False, {}, None,
        f"{MAX}<|user|>U<|assistant|><think></think>{CALL_TEXT}{RESULT_TEXT}<|assistant|><think></think>A<|user|>M{ON}",
    ),
    "tools of an earlier turn, kept": (
        [U, CALLS, *RESULTS, A, MORE], False, KEEP, None,
        f"{MAX}<|user|>U<|assistant|><think>R</think>{CALL_TEXT}{RESULT_TEXT}<|assistant|><think>R</think>A<|user|>M{ON}",
    ),
}  # fmt: skip


def render(messages: list[Message], tools: bool, kwargs: Message, effort: str | None) -> str:
    options = template_options(kwargs, effort, None)
    return TEMPLATE.render(template_messages(messages), check_tools([TOOL]) if tools else (), options=options)


@pytest.mark.parametrize("case", CASES)
def test_the_whole_text(case: str) -> None:
    *given, expected = CASES[case]
    assert render(*given) == expected


@pytest.mark.parametrize("case", CASES)
def test_special_tokens_are_single_ids(case: str) -> None:
    *_, text = CASES[case]
    ids = TOKENIZER.encode(text)
    for token in ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>"):
        assert ids.count(TOKENIZER.id_of(token)) == text.count(token)
    assert TOKENIZER.decode(ids, skip_special=False) == text


@pytest.mark.parametrize(("kwargs", "tools"), [({}, True), (KEEP, False), (KEEP, True)])
def test_the_next_prompt_begins_with_this_one_and_its_answer(kwargs: Message, tools: bool) -> None:
    """So that its blocks are hit: inside a loop of tools always, over turns when reasoning is kept."""
    history: list[Message] = [U]
    for turn, after in ((CALLS, RESULTS), (CALLS, RESULTS), (A, [MORE])):
        if turn is A and kwargs is not KEEP:
            break
        before = render(history, tools, kwargs, None)
        history += [turn, *after]
        answer = "R</think>" + (CALL_TEXT if turn is CALLS else "A")
        assert render(history, tools, kwargs, None).startswith(before + answer)


def test_without_kept_reasoning_the_next_turn_parts_at_the_old_reasoning() -> None:
    before, after = (render(messages, False, {}, None) for messages in ([U], [U, A, MORE]))
    assert after.startswith(before + "</think>")


def folder(path: Path, template: str | None = None, config: str | None = None) -> Path:
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": config}))
    return path


def test_the_checkpoints_own_template_is_taken(tmp_path: Path) -> None:
    """The file before tokenizer_config.json; here as GLM-5 and 5.1 write turns: no effort, a bare `</think>`."""
    dialect = (
        "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}</think>{% endif %}"
        "{{ m.content }}{% endfor %}<|assistant|>{{ '<think>' if enable_thinking is not defined or enable_thinking "
        "else '</think>' }}"
    )
    only = ChatTemplate(folder(tmp_path, config=dialect))
    assert only.render([U, A, MORE]) == "[gMASK]<sop><|user|>U<|assistant|></think> A\n<|user|>M<|assistant|><think>"
    assert only.render([U], options=NO) == "[gMASK]<sop><|user|>U<|assistant|></think>"
    assert ChatTemplate(folder(tmp_path, template="file")).render([U]) == "file"


def test_what_published_templates_use_is_there(tmp_path: Path) -> None:
    text = (
        "{% for m in messages %}\n    {% if loop.index > 1 %}{% break %}{% endif %}\n{{ m | tojson }}{% endfor %}"
        "{{ strftime_now('%Y')[:2] }}{% if tools is none %}{{ 'no' }} tools{% endif %}{{ add_generation_prompt }}"
    )
    template = ChatTemplate(folder(tmp_path, template=text))
    got = template.render([{"role": "user", "content": "<é> & 'x'"}, U])
    assert got == """{"role": "user", "content": "<é> & 'x'"}20no toolsTrue"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].content.missing.deeper }}", "has no attribute"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 10.0 ** 400 }}", "Result too large|out of range"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "too big"),
        ("{{ 'a' * 10 ** 20 }}", "index-sized"),
    ],
)
def test_a_template_can_refuse_and_cannot_reach_out(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        ChatTemplate(folder(tmp_path, template=text)).render([U])


def test_a_template_that_does_not_compile_is_the_checkpoints_fault(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="chat template line 2: Encountered unknown tag 'fi'"):
        ChatTemplate(folder(tmp_path, template="a\n{% fi %}"))


@pytest.mark.parametrize(
    ("file", "data"),
    [
        ("chat_template.jinja", b"\xff\xfe"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"\xff"),
        ("tokenizer_config.json", b'{"chat_template": 5}'),
        ("tokenizer_config.json", b"[" * 100_000),
    ],
)
def test_a_template_that_cannot_be_read_is_the_checkpoints_fault(tmp_path: Path, file: str, data: bytes) -> None:
    (tmp_path / file).write_bytes(data)
    with pytest.raises(CheckpointError, match="template"):
        ChatTemplate(tmp_path)
