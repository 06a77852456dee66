"""Event logs of a node daemon (`store.event_log`): every prompt that a prefill group looked up is a request.

The log holds blocks, not tokens: lengths are whole blocks, a prompt's last partial block is missing, prompts of less
than one block do not appear. A request whose prompt runs through the end of an earlier one (its answer included) is the
next turn of that conversation. Answers are the blocks that others wrote behind a prompt.
"""

import dataclasses
from collections.abc import Iterable

from headrace.lab.traces.form import IdSpace, Request, Session, Trace
from headrace.lab.traces.jsonl import first_object, parse
from headrace.lab.traces.options import ReadOptions

DESCRIPTION = "event log of a node daemon (store.event_log): prompts as the store saw them"
VERSION = 1


@dataclasses.dataclass(slots=True)
class _Turn:
    at_s: float
    chain: list[str]
    number: int
    answer_blocks: int = 0


def sniff(first_line: str) -> bool:
    return "headrace_store_log" in first_object(first_line)


def read(lines: Iterable[str], options: ReadOptions) -> Trace:
    rows = iter(lines)
    header = parse(1, next(rows, "{}"))
    if header["headrace_store_log"] != VERSION:
        raise ValueError(f"version {header['headrace_store_log']}, this build reads {VERSION}")
    talks = _Talks()
    for number, line in enumerate(rows):
        row = parse(number + 2, line)
        if row["op"] == "read" and row["role"] == "prefill" and row["blocks"]:
            talks.prompt(float(row["s"]), row["blocks"], number)
        elif row["op"] == "put":
            talks.written(row["parent"], row["blocks"])
    tokens, ids = int(header["block_tokens"]), IdSpace()
    sessions = tuple(_session(str(i), turns, tokens, ids) for i, turns in enumerate(talks.sessions))
    return Trace(options.name, tokens, ids.used, sessions)


class _Talks:
    """Puts prompts together into conversations, by the block that each ends with."""

    def __init__(self) -> None:
        self.sessions: list[list[_Turn]] = []
        self._ends: dict[str, int] = {}
        """Last block of a session's newest turn, answer included -> session."""
        self._inner: set[str] = set()
        """Blocks known to follow another one."""

    def prompt(self, at_s: float, chain: list[str], number: int) -> None:
        # Blocks in the middle of a prompt are also leased on their own, when two prompts write the same ones.
        if chain[0] in self._inner:
            return
        self._inner.update(chain[1:])
        found = next((self._ends[block] for block in reversed(chain) if block in self._ends), None)
        if found is not None and self.sessions[found][-1].chain == chain:
            found = None  # the same prompt once more is somebody else's, or a retry
        if found is None:
            found = len(self.sessions)
            self.sessions.append([])
        self.sessions[found].append(_Turn(at_s, chain, number))
        self._ends = {block: session for block, session in self._ends.items() if session != found}
        self._ends[chain[-1]] = found

    def written(self, parent: str | None, blocks: list[str]) -> None:
        if parent is not None:
            self._inner.update(blocks)
        session = self._ends.get(parent or "")
        if session is not None:
            turn = self.sessions[session][-1]
            turn.answer_blocks += len(blocks)
            del self._ends[parent or ""]
            self._ends[blocks[-1]] = session


def _session(name: str, turns: list[_Turn], block_tokens: int, ids: IdSpace) -> Session:
    start = turns[0].at_s
    requests = tuple(
        Request(
            offset_s=turn.at_s - start,
            think_s=None,
            input_tokens=len(turn.chain) * block_tokens,
            output_tokens=max(1, turn.answer_blocks * block_tokens),
            runs=ids.chain(turn.chain),
            sequence=turn.number,
        )
        for turn in turns
    )
    return Session(name, start, requests)
