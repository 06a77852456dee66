"""Room on the decode ranks: who has reserved how much, and who waits for it. Pure bookkeeping, one event loop.

A sequence reserves blocks for prompt and answer before it is prefilled: the answer that is expected of it, since one
that grows longer makes room on its rank (decode/README.md), or the longest that it may become (`decode.admission:
strict`). The queue is bounded and fair between tenants (`fair.py`); a request is refused only when the queue is full
*and* it does not fit now.
"""

import asyncio
import dataclasses
from collections.abc import Callable

from headrace.errors import CapacityError, NeverFits
from headrace.forecast import AnswerLengths
from headrace.kernels.formats import BLOCK_TOKENS
from headrace.router.fair import FairQueue, Waiter

SPECULATION_ROWS = 16
"""Rows behind the committed ones that verify and draft steps write."""


def blocks_for(prompt_tokens: int, answer_tokens: int) -> int:
    """Device blocks a sequence of so many tokens needs on its decode rank."""
    return -(-(prompt_tokens + answer_tokens + SPECULATION_ROWS) // BLOCK_TOKENS)


@dataclasses.dataclass(slots=True)
class RankRoom:
    """Reservations on one decode rank."""

    blocks: int
    """Capacity, as the rank reports it."""
    sequences_limit: int
    """Most sequences: running and queued on the rank."""
    reserved_blocks: int = 0
    sequences: int = 0

    def fits(self, blocks: int) -> bool:
        return self.reserved_blocks + blocks <= self.blocks and self.sequences < self.sequences_limit


class Admission:
    def __init__(
        self,
        rooms: dict[str, RankRoom],
        *,
        queue_limit: int,
        strict: bool = True,
        weight: Callable[[str], float] = lambda _tenant: 1.0,
    ) -> None:
        self.rooms = rooms
        self.lengths = AnswerLengths()
        self._strict = strict
        self._queue = FairQueue(weight)
        self._queue_limit = queue_limit

    @property
    def queued(self) -> int:
        return len(self._queue)

    def demand(self, prompt_tokens: int, answer_tokens: int) -> int:
        """Blocks to reserve for a sequence that may generate `answer_tokens` more. Raises NeverFits when no rank could
        hold it to its end."""
        self._check_ever_fits(blocks_for(prompt_tokens, answer_tokens))
        return blocks_for(prompt_tokens, answer_tokens if self._strict else self.lengths.expect(0, answer_tokens))

    def _check_ever_fits(self, blocks: int) -> None:
        largest = max((room.blocks for room in self.rooms.values()), default=0)
        if blocks > largest:
            raise NeverFits(
                f"prompt and answer need {blocks} blocks of {BLOCK_TOKENS} tokens, "
                f"the largest decode rank has {largest}: shorten the prompt or lower max_tokens"
            )

    @property
    def queued_by_tenant(self) -> dict[str, int]:
        return self._queue.lengths()

    async def wait(
        self, admit: Callable[[], bool], deadline: float, tenant: str = "", priority: int = 0, cost: float = 1.0
    ) -> None:
        """Return as soon as `admit()` succeeds, when it is this request's turn. Raises CapacityError when the queue is
        full or the deadline (loop clock) passes first. `cost`: what it will take, in blocks."""
        if not self._queue and admit():
            return
        waiter = Waiter(admit, asyncio.get_running_loop().create_future(), tenant, priority, cost)
        if len(self._queue) >= self._queue_limit:
            if admit():
                return
            self._make_place(tenant)
        self._queue.add(waiter)
        try:
            async with asyncio.timeout_at(deadline):
                await waiter.admitted
        except TimeoutError as error:
            raise CapacityError("no decode rank had room before the request's deadline") from error
        finally:
            if waiter in self._queue:
                self._queue.remove(waiter)
                self.poke()

    def _make_place(self, tenant: str) -> None:
        """Raises CapacityError unless somebody else can be refused instead."""
        full = CapacityError(f"{len(self._queue)} requests already wait for room (limit {self._queue_limit})")
        other = self._queue.to_displace(tenant)
        if other is None:
            raise full
        self._queue.remove(other)
        if not other.admitted.done():
            other.admitted.set_exception(full)

    def poke(self) -> None:
        """Room may have appeared: admit whoever's turn it is while it fits."""
        while (waiter := self._queue.next()) is not None and waiter.admit():
            self._queue.take(waiter)
            if not waiter.admitted.done():
                waiter.admitted.set_result(None)

    def reserve(self, rank: str, blocks: int) -> None:
        room = self.rooms[rank]
        room.reserved_blocks += blocks
        room.sequences += 1

    def release(self, rank: str, blocks: int) -> None:
        room = self.rooms[rank]
        room.reserved_blocks -= blocks
        room.sequences -= 1
        self.poke()

    def check_integrity(self) -> list[str]:
        """Every violated invariant, as text."""
        problems = []
        for name, room in self.rooms.items():
            if room.reserved_blocks < 0 or room.sequences < 0:
                problems.append(f"{name}: reserved {room.reserved_blocks} blocks, {room.sequences} sequences")
            if not room.sequences and room.reserved_blocks:
                problems.append(f"{name}: {room.reserved_blocks} blocks reserved by no sequence")
        return problems
