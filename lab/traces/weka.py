"""WEKA / AgentX sessions (kv-cache-tester): one session an object, 64-token blocks in `hash_ids` or in the shorter
`hash_runs` ([first, count] pairs), think time, sub-agents nested at the place where they were started.

Ids are local to a session unless `hash_id_scope` is "global"; a sub-agent shares its session's ids and becomes a
session of its own here. Its times count from its start. Only full blocks are listed.
"""

from collections.abc import Iterable
from typing import Any

from headrace.lab.traces.form import IdSpace, Request, Run, Session, Trace, join_runs, to_runs
from headrace.lab.traces.jsonl import first_object, parse
from headrace.lab.traces.options import ReadOptions

DESCRIPTION = "WEKA / AgentX sessions: requests with t, in, out, think_time and hash_ids or hash_runs; sub-agents"


def sniff(first_line: str) -> bool:
    row = first_object(first_line)
    return "requests" in row and "block_size" in row


def read(lines: Iterable[str], options: ReadOptions) -> Trace:
    reader = _Reader()
    for number, line in enumerate(lines):
        reader.session(parse(number + 1, line))
    return Trace(options.name, reader.block_tokens, reader.ids.used, tuple(reader.sessions))


class _Reader:
    def __init__(self) -> None:
        self.sessions: list[Session] = []
        self.ids = IdSpace()
        self.block_tokens = 0
        self._sequence = 0

    def session(self, row: dict[str, Any]) -> None:
        size = int(row["block_size"])
        if self.block_tokens not in (0, size):
            raise ValueError(f"session {row.get('id')} has blocks of {size} tokens, others {self.block_tokens}")
        self.block_tokens = size
        local = row.get("hash_id_scope", "local") != "global"
        self._agent(str(row.get("id", len(self.sessions))), row["requests"], _Numbering(self.ids, local), 0.0, None, -1)

    def _agent(
        self, name: str, rows: list[dict[str, Any]], numbering: "_Numbering", start_s: float,
        parent: int | None, after: int,
    ) -> None:  # fmt: skip
        """Append one agent's session, then those of its sub-agents. Times of `rows` count from `start_s`."""
        mine, spawned = len(self.sessions), []
        requests: list[Request] = []
        self.sessions.append(Session(name, start_s, ()))
        for row in rows:
            if row["type"] == "subagent":
                spawned.append((row, len(requests) - 1, self._sequence))
                self._sequence += _count(row)
                continue
            think = row.get("think_time")
            requests.append(
                Request(
                    offset_s=float(row["t"]),
                    think_s=None if think is None or not requests else float(think),
                    input_tokens=int(row["in"]),
                    output_tokens=int(row["out"]),
                    runs=numbering.runs(row),
                    sequence=self._sequence,
                )
            )
            self._sequence += 1
        self.sessions[mine] = Session(name, start_s, tuple(requests), parent, after)
        resume = self._sequence
        for row, before, sequence in spawned:
            self._sequence = sequence
            child = f"{name}/{row.get('agent_id', 'agent')}"
            self._agent(child, row["requests"], numbering, start_s + float(row["t"]), mine, before)
        self._sequence = resume


def _count(row: dict[str, Any]) -> int:
    return sum(_count(r) if r["type"] == "subagent" else 1 for r in row["requests"])


class _Numbering:
    """Turns a session's ids into dense ids of the trace, run by run: a local id space is shifted as a whole, and only
    the ids that occur are counted."""

    def __init__(self, ids: IdSpace, local: bool) -> None:
        self._ids, self._local = ids, local
        self._known: list[tuple[int, int, int]] = []

    def runs(self, row: dict[str, Any]) -> tuple[Run, ...]:
        source = [(int(a), int(n)) for a, n in row["hash_runs"]] if "hash_runs" in row else to_runs(row["hash_ids"])
        if not self._local:
            return self._ids.chain([("global", i) for first, count in source for i in range(first, first + count)])
        return join_runs(piece for run in source for piece in self._dense(run))

    def _dense(self, run: Run) -> list[Run]:
        """Dense pieces of one run of local ids. `_known` holds (first local id, first dense id, count) stretches."""
        first, count = run
        pieces: list[Run] = []
        while count > 0:
            found = next((s for s in self._known if s[0] <= first < s[0] + s[2]), None)
            if found is not None:
                length = min(count, found[0] + found[2] - first)
                pieces.append((found[1] + first - found[0], length))
            else:
                length = min([count, *(s[0] - first for s in self._known if s[0] > first)])
                pieces += self._new(first, length)
            first, count = first + length, count - length
        return pieces

    def _new(self, first: int, length: int) -> tuple[Run, ...]:
        fresh = self._ids.fresh(length)
        last = self._known[-1] if self._known else None
        if last is not None and last[0] + last[2] == first and last[1] + last[2] == fresh[0][0]:
            self._known[-1] = (last[0], last[1], last[2] + length)
        else:
            self._known.append((first, fresh[0][0], length))
        return fresh
