"""The one form every trace is read into: sessions of requests whose prompts are chains of block ids. Pure; knows no
file format and no simulator.

A block id stands for one block of a prompt *and everything before it* (equal ids mean equal prefixes), so the leading
run of known ids is exactly what a prefix cache can give back. Ids are dense: 0 .. num_blocks - 1. Agentic prompts are
long and mostly consecutive, so a chain is kept as runs of (first id, count); whole traces fit in memory that way.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

Run = tuple[int, int]
"""(first id, count): the ids first, first + 1, ... first + count - 1."""


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One call of a session."""

    offset_s: float
    """Recorded arrival, in seconds from the start of its session."""
    think_s: float | None
    """Pause between the end of the previous answer of this session and this request, for closed-loop replay. None:
    the trace does not tell, so the request arrives at `offset_s` whatever happened before."""
    input_tokens: int
    output_tokens: int
    runs: tuple[Run, ...]
    sequence: int
    """Position in the file: breaks ties between equal arrival times."""

    @property
    def num_blocks(self) -> int:
        return sum(count for _, count in self.runs)

    def blocks(self) -> list[int]:
        """The chain of the prompt, first block first."""
        return list(itertools.chain.from_iterable(range(first, first + count) for first, count in self.runs))


@dataclasses.dataclass(frozen=True, slots=True)
class Session:
    """One conversation, agent or sub-agent: its requests follow each other."""

    name: str
    start_s: float
    """Recorded start on the clock of the trace."""
    requests: tuple[Request, ...]
    parent: int | None = None
    """Index in `Trace.sessions` of the session that started this one as a sub-agent."""
    after_request: int = -1
    """Index of the parent's last request before this session started; -1: none."""


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """A request in the order of recorded time."""

    at_s: float
    session: int
    request: Request


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    name: str
    block_tokens: int
    """Tokens of one block of `Request.runs`."""
    num_blocks: int
    """Ids lie in [0, num_blocks)."""
    sessions: tuple[Session, ...]
    has_prefixes: bool = True
    """False: the source has lengths only, every block is unique and no hit is possible."""

    def arrivals(self) -> list[Arrival]:
        """Every request by recorded arrival time; equal times in file order."""
        flat = [
            Arrival(session.start_s + request.offset_s, index, request)
            for index, session in enumerate(self.sessions)
            for request in session.requests
        ]
        flat.sort(key=lambda arrival: (arrival.at_s, arrival.request.sequence))
        return flat

    def requests(self) -> Iterator[Request]:
        return itertools.chain.from_iterable(session.requests for session in self.sessions)

    def head(self, roots: int) -> "Trace":
        """The first `roots` sessions that are nobody's sub-agent, with all their sub-agents. Ids stay as they are."""
        kept: dict[int, int] = {}
        for index, session in enumerate(self.sessions):
            if session.parent in kept or (session.parent is None and roots > 0):
                roots -= session.parent is None
                kept[index] = len(kept)
        sessions = []
        for old in kept:
            session = self.sessions[old]
            parent = None if session.parent is None else kept[session.parent]
            sessions.append(dataclasses.replace(session, parent=parent))
        return dataclasses.replace(self, sessions=tuple(sessions))


def to_runs(ids: Iterable[int]) -> tuple[Run, ...]:
    """Consecutive ids as runs."""
    runs: list[Run] = []
    first = count = 0
    for block in ids:
        if count and block == first + count:
            count += 1
            continue
        if count:
            runs.append((first, count))
        first, count = block, 1
    if count:
        runs.append((first, count))
    return tuple(runs)


class IdSpace:
    """Gives dense ids to whatever a format uses as block keys."""

    def __init__(self) -> None:
        self._ids: dict[object, int] = {}
        self.used = 0

    def of(self, key: object) -> int:
        """The id of `key`, the next free one if it is new."""
        found = self._ids.get(key)
        if found is None:
            found = self._ids[key] = self.used
            self.used += 1
        return found

    def chain(self, keys: Sequence[object]) -> tuple[Run, ...]:
        return to_runs(self.of(key) for key in keys)

    def fresh(self, count: int) -> tuple[Run, ...]:
        """`count` ids that nobody else will get."""
        first = self.used
        self.used += count
        return ((first, count),) if count else ()


def join_runs(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Merge neighbours that continue each other."""
    joined: list[Run] = []
    for first, count in runs:
        if joined and joined[-1][0] + joined[-1][1] == first:
            joined[-1] = (joined[-1][0], joined[-1][1] + count)
        elif count:
            joined.append((first, count))
    return tuple(joined)


def take_blocks(runs: Iterable[Run], count: int) -> tuple[Run, ...]:
    """The first `count` blocks of a chain."""
    taken: list[Run] = []
    for first, length in runs:
        if count <= 0:
            break
        taken.append((first, min(length, count)))
        count -= length
    return tuple(taken)
