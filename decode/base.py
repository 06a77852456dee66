"""Contracts of the decode room: what a rank is told, where its output goes, and how its ranks agree. No torch.

The life of a request is in README.md. One thread per rank, the step loop, owns every sequence, slot and counter; what
other threads want reaches it through `DecodeRank`'s inbox.
"""

import dataclasses
from collections.abc import Sequence as Seq
from typing import Any, NewType, Protocol

from headrace.ids import BlockName, Tier

StreamId = NewType("StreamId", int)
"""One open gRPC stream of one router. Its end is the end of all its requests."""

LENGTH = "length"
"""Finish reason of an answer that reached max_tokens or the end of the context."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """What one rank is configured to do. The ranks of a group have equal options."""

    max_running: int
    """Sequences that hold slots at once (joining ones included)."""
    max_queued: int
    """Requests waiting beyond that."""
    draft_tokens: int
    """Drafts a step verifies at most; 0: speculation off."""
    adaptive: bool = False
    """Draft fewer when fewer pay (draft_length.py)."""
    context_tokens: int
    """Longest prompt + answer of the model."""
    strict: bool = False
    """True: a sequence is admitted when its whole lifetime fits. False: when what it is expected to need fits; one that
    needs more than there is has the youngest parked in the host tier."""


class Sink(Protocol):
    """Where the messages of one stream go. Called by the step loop: never blocks, never raises."""

    def put(self, message: Any) -> bool:
        """Deliver one message. False: the reader is too slow and the message was dropped; the loop then fails every
        request of the stream."""
        ...

    def put_last(self, message: Any) -> None:
        """Deliver the last message of one request, whatever the backlog: at most one per accepted request."""
        ...


class Control(Protocol):
    """The small exchange outside the model by which the ranks of a group agree on a step."""

    rank: int
    size: int
    exchanges: int
    """Calls so far: equal on all ranks."""

    def gather(self, row: Seq[int]) -> list[list[int]]:
        """Every rank gives one row of integers of equal length and gets the rows of all ranks, by rank. Blocks until
        every rank has called. Raises RankLost when a rank is gone."""
        ...


class Bell(Protocol):
    """Wakes sleeping ranks of the group. A ring carries the number of the control exchange that the ringer is about to
    enter, so that a stale ring wakes nobody."""

    def ring(self, exchange: int) -> None:
        """Wake every rank, this one included, that sleeps before `exchange` or an earlier one. Any thread."""
        ...

    def sleep(self, exchange: int, timeout_s: float) -> None:
        """Return when somebody has rung for `exchange` or a later one, or after `timeout_s`."""
        ...

    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """One block of a prompt that is not in this rank's device tier: to be leased and copied."""

    name: BlockName
    position: int
    """Which block of the sequence, 0 for its first 64 tokens."""


LABELS = {"restored_tokens_total": "tier", "drafted_at_total": "position", "accepted_at_total": "position"}


@dataclasses.dataclass(slots=True)
class Counters:
    """Totals of one rank since it started; the names are those of BoxStatus.values."""

    steps_total: int = 0
    drafted_total: int = 0
    accepted_total: int = 0
    emitted_tokens_total: int = 0
    prompt_rows_computed_total: int = 0
    aborted_total: int = 0
    finished_total: int = 0
    refused_total: int = 0
    failed_total: int = 0
    parked_total: int = 0
    resumed_total: int = 0
    published_blocks_total: int = 0
    publish_skipped_total: int = 0
    restored_tokens_total: dict[str, int] = dataclasses.field(
        default_factory=lambda: {Tier.DEVICE.value: 0, Tier.HOST.value: 0}
    )
    drafted_at_total: dict[int, int] = dataclasses.field(default_factory=dict)
    """Verified drafts by their place in the step, from 1. Those behind a rejected one count: they were computed."""
    accepted_at_total: dict[int, int] = dataclasses.field(default_factory=dict)

    def count(self, tokens: int, drafted: int, accepted: int) -> None:
        """One sequence's share of a step."""
        self.emitted_tokens_total += tokens
        self.drafted_total += drafted
        self.accepted_total += accepted
        for at in range(1, drafted + 1):
            self.drafted_at_total[at] = self.drafted_at_total.get(at, 0) + 1
            self.accepted_at_total[at] = self.accepted_at_total.get(at, 0) + (at <= accepted)

    def values(self) -> dict[str, float]:
        """Flat; the keys of a dictionary are labels."""
        flat: dict[str, float] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, dict):
                flat |= {f"{field.name}{{{LABELS[field.name]}={key}}}": float(count) for key, count in value.items()}
            else:
                flat[field.name] = float(value)
        return flat
