"""Request logs with real text, tokenised by a `tokenizer.json` and named with the store's own block names.

Two shapes of line are known: LMCache agent traces (`input`, `output`, `session_id`, `timestamp` in microseconds) and
OpenAI-style logs (`prompt` or `messages`, optional `completion`, `session_id`, `timestamp` in seconds). Messages are
joined as role and content: enough to keep equal prefixes equal, not the model's chat template.
"""

import json
from collections.abc import Iterable
from typing import Any

from headrace.errors import InputError
from headrace.lab.traces.form import IdSpace, Request, Session, Trace
from headrace.lab.traces.jsonl import first_object, parse
from headrace.lab.traces.options import ReadOptions

DESCRIPTION = "text logs: LMCache agent traces (input/output) or OpenAI-style requests (prompt/messages); --tokenizer"
_BLOCK_TOKENS = 64


def sniff(first_line: str) -> bool:
    row = first_object(first_line)
    return ("input" in row and "session_id" in row) or "prompt" in row or "messages" in row


def read(lines: Iterable[str], options: ReadOptions) -> Trace:
    from headrace.kvstore.names import chain, namespace  # with the tokenizer, only for text

    tokenizer = _load(options.tokenizer)
    ids, root = IdSpace(), namespace(b"lab", b"")
    talks: dict[str, list[tuple[float, Request]]] = {}
    for number, line in enumerate(lines):
        row = parse(number + 1, line)
        tokens = tokenizer.encode(_prompt(row), add_special_tokens=False).ids
        answer = tokenizer.encode(_answer(row), add_special_tokens=False).ids
        at_s = float(row.get("timestamp") or 0.0) / (1e6 if "input" in row else 1.0)
        key = str(row.get("session_id", number))
        request = Request(at_s, None, len(tokens), _answer_tokens(row, answer), ids.chain(chain(root, tokens)), number)
        talks.setdefault(key, []).append((at_s, request))
    zero = min((turns[0][0] for turns in talks.values()), default=0.0)
    sessions = [_session(key, turns, zero) for key, turns in talks.items()]
    return Trace(options.name, _BLOCK_TOKENS, ids.used, tuple(sessions))


def _session(key: str, turns: list[tuple[float, Request]], zero_s: float) -> Session:
    turns.sort(key=lambda turn: turn[0])
    start = turns[0][0]
    requests = [
        Request(at_s - start, None, r.input_tokens, r.output_tokens, r.runs, r.sequence) for at_s, r in turns
    ]  # fmt: skip
    return Session(key, start - zero_s, tuple(requests))


def _load(path: str) -> Any:
    if not path:
        raise InputError("this trace holds text: give the model's tokenizer.json with --tokenizer")
    import tokenizers  # only text traces need it, and it takes a while to import

    try:
        return tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"cannot load tokenizer {path}: {error}") from error


def _prompt(row: dict[str, Any]) -> str:
    for field in ("input", "prompt"):
        if isinstance(row.get(field), str):
            return str(row[field])
    parts = []
    for message in row["messages"]:
        content = message.get("content")
        parts.append(f"<|{message['role']}|>{content if isinstance(content, str) else json.dumps(content)}")
    return "".join(parts)


def _answer(row: dict[str, Any]) -> str:
    return str(row.get("output") or row.get("completion") or "")


def _answer_tokens(row: dict[str, Any], answer: list[int]) -> int:
    if answer:
        return len(answer)
    usage = row.get("usage") or {}
    return int(usage.get("completion_tokens", row.get("max_tokens") or 0))
