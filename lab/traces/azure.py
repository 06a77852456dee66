"""Azure LLM inference traces (2023): arrival time and lengths only. Every block is unique, so no cache can hit; useful
for load and length distributions."""

import datetime
from collections.abc import Iterable

from headrace.lab.traces.form import IdSpace, Request, Session, Trace
from headrace.lab.traces.options import ReadOptions

DESCRIPTION = "Azure CSV: TIMESTAMP, ContextTokens, GeneratedTokens; lengths without prefixes"
_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def sniff(first_line: str) -> bool:
    return first_line.strip() == _HEADER


def read(lines: Iterable[str], options: ReadOptions) -> Trace:
    ids, sessions = IdSpace(), []
    start: datetime.datetime | None = None
    for number, line in enumerate(lines):
        if number == 0 and sniff(line):
            continue
        stamp, context, generated = line.strip().split(",")
        when = _parse_time(stamp)
        start = when if start is None else start
        prompt = int(context)
        request = Request(0.0, None, prompt, int(generated), ids.fresh(prompt // options.block_tokens), number)
        sessions.append(Session(str(number), (when - start).total_seconds(), (request,)))
    return Trace(options.name, options.block_tokens, ids.used, tuple(sessions), has_prefixes=False)


def _parse_time(text: str) -> datetime.datetime:
    """Python reads six digits of a second, the files have seven."""
    whole, _, fraction = text.partition(".")
    return datetime.datetime.fromisoformat(f"{whole}.{fraction[:6]:0<6}" if fraction else whole)
