"""Chat requests about functions of the held-out text, and what can be checked of the replies by rule."""

import ast
import re
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from headrace.model.nano import checkpoint_path
from headrace.model.nano.evaluate.held_out import HeldOutPackage
from headrace.model.nano.evaluate.measures import answers
from headrace.model.nano.evaluate.reader import Reader
from headrace.model.nano.train.chats import Function, functions_of, template

# Questions in the user's own words; the replies are printed, not judged. Training knows the first three of them.
OPEN_QUESTIONS = (
    "Hello!",
    "Who are you?",
    "Write a function that adds two numbers.",
    "Write a function that removes duplicates from a list.",
    "What is a list comprehension?",
)


@dataclass(frozen=True)
class ChatScore:
    """Shares of the replies to requests for a function."""

    requests: int
    ended: float
    """ended its turn by itself"""
    parses: float
    """what it says is Python"""
    defines: float
    """and defines the function that was asked for"""


def requests(packages: list[HeldOutPackage], count: int) -> list[tuple[Function, str]]:
    """Evenly chosen held-out functions with a docstring, and a request for each: every second one by its header, the
    others by name and description."""
    found = [
        function
        for package in packages
        for _, source in package.files
        for function in functions_of(source)
        if function.summary and 24 < len(function.summary) < 100 and len(function.code) < 900
    ]
    chosen = [found[i * len(found) // count] for i in range(count)]
    asks = []
    for i, function in enumerate(chosen):
        by_header = f"Complete this Python function.\n\n{function.header.rstrip()}\n"
        by_name = f"Write a Python function `{function.name}`. {function.summary}"
        asks.append((function, by_name if i % 2 else by_header))
    return asks


def prompt_tokens(tokenizer: Tokenizer, question: str, thinking: bool = False) -> list[int]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    text = template(checkpoint_path() / "chat_template.jinja").render(
        messages=messages, tools=None, add_generation_prompt=True, enable_thinking=thinking
    )
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def reply(tokenizer: Tokenizer, tokens: list[int], stops: tuple[int, ...]) -> tuple[str, bool]:
    """Text of an answer without its stop token, and whether it had one."""
    ended = bool(tokens) and tokens[-1] in stops
    return tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=False), ended


def defined_names(text: str) -> set[str] | None:
    """Functions that a reply defines, code fences removed; None if it is not Python."""
    code = re.sub(r"^```\w*\n|```\s*$", "", text.strip(), flags=re.MULTILINE)
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):
        return None
    return {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


def chat_score(
    reader: Reader, tokenizer: Tokenizer, packages: list[HeldOutPackage], count: int, length: int
) -> tuple[dict[str, ChatScore], list[dict[str, str]]]:
    """Replies of at most `length` tokens to `count` requests, greedy and by the checkpoint's sampling defaults, and a
    few greedy ones to read."""
    asked = requests(packages, count)
    questions = [*(ask for _, ask in asked), *OPEN_QUESTIONS]
    prompts = [prompt_tokens(tokenizer, question) for question in questions]
    stops = reader.model.spec.eos_token_ids

    def replies(some: list[list[int]], temperature: float, top_p: float) -> list[tuple[str, bool]]:
        texts = answers(reader, some, length, temperature, top_p, stop=True)
        return [reply(tokenizer, text[len(prompt) :], stops) for prompt, text in zip(some, texts, strict=True)]

    greedy = replies(prompts, 0.0, 1.0)
    wanted = [function.name for function, _ in asked]
    scores = {
        "greedy": score(wanted, greedy[:count]),
        "temperature_1_top_p_0.95": score(wanted, replies(prompts[:count], 1.0, 0.95)),
    }
    shown = [*range(min(2, count)), *range(count, len(questions))]
    return scores, [{"question": questions[i], "reply": greedy[i][0]} for i in shown]


def score(wanted: list[str], replies: list[tuple[str, bool]]) -> ChatScore:
    """`wanted`: the name that each reply should define."""
    count, names = len(replies), [defined_names(text) for text, _ in replies]
    return ChatScore(
        count,
        sum(ended for _, ended in replies) / count,
        sum(found is not None for found in names) / count,
        sum(found is not None and name in found for name, found in zip(wanted, names, strict=True)) / count,
    )
