"""What became of the last requests: where they went and why, what they hit, how long each stage took, and where a
prompt parted from the nearest earlier conversation of its tenant. Implements observe.EngineObserver.

Prompts are kept as token ids, the oldest go first; comparing them happens only when somebody asks.
"""

import array
import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headrace.errors import HeadraceError
from headrace.ids import RequestId
from headrace.kernels.formats import BLOCK_TOKENS
from headrace.messages import PrefillDone
from headrace.router.base import Demand, Ticket
from headrace.router.policies import Group, Rank

KEPT_REQUESTS = 4096
SHOWN_TOKENS = 16
"""Tokens of text on both sides of the place where two prompts part."""
SHOWN_CANDIDATES = 16


@dataclasses.dataclass(slots=True)
class Attempt:
    """One pass of one sequence through the pools."""

    sequence: str
    at_s: float
    """Seconds since the request arrived, like all times here."""
    placed: dict[str, Any]
    prefill: dict[str, Any] | None = None
    accepted_s: float | None = None
    error: str | None = None


@dataclasses.dataclass(slots=True)
class Record:
    request_id: str
    tenant: str
    path: str
    arrived: float
    """On the loop's clock."""
    number: int
    created: float = dataclasses.field(default_factory=time.time)
    prompts: "list[array.array[int]]" = dataclasses.field(default_factory=list)
    prompt_tokens: int = 0
    choices: int = 1
    """Of each prompt."""
    ready_s: float = 0.0
    """Read, rendered and tokenised."""
    attempts: list[Attempt] = dataclasses.field(default_factory=list)
    outcome: str = "running"
    ended_s: float | None = None
    usage: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(len(p) * p.itemsize for p in self.prompts)


class Journal:
    """Lives on the event loop."""

    def __init__(self, limit_bytes: int, clock: Callable[[], float], text: Callable[[Sequence[int]], str]) -> None:
        """`limit_bytes`: memory for prompts; 0 keeps none. `text`: decodes token ids."""
        self._limit = limit_bytes
        self._clock = clock
        self._text = text
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._with_prompts: OrderedDict[str, Record] = OrderedDict()
        self._bytes = 0
        self._number = 0

    @property
    def held_bytes(self) -> int:
        return self._bytes

    def begin(
        self, request_id: str, tenant: str, path: str, arrived: float, prompts: Sequence[Sequence[int]], n: int
    ) -> None:
        self._number += 1
        record = Record(request_id, tenant, path, arrived, self._number)
        record.choices = n
        record.prompt_tokens = sum(map(len, prompts))
        record.ready_s = self._clock() - arrived
        if 4 * record.prompt_tokens <= self._limit:
            record.prompts = [array.array("I", prompt) for prompt in prompts]
            self._with_prompts[request_id] = record
            self._bytes += record.size
        self._records[request_id] = record
        while self._bytes > self._limit:
            self._forget_prompts(next(iter(self._with_prompts.values())))
        while len(self._records) > KEPT_REQUESTS:
            self._forget_prompts(self._records.popitem(last=False)[1])

    def _forget_prompts(self, record: Record) -> None:
        if self._with_prompts.pop(record.request_id, None) is not None:
            self._bytes -= record.size
            record.prompts = []

    def end(self, request_id: str, outcome: str, usage: dict[str, Any]) -> None:
        record = self._records.get(request_id)
        if record is not None:
            record.outcome, record.usage = outcome, usage
            record.ended_s = self._clock() - record.arrived

    # engine observer

    def placed(self, ticket: Ticket, demand: Demand) -> None:
        record = self._of(demand)
        if record is not None:
            record.attempts.append(
                Attempt(str(demand.request_id), self._clock() - record.arrived, _placed(ticket, demand))
            )

    def prefilled(self, ticket: Ticket, demand: Demand, done: PrefillDone) -> None:
        attempt = self._attempt(demand)
        if attempt is not None:
            attempt.prefill = {
                "queue_s": done.queue_s,
                "restore_s": done.restore_s,
                "compute_s": done.compute_s,
                "cached_tokens": dict(done.cached_tokens),
                "first_token_s": self._clock() - self._records[_request(demand.request_id)].arrived,
            }

    def accepted(self, demand: Demand) -> None:
        attempt = self._attempt(demand)
        if attempt is not None:
            attempt.accepted_s = self._clock() - self._records[_request(demand.request_id)].arrived

    def stepped(self, drafted: int, accepted: int, since_last_s: float) -> None:
        return None

    def retried(self, request_id: RequestId, error: HeadraceError) -> None:
        record = self._records.get(_request(request_id))
        if record is not None and record.attempts:
            record.attempts[-1].error = f"{error.kind}: {error}"

    def abort_unconfirmed(self) -> None:
        return None

    def _of(self, demand: Demand) -> Record | None:
        return self._records.get(_request(demand.request_id))

    def _attempt(self, demand: Demand) -> Attempt | None:
        record = self._of(demand)
        attempts = record.attempts if record is not None else []
        return next((a for a in reversed(attempts) if a.sequence == demand.request_id), None)

    # questions

    def recent(self, tenant: str | None, count: int) -> list[dict[str, Any]]:
        """The newest requests, without details. `tenant` None: everybody's."""
        found = [r for r in reversed(self._records.values()) if tenant in (None, r.tenant)][:count]
        return [self._head(record) for record in found]

    def explain(self, request_id: str, tenant: str | None) -> dict[str, Any] | None:
        """Everything of one request; None: unknown, or another tenant's."""
        record = self._records.get(request_id)
        if record is None or tenant not in (None, record.tenant):
            return None
        attempts = [
            {k: v for k, v in dataclasses.asdict(attempt).items() if v is not None} for attempt in record.attempts
        ]
        return {**self._head(record), "attempts": attempts, "prompts": self._prompts(record)}

    def _head(self, record: Record) -> dict[str, Any]:
        return {
            "id": record.request_id,
            "path": record.path,
            "created": int(record.created),
            "prompt_tokens": record.prompt_tokens,
            "outcome": record.outcome,
            "ready_s": record.ready_s,
            "ended_s": record.ended_s,
            "usage": record.usage,
        }

    def _prompts(self, record: Record) -> list[dict[str, Any]]:
        first: dict[int, dict[str, Any]] = {}
        for attempt in record.attempts:
            at = int(attempt.sequence.rpartition("-")[2] or 0)
            if attempt.prefill is not None:
                first.setdefault(at, attempt.prefill)
        found = []
        for i, prompt in enumerate(record.prompts):
            prefill = first.get(i * record.choices)
            cached = sum(prefill["cached_tokens"].values()) if prefill else 0
            found.append(self._parted(record, prompt, cached))
        return found

    def _parted(self, record: Record, prompt: "array.array[int]", cached: int) -> dict[str, Any]:
        """Where `prompt` parts from the earlier prompt of its tenant that it shares most with."""
        mine = np.frombuffer(prompt, "<u4")
        best, shared, theirs = None, 0, mine[:0]
        for other in self._with_prompts.values():
            if other.tenant != record.tenant or other.number >= record.number:
                continue
            for known in other.prompts:
                candidate = np.frombuffer(known, "<u4")
                common = _common(mine, candidate)
                if best is None or common > shared:
                    best, shared, theirs = other, common, candidate
        found: dict[str, Any] = {"tokens": len(mine), "cached_tokens": cached}
        if best is None:
            return {**found, "why": "no earlier prompt of this tenant is remembered"}
        found |= {"nearest": best.request_id, "age_s": round(record.arrived - best.arrived, 3), "shared_tokens": shared}
        if shared < len(mine) and shared < len(theirs):
            found["parted"] = {
                "token": shared,
                "block": shared // BLOCK_TOKENS,
                "before": self._text(mine[max(0, shared - SHOWN_TOKENS) : shared].tolist()),
                "this": self._text(mine[shared : shared + SHOWN_TOKENS].tolist()),
                "nearest": self._text(theirs[shared : shared + SHOWN_TOKENS].tolist()),
            }
        whole = min(shared // BLOCK_TOKENS * BLOCK_TOKENS, len(mine) - 1)
        if cached < whole:
            found["why"] = f"{whole - cached} shared tokens were in no tier (evicted, flushed or never published)"
        elif "parted" in found:
            found["why"] = f"everything shared was hit; the prompts part at token {shared}, in block {shared // 64}"
        else:
            found["why"] = "everything shared was hit; one prompt is the beginning of the other"
        return found


def _common(a: "np.ndarray[Any, Any]", b: "np.ndarray[Any, Any]") -> int:
    """Length of the common beginning."""
    size = min(len(a), len(b))
    differing = a[:size] != b[:size]
    return int(differing.argmax()) if differing.any() else size


def _request(sequence: str) -> str:
    """ "cmpl-1f-0" is choice 0 of request "cmpl-1f"."""
    return sequence.rpartition("-")[0]


def _placed(ticket: Ticket, demand: Demand) -> dict[str, Any]:
    def group(one: Group) -> dict[str, Any]:
        return {
            "name": one.name,
            "seconds": one.seconds,
            "queue_s": one.queue_s,
            "cached_tokens": one.cached_tokens,
            "new_tokens": one.work.new_tokens,
            "restore_blocks": one.work.restore_blocks,
            "prompts": one.load,
        }

    def rank(one: Rank) -> dict[str, Any]:
        return {"name": one.name, "seconds": one.seconds, "missing_blocks": one.missing_blocks, "sequences": one.load}

    return {
        "prefill": ticket.prefill,
        "decode": ticket.decode,
        "prompt_blocks": len(demand.names),
        "matched_blocks": ticket.choice.matched,
        "predicted_prefill_s": ticket.predicted_prefill_s,
        "predicted_cached_tokens": ticket.predicted_cached_tokens,
        "groups": [group(g) for g in ticket.choice.groups[:SHOWN_CANDIDATES]],
        "ranks": [rank(r) for r in ticket.choice.ranks[:SHOWN_CANDIDATES]],
    }
