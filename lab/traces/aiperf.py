"""Multi-turn Mooncake form as `aiperf synthesize agentic-code` writes it: `session_id`, `delay` before later turns, and
on each line only the turn's NEW tokens and blocks. The prompt of a turn is therefore everything before it, answers
included, plus its own tokens.

Ids of a first turn may be shared between sessions (tools, system prompt, group); what follows belongs to its session.
Turns do not end on block borders, so only the full blocks of a first turn keep their ids; later ones get fresh ids.
"""

from collections.abc import Iterable

from headrace.lab.traces.form import IdSpace, Request, Run, Session, Trace, join_runs
from headrace.lab.traces.jsonl import first_object, parse
from headrace.lab.traces.options import ReadOptions

DESCRIPTION = "aiperf agentic jsonl: Mooncake lines with session_id and delay (ms); later turns hold only what is new"


def sniff(first_line: str) -> bool:
    return {"session_id", "input_length", "hash_ids"} <= first_object(first_line).keys()


class _Conversation:
    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self.clock_s = 0.0
        self.history_tokens = 0
        self.runs: tuple[Run, ...] = ()
        self.requests: list[Request] = []


def read(lines: Iterable[str], options: ReadOptions) -> Trace:
    block, ids = options.mooncake_block_tokens, IdSpace()
    open_ones: dict[str, _Conversation] = {}
    for number, line in enumerate(lines):
        row = parse(number + 1, line)
        key = str(row["session_id"])
        talk = open_ones.get(key)
        if talk is None:
            talk = open_ones[key] = _Conversation(float(row.get("timestamp") or 0.0) / 1e3)
        think_s = float(row["delay"]) / 1e3 if "delay" in row else None
        talk.clock_s += think_s or 0.0
        prompt = talk.history_tokens + int(row["input_length"])
        if not talk.requests:
            talk.runs = ids.chain(row["hash_ids"][: prompt // block])
        have = sum(count for _, count in talk.runs)
        talk.runs = join_runs([*talk.runs, *ids.fresh(prompt // block - have)])
        talk.requests.append(Request(talk.clock_s, think_s, prompt, int(row["output_length"]), talk.runs, number))
        talk.history_tokens = prompt + int(row["output_length"])
    sessions = tuple(Session(key, talk.start_s, tuple(talk.requests)) for key, talk in open_ones.items())
    return Trace(options.name, block, ids.used, sessions)
