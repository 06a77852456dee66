"""Our own form: what a running service records and what other formats are converted to. No text and no token ids.

The first line is a header {"headrace_trace": 1, "block_tokens": 64}; each further line is one request:
{"session", "at_s", "think_s", "input_tokens", "output_tokens", "blocks": [[first, count], ...], "parent", "after"}.
`blocks` are ids that mean nothing outside the file: whoever records replaces block names by their order of appearance.
"""

import json
from collections.abc import Iterable, Iterator

from headrace.lab.traces.form import IdSpace, Request, Session, Trace
from headrace.lab.traces.jsonl import first_object, parse
from headrace.lab.traces.options import ReadOptions

DESCRIPTION = "Headrace recording: header line, then one request a line with anonymous block ids"
VERSION = 1


def sniff(first_line: str) -> bool:
    return "headrace_trace" in first_object(first_line)


def read(lines: Iterable[str], options: ReadOptions) -> Trace:
    rows = iter(lines)
    header = parse(1, next(rows, "{}"))
    if header["headrace_trace"] != VERSION:
        raise ValueError(f"version {header['headrace_trace']}, this build reads {VERSION}")
    ids, order = IdSpace(), []
    talks: dict[str, tuple[float, str | None, int, list[Request]]] = {}
    for number, line in enumerate(rows):
        row = parse(number + 2, line)
        key = str(row["session"])
        if key not in talks:
            talks[key] = (float(row["at_s"]), row.get("parent"), int(row.get("after", -1)), [])
            order.append(key)
        chain = ids.chain([i for first, count in row["blocks"] for i in range(first, first + count)])
        think = row.get("think_s")
        talks[key][3].append(
            Request(
                float(row["at_s"]) - talks[key][0], None if think is None else float(think),
                int(row["input_tokens"]), int(row["output_tokens"]), chain, number,
            )
        )  # fmt: skip
    index = {key: i for i, key in enumerate(order)}
    sessions = tuple(
        Session(key, start, tuple(requests), None if parent is None else index[str(parent)], after)
        for key, (start, parent, after, requests) in talks.items()
    )
    return Trace(options.name, int(header["block_tokens"]), ids.used, sessions)


def write(trace: Trace) -> Iterator[str]:
    """The lines of `trace` in this form. Block ids are numbered by first appearance, in order of arrival."""
    yield json.dumps({"headrace_trace": VERSION, "block_tokens": trace.block_tokens}) + "\n"
    names = [f"{i}" for i in range(len(trace.sessions))]
    ids = IdSpace()
    for arrival in trace.arrivals():
        session, request = trace.sessions[arrival.session], arrival.request
        row = {
            "session": names[arrival.session],
            "at_s": round(arrival.at_s, 6),
            "think_s": request.think_s,
            "input_tokens": request.input_tokens,
            "output_tokens": request.output_tokens,
            "blocks": ids.chain(request.blocks()),
        }
        if session.parent is not None:
            row |= {"parent": names[session.parent], "after": session.after_request}
        yield json.dumps(row, separators=(",", ":")) + "\n"
