"""Mooncake's published traces: one request a line, `hash_ids` are remapped prefix hashes of 512-token blocks, the last
one partial. Nothing tells which requests belong to one conversation, so each is a session of its own (open loop)."""

from collections.abc import Iterable

from headrace.lab.traces.form import IdSpace, Request, Session, Trace
from headrace.lab.traces.jsonl import first_object, parse
from headrace.lab.traces.options import ReadOptions

DESCRIPTION = "Mooncake jsonl: timestamp (ms), input_length, output_length, hash_ids (512-token prefix blocks)"


def sniff(first_line: str) -> bool:
    return {"timestamp", "input_length", "hash_ids"} <= first_object(first_line).keys()


def read(lines: Iterable[str], options: ReadOptions) -> Trace:
    ids, sessions = IdSpace(), []
    for number, line in enumerate(lines):
        row = parse(number + 1, line)
        request = Request(
            offset_s=0.0,
            think_s=None,
            input_tokens=int(row["input_length"]),
            output_tokens=int(row["output_length"]),
            runs=ids.chain(row["hash_ids"]),
            sequence=number,
        )
        sessions.append(Session(name=str(number), start_s=float(row["timestamp"]) / 1e3, requests=(request,)))
    return Trace(options.name, options.mooncake_block_tokens, ids.used, tuple(sessions))
