"""How a pair of prefill group and decode rank is chosen among those that have room: policies by name, for comparison.

`predicted` is the one that is meant; the others are what other routers do, on the same candidates. Pure.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from headrace.errors import ConfigError
from headrace.router.base import Demand
from headrace.router.costs import PromptWork

BOUND = 1.25
"""`consistent_hash`: a target takes at most this much more than its share before the next one on the ring is asked."""
KEY_BLOCKS = 4
"""Leading blocks that stand for a conversation when the client names no session."""


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """A prefill group as a candidate."""

    name: str
    queue_s: float
    """Predicted seconds until it begins."""
    work: PromptWork
    prefill_s: float
    """Predicted seconds of restoring and computing."""
    load: int
    """Prompts it has."""

    @property
    def seconds(self) -> float:
        return self.queue_s + self.prefill_s

    @property
    def cached_tokens(self) -> int:
        return self.work.cached_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Rank:
    """A decode rank as a candidate."""

    name: str
    missing_blocks: int
    """Blocks of the prompt that it would have to pull."""
    seconds: float
    """Predicted until the second token, after the first."""
    load: int
    """Sequences it has."""


Candidate = TypeVar("Candidate", Group, Rank)
Order = Callable[[Demand, Sequence[Group], Sequence[Rank], int], tuple[list[Group], list[Rank]]]
"""(demand, groups, ranks, turn) -> both, best first. The candidates come in turn, so equal ones are taken in turn."""


def predicted(_d: Demand, groups: Sequence[Group], ranks: Sequence[Rank], _t: int) -> tuple[list[Group], list[Rank]]:
    """Lowest predicted time to the second token; its two halves do not depend on each other."""
    return sorted(groups, key=lambda g: g.seconds), sorted(ranks, key=lambda r: r.seconds)


def prefix_overlap(
    _d: Demand, groups: Sequence[Group], ranks: Sequence[Rank], _t: int
) -> tuple[list[Group], list[Rank]]:
    """Most of the prompt cached, whatever the load; then the least loaded."""
    return (
        sorted(groups, key=lambda g: (-(g.cached_tokens - 64 * g.work.restore_blocks), -g.cached_tokens, g.load)),
        sorted(ranks, key=lambda r: (r.missing_blocks, r.load)),
    )


def round_robin(_d: Demand, groups: Sequence[Group], ranks: Sequence[Rank], _t: int) -> tuple[list[Group], list[Rank]]:
    return list(groups), list(ranks)


def least_loaded(_d: Demand, groups: Sequence[Group], ranks: Sequence[Rank], _t: int) -> tuple[list[Group], list[Rank]]:
    """Fewest prompts, fewest sequences."""
    return sorted(groups, key=lambda g: g.load), sorted(ranks, key=lambda r: r.load)


def consistent_hash(
    demand: Demand, groups: Sequence[Group], ranks: Sequence[Rank], _t: int
) -> tuple[list[Group], list[Rank]]:
    """By the leading blocks, on a ring without positions (highest hash first); whoever is over its bound goes last."""
    key = b"".join(demand.names[:KEY_BLOCKS])
    return _bounded(_ring(key, groups)), _bounded(_ring(key, ranks))


def session(demand: Demand, groups: Sequence[Group], ranks: Sequence[Rank], _t: int) -> tuple[list[Group], list[Rank]]:
    """By the session that the client names (X-Session-Affinity), else like `consistent_hash`; never moved by load."""
    key = demand.session.encode() or b"".join(demand.names[:KEY_BLOCKS])
    return _ring(key, groups), _ring(key, ranks)


def _ring(key: bytes, candidates: Sequence[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda c: hashlib.sha256(key + b"\0" + c.name.encode()).digest(), reverse=True)


def _bounded(ring: list[Candidate]) -> list[Candidate]:
    bound = BOUND * (sum(c.load for c in ring) + 1) / len(ring)
    return sorted(ring, key=lambda c: c.load + 1 > bound and c.load > 0)


POLICIES: dict[str, Order] = {
    "predicted": predicted,
    "prefix_overlap": prefix_overlap,
    "round_robin": round_robin,
    "least_loaded": least_loaded,
    "consistent_hash": consistent_hash,
    "session": session,
}


def policy_of(name: str) -> Order:
    """Raises ConfigError."""
    if name not in POLICIES:
        raise ConfigError(f"router.policy: {name!r} is not known, expected one of {', '.join(POLICIES)}")
    return POLICIES[name]
