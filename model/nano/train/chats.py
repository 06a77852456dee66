"""Conversations made from source files by rule: ask for a function, continue a file, ask about code, use tools.

What an assistant says is code from the file, its docstring, a sentence read off its syntax tree, or small talk
(talk.py). Rendered with the shipped chat template, so that training and serving see the same bytes.
"""

import ast
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from headrace.model.nano.train.talk import SNIPPETS, TALK

Message = dict[str, Any]
KINDS, SHARES = ("function", "continue", "tools", "question", "talk"), (0.48, 0.16, 0.12, 0.14, 0.10)
MAX_CODE_CHARS = 2_400
ASK_BODY = (
    "Complete this Python function.",
    "Finish this function:",
    "Fill in the body.",
    "Implement this function.",
    "Complete the following code.",
    "Please complete this code:",
)
ASK_MORE = (
    "Continue this code.",
    "Continue the file below.",
    "What comes next in this file?",
    "Keep writing this module:",
)
ASK_MEANING = (
    "What does this function do?",
    "Explain this function.",
    "Describe this code in one sentence.",
    "Summarise this function.",
)
ASK_DOCSTRING = (
    "Write a docstring for this function.",
    "Document this function.",
    "Add a docstring.",
)
ASK_ARGUMENTS = ("Which arguments does this function take?", "What are the parameters?", "What does it call?")
SYSTEM = (
    "You are a helpful coding assistant.",
    "You write Python code.",
    "Answer with code only.",
    "You are a coding agent working in a repository.",
)


def _tool(name: str, description: str, required: tuple[str, ...], **types: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    _tool("read_file", "Read a file of the repository.", ("path",), path="string"),
    _tool("append_file", "Append text to a file.", ("path", "text"), path="string", text="string"),
    _tool("run_tests", "Run the tests of one file.", ("path",), path="string", verbose="boolean"),
]


@dataclass(frozen=True)
class Function:
    """A top-level or member function: its header up to the docstring's end, its body, and what a sentence can say."""

    name: str
    header: str
    body: str
    arguments: tuple[str, ...]
    summary: str
    calls: tuple[str, ...]
    signature: int
    """characters of `header` before the docstring"""

    @property
    def bare(self) -> str:
        """The code without its docstring."""
        return self.header[: self.signature] + self.body

    @property
    def code(self) -> str:
        return self.header + self.body

    @property
    def plan(self) -> str:
        """One or two sentences for the thinking block."""
        takes = ", ".join(f"`{a}`" for a in self.arguments) or "no arguments"
        uses = f" It uses {', '.join(f'`{c}`' for c in self.calls)}." if self.calls else ""
        return f"`{self.name}` takes {takes}.{uses}"


def _call_names(node: ast.AST) -> tuple[str, ...]:
    names = [
        n.func.attr if isinstance(n.func, ast.Attribute) else getattr(n.func, "id", "")
        for n in ast.walk(node)
        if isinstance(n, ast.Call)
    ]
    return tuple(dict.fromkeys(n for n in names if n))[:3]


def functions_of(source: str) -> list[Function]:
    """Functions of a file that are neither trivial nor long, dedented, in order."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return []
    lines, found = source.splitlines(keepends=True), []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.end_lineno is None:
            continue
        summary = (ast.get_docstring(node) or "").strip().split("\n")[0]
        code = node.body[1:] if summary else node.body
        if not code or code[0].lineno <= node.lineno or not 3 <= node.end_lineno - code[0].lineno + 1 <= 60:
            continue
        start = node.body[0].end_lineno if summary else code[0].lineno - 1
        dedent = node.col_offset
        header, body = (
            "".join(line[dedent:] if line.strip() else line for line in part)
            for part in (lines[node.lineno - 1 : start], lines[start or 0 : node.end_lineno])
        )
        arguments = tuple(a.arg for a in node.args.args if a.arg != "self")[:5]
        if len(header) + len(body) <= MAX_CODE_CHARS:
            quoted = lines[node.body[0].lineno - 1 : start] if summary else []
            signature = len(header) - sum(len(line[dedent:] if line.strip() else line) for line in quoted)
            found.append(Function(node.name, header, body, arguments, summary, _call_names(node), signature))
    return found


def _turn(rng: random.Random, function: Function, answer: str) -> Message:
    return {"role": "assistant", "content": answer, "reasoning_content": function.plan if rng.random() < 0.7 else ""}


def _function_chat(rng: random.Random, functions: list[Function]) -> list[Message]:
    """Asks for one to three functions, by header or by description."""
    messages: list[Message] = []
    for function in rng.sample(functions, min(len(functions), rng.choice((1, 1, 2, 3)))):
        if function.summary and rng.random() < 0.5:
            named = f"Write a Python function `{function.name}`. {function.summary}"
            wish = function.summary[0].lower() + function.summary[1:].rstrip(".")
            ask = named if rng.random() < 0.7 else f"Write a function `{function.name}` to {wish}."
        else:
            ask = f"{rng.choice(ASK_BODY)}\n\n{function.header.rstrip()}\n"
        messages += [{"role": "user", "content": ask}, _turn(rng, function, function.code)]
    return messages


def _question_chat(rng: random.Random, functions: list[Function]) -> list[Message]:
    """Shows a function without its docstring and asks what it does, for its docstring, or what it takes."""
    told = [f for f in functions if f.summary and len(f.bare) < MAX_CODE_CHARS // 2] or functions
    function = rng.choice(told)
    code = f"```python\n{function.bare.rstrip()}\n```" if rng.random() < 0.6 else function.bare.rstrip()
    kinds: list[tuple[tuple[str, ...], str]] = [(ASK_ARGUMENTS, function.plan)]
    if function.summary:
        kinds += [(ASK_MEANING, function.summary), (ASK_DOCSTRING, f'"""{function.summary}"""')]
    rng.shuffle(kinds)
    messages: list[Message] = []
    for i, (asks, answer) in enumerate(kinds[: rng.choice((1, 1, 2))]):
        ask = f"{rng.choice(asks)}\n\n{code}" if i == 0 else rng.choice(asks)
        messages += [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
    return messages


def _talk_chat(rng: random.Random, functions: list[Function]) -> list[Message]:
    """Small talk, a first request, or small talk around a request for a function."""
    asks, answer = rng.choice(TALK if rng.random() < 0.6 else SNIPPETS)
    talk = [{"role": "user", "content": rng.choice(asks)}, {"role": "assistant", "content": answer}]
    order = rng.random()
    if order < 0.6:
        return talk
    return [*talk, *_function_chat(rng, functions)] if order < 0.8 else [*_function_chat(rng, functions), *talk]


def _continuation_chat(rng: random.Random, source: str, functions: list[Function]) -> list[Message]:
    """Gives the start of a file and asks for what follows."""
    lines = source.splitlines(keepends=True)
    cut = rng.randrange(4, max(5, len(lines) - 4))
    before = "".join(lines[max(0, cut - rng.choice((20, 60, 150))) : cut])
    after = "".join(lines[cut : cut + rng.choice((8, 16, 40))])
    fence = "```" if rng.random() < 0.3 else ""
    ask = f"{rng.choice(ASK_MORE)}\n\n" + (f"```python\n{before}```" if fence else before)
    return [{"role": "user", "content": ask}, _turn(rng, functions[0], after)]


def _call(name: str, **arguments: Any) -> Message:
    return {"function": {"name": name, "arguments": arguments}}


def _tool_chat(rng: random.Random, path: str, source: str, functions: list[Function]) -> list[Message]:
    """An agent reads a file, appends a function to it and runs its tests."""
    function = rng.choice(functions)
    seen = source[: rng.choice((800, 2_000, 4_000))]
    messages: list[Message] = [
        {"role": "user", "content": f"Add a function `{function.name}` to {path}. {function.summary}".strip()},
        {
            "role": "assistant",
            "reasoning_content": f"First read {path}.",
            "content": "",
            "tool_calls": [_call("read_file", path=path)],
        },
        {"role": "tool", "content": seen},
        {
            "role": "assistant",
            "reasoning_content": function.plan,
            "content": "",
            "tool_calls": [_call("append_file", path=path, text=function.code)],
        },
        {"role": "tool", "content": "ok"},
    ]
    if rng.random() < 0.5:
        messages += [
            {
                "role": "assistant",
                "reasoning_content": "Now run the tests.",
                "content": "",
                "tool_calls": [_call("run_tests", path=path, verbose=rng.random() < 0.5)],
            },
            {"role": "tool", "content": f"{rng.randrange(1, 60)} passed"},
        ]
    return [*messages, {"role": "assistant", "content": f"I added `{function.name}` to {path}."}]


def template(path: Path) -> jinja2.Template:
    """A checkpoint's chat template."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, ensure_ascii=True: json.dumps(value, ensure_ascii=ensure_ascii)
    return environment.from_string(path.read_text())


class ChatMaker:
    """Turns source files into rendered conversations. One instance a process: the template is compiled once."""

    def __init__(self, path: Path) -> None:
        self.template = template(path)

    def make(self, path: str, source: str, rng: random.Random) -> list[str]:
        """A few conversations about one file, each ended the way a model ends its turn."""
        functions = functions_of(source)
        if not functions:
            return []
        kinds = rng.choices(KINDS, SHARES, k=min(4, 1 + len(functions) // 4))
        chats = []
        for kind in kinds:
            tools = TOOLS if kind == "tools" else None
            if kind == "function":
                messages = _function_chat(rng, functions)
            elif kind == "continue":
                messages = _continuation_chat(rng, source, functions)
            elif kind == "question":
                messages = _question_chat(rng, functions)
            elif kind == "talk":
                messages = _talk_chat(rng, functions)
            else:
                messages = _tool_chat(rng, path, source, functions)
            if rng.random() < 0.3:
                messages.insert(0, {"role": "system", "content": rng.choice(SYSTEM)})
            chats.append(self._render(messages, tools, rng))
        return chats

    def _render(self, messages: list[Message], tools: Any, rng: random.Random) -> str:
        thinking = rng.random() < 0.5
        if not thinking:
            messages = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages]
        options: dict[str, Any] = {"enable_thinking": thinking}
        if rng.random() < 0.3:
            options["reasoning_effort"] = "high"
        text = self.template.render(messages=messages, tools=tools, add_generation_prompt=False, **options)
        # A later user turn or the end of text: both are stop ids, so both must be likely after an answer.
        return text + ("<|user|>" if rng.random() < 0.7 else "<|endoftext|>")
