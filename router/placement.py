"""Which prefill group computes a prompt and which decode rank continues it: the pair with the lowest predicted time to
the second token. Pure: decides from the directory's answer, its own load counts and the cost model.

Load is counted when a place is taken, before anything is sent, so that a burst spreads. Equal pairs are taken in turn.
"""

import asyncio
import dataclasses
from collections.abc import Callable

from headrace.errors import NeverFits
from headrace.kernels.formats import BLOCK_TOKENS
from headrace.kvstore.base import Directory, Placement
from headrace.router.admission import Admission
from headrace.router.base import Demand
from headrace.router.costs import CostModel, PromptWork

BURST_S = 2.0
"""How long a group that was just given a prompt is believed to have it, before the directory can know."""
BURST_ENTRIES = 4096


@dataclasses.dataclass(slots=True)
class GroupLoad:
    """One prefill group as the router sees it."""

    blocks: int
    """Device blocks of a rank: a longer prompt never fits."""
    pending_s: float = 0.0
    """Predicted seconds of the prompts that were sent and are not finished."""
    prompts: int = 0
    usable: Callable[[], bool] = lambda: True


class Place:
    """A taken place. Implements base.Ticket."""

    def __init__(self, placer: "Placer", prefill: str, decode: str, blocks: int, work: PromptWork, cached: int) -> None:
        self.prefill = prefill
        self.decode = decode
        self.predicted_cached_tokens = cached
        self.predicted_prefill_s = placer.costs.prefill_s(work)
        self._placer = placer
        self._blocks = blocks
        self._prefilling = True
        self._held = True
        group = placer.groups[prefill]
        group.pending_s += self.predicted_prefill_s
        group.prompts += 1
        placer.admission.reserve(decode, blocks)

    def prefill_finished(self) -> None:
        if self._prefilling:
            self._prefilling = False
            group = self._placer.groups[self.prefill]
            group.prompts -= 1
            group.pending_s = max(0.0, group.pending_s - self.predicted_prefill_s) if group.prompts else 0.0

    def release(self) -> None:
        self.prefill_finished()
        if self._held:
            self._held = False
            self._placer.admission.release(self.decode, self._blocks)


class Placer:
    """Implements base.Placer."""

    def __init__(
        self,
        directory: Directory,
        costs: CostModel,
        groups: dict[str, GroupLoad],
        admission: Admission,
        rank_usable: Callable[[str], bool],
    ) -> None:
        self.directory = directory
        self.costs = costs
        self.groups = groups
        self.admission = admission
        self._rank_usable = rank_usable
        self._turn = 0
        self._recent: dict[bytes, tuple[str, float]] = {}

    async def place(self, demand: Demand) -> Place:
        blocks = self.admission.demand(demand.prompt_tokens, demand.answer_tokens)
        self._check_prefill_fits(demand)
        taken: list[Place] = []

        def admit() -> bool:
            place = self._choose(demand, blocks)
            if place is not None:
                taken.append(place)
            return place is not None

        try:
            await self.admission.wait(admit, demand.deadline)
        except BaseException:
            # Admitted and cancelled in the same tick: the place has no owner any more.
            for place in taken:
                place.release()
            raise
        return taken[0]

    def answered(self, tokens: int) -> None:
        self.admission.lengths.add(tokens)

    def _check_prefill_fits(self, demand: Demand) -> None:
        largest = max((group.blocks for group in self.groups.values()), default=0)
        needed = -(-demand.prompt_tokens // BLOCK_TOKENS)
        if needed > largest:
            raise NeverFits(f"the prompt needs {needed} blocks, the largest prefill group has {largest}")

    def _choose(self, demand: Demand, blocks: int) -> Place | None:
        """Take the best pair that has room, or None."""
        ranks = [n for n, room in self.admission.rooms.items() if room.fits(blocks) and self._rank_usable(n)]
        groups = [n for n, group in self.groups.items() if group.usable()] or list(self.groups)
        if not ranks or not groups:
            return None
        found = self.directory.lookup(demand.names)
        now = asyncio.get_running_loop().time()
        scored_groups = [(self._prefill_score(name, demand, found, now), name) for name in self._in_turn(groups)]
        scored_ranks = [(self._decode_score(name, demand, found), name) for name in self._in_turn(ranks)]
        self._turn += 1
        # The two halves of the cost do not depend on each other, so the best pair is the pair of the best.
        prefill = min(scored_groups, key=lambda item: item[0])[1]
        decode = min(scored_ranks, key=lambda item: item[0])[1]
        work, cached = self._work(prefill, demand, found, now)
        self._remember(prefill, demand, now)
        return Place(self, prefill, decode, blocks, work, cached)

    def _in_turn(self, names: list[str]) -> list[str]:
        start = self._turn % len(names)
        return names[start:] + names[:start]

    def _prefill_score(self, name: str, demand: Demand, found: Placement, now: float) -> float:
        work, _ = self._work(name, demand, found, now)
        return self.groups[name].pending_s + self.costs.prefill_s(work)

    def _decode_score(self, name: str, demand: Demand, found: Placement) -> float:
        total = -(-demand.prompt_tokens // BLOCK_TOKENS)
        missing = total - min(found.device_blocks.get(name, 0), total)
        return self.costs.decode_s(missing, self.admission.rooms[name].sequences)

    def _work(self, group: str, demand: Demand, found: Placement, now: float) -> tuple[PromptWork, int]:
        """What the group would do, and how many prompt tokens nobody would compute."""
        device = max(found.device_blocks.get(group, 0), self._burst_blocks(group, demand, now))
        host = max(found.host_blocks.values(), default=0)
        stored = max(host, max(found.stored_blocks.values(), default=0))
        cached = min(max(device, stored) * BLOCK_TOKENS, demand.prompt_tokens - 1)
        work = PromptWork(
            demand.prompt_tokens - cached, max(0, stored - device), max(0, stored - max(host, device))
        )  # fmt: skip
        return work, cached

    def _burst_blocks(self, group: str, demand: Demand, now: float) -> int:
        """Leading blocks that the group is computing right now for a sibling."""
        for depth in range(len(demand.names) - 1, -1, -1):
            entry = self._recent.get(demand.names[depth])
            if entry is not None and entry[0] == group and entry[1] > now:
                return depth + 1
            if len(demand.names) - depth > 64:
                break
        return 0

    def _remember(self, group: str, demand: Demand, now: float) -> None:
        # Only the last names of a prompt: a sibling with another ending still meets one of them.
        for name in demand.names[-8:]:
            self._recent.pop(name, None)
            self._recent[name] = (group, now + BURST_S)
        while len(self._recent) > BURST_ENTRIES:
            del self._recent[next(iter(self._recent))]
