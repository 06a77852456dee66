"""Which prefill group computes a prompt and which decode rank continues it. Pure: decides from the directory's answer,
its own load counts and the cost model, by one of the policies.

Load is counted when a place is taken, before anything is sent, so that a burst spreads. Equal pairs are taken in turn.
A hot prefix replicates by itself: once waiting for the group that has it costs more than restoring it elsewhere, the
prediction goes elsewhere, and that group has it from then on.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable

from headrace.errors import CapacityError, NeverFits
from headrace.kernels.formats import BLOCK_TOKENS
from headrace.kvstore.base import Directory, Placement
from headrace.router.admission import Admission
from headrace.router.base import Choice, Demand
from headrace.router.breakers import Breakers
from headrace.router.costs import CostModel, PromptWork
from headrace.router.flights import LEAST_BLOCKS, Flights
from headrace.router.policies import Group, Order, Rank, predicted

WAIT_SLACK = 1.25
"""A sibling waits for a prefix that is being computed if that takes at most so much longer than computing it again."""
LONGEST_WAITS = 4
TRUSTED_ERROR, TRUSTED_OBSERVATIONS = 0.5, 20
"""Early refusals need a cost model that has been this good, for this many prompts."""


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

    def __init__(self, placer: "Placer", group: Group, rank: Rank, blocks: int, demand: Demand, choice: Choice) -> None:
        self.prefill = group.name
        self.decode = rank.name
        self.predicted_cached_tokens = group.cached_tokens
        self.predicted_prefill_s = group.prefill_s
        self.choice = choice
        self._placer = placer
        self._blocks = blocks
        self._prefilling = True
        self._held = True
        load = placer.groups[self.prefill]
        load.pending_s += self.predicted_prefill_s
        load.prompts += 1
        placer.admission.reserve(self.decode, blocks)
        now = asyncio.get_running_loop().time()
        placer.breakers.taken(self._pair, now)
        fresh = demand.names[group.cached_tokens // BLOCK_TOKENS :]
        self._flight = placer.flights.depart(self.prefill, fresh, now + load.pending_s)

    @property
    def _pair(self) -> tuple[str, str]:
        return self.prefill, self.decode

    def prefill_finished(self, *, computed: bool = True) -> None:
        if self._prefilling:
            self._prefilling = False
            load = self._placer.groups[self.prefill]
            load.prompts -= 1
            load.pending_s = max(0.0, load.pending_s - self.predicted_prefill_s) if load.prompts else 0.0
            self._placer.flights.arrive(self._flight, asyncio.get_running_loop().time(), computed=computed)

    def failed(self) -> None:
        self._placer.breakers.failed(self._pair, asyncio.get_running_loop().time())

    def worked(self) -> None:
        self._placer.breakers.worked(self._pair)

    def release(self) -> None:
        self.prefill_finished(computed=False)
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
        *,
        policy: Order = predicted,
        slo_ttft_s: float = 0.0,
    ) -> None:
        """`slo_ttft_s`: prompts that would certainly take longer to their first token are refused; 0: none is."""
        self.directory = directory
        self.costs = costs
        self.groups = groups
        self.admission = admission
        self.breakers = Breakers()
        self.flights = Flights()
        self.resting: set[str] = set()
        """Boxes that get no new work (drained by an administrator)."""
        self.refused_early = 0
        self._rank_usable = rank_usable
        self._policy = policy
        self._slo_ttft_s = slo_ttft_s
        self._turn = 0

    async def place(self, demand: Demand) -> Place:
        blocks = self.admission.demand(demand.prompt_tokens, demand.answer_tokens)
        self._check_prefill_fits(demand)
        await self._wait_for_prefix(demand)
        self._refuse_hopeless(demand)
        taken: list[Place] = []

        def admit() -> bool:
            place = self._choose(demand, blocks)
            if place is not None:
                taken.append(place)
            return place is not None

        try:
            await self.admission.wait(admit, demand.deadline, demand.tenant, demand.priority, blocks)
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

    async def _wait_for_prefix(self, demand: Demand) -> None:
        """If a group computes the beginning of this prompt right now, let it: the prefix is computed once, and the
        prompts that share it spread over all groups when it is there."""
        clock = asyncio.get_running_loop().time
        for _ in range(LONGEST_WAITS):
            groups = self._usable_groups()
            if len(groups) < 2:
                return  # one group computes a shared prefix once by itself
            now = clock()
            found = self.directory.lookup(demand.names)
            places = (found.host_blocks, found.stored_blocks, {g: found.device_blocks.get(g, 0) for g in groups})
            known = max((depth for place in places for depth in place.values()), default=0)
            depth, flight = self.flights.along(demand.names, known, now)
            if flight is None or depth - known < LEAST_BLOCKS:
                return
            left = max(0.0, flight.ends_at - now)
            alone = min(self._group(name, demand, found, now).seconds for name in groups)
            rest = demand.prompt_tokens - depth * BLOCK_TOKENS
            shared = self.costs.prefill_s(PromptWork(max(1, rest), depth, 0, depth * BLOCK_TOKENS))
            if left + shared > WAIT_SLACK * alone:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min(demand.deadline, now + 2 * left + 0.05)):
                    await flight.over.wait()
            if not flight.over.is_set():
                return

    def _refuse_hopeless(self, demand: Demand) -> None:
        """Raises CapacityError when no group can meet the objective, by a model that has earned its say."""
        costs = self.costs
        if not self._slo_ttft_s or costs.observations < TRUSTED_OBSERVATIONS or costs.error > TRUSTED_ERROR:
            return
        groups = self._usable_groups()
        if any(not self.groups[name].prompts for name in groups):
            return  # never while a group is idle
        found, now = self.directory.lookup(demand.names), asyncio.get_running_loop().time()
        best = min(self._group(name, demand, found, now).seconds for name in groups)
        surely = best / (1 + costs.error)
        if surely > self._slo_ttft_s:
            self.refused_early += 1
            raise CapacityError(
                f"the first token would take about {best:.1f} s, and {self._slo_ttft_s:g} s are promised",
                surely - self._slo_ttft_s,
            )

    def _usable_groups(self) -> list[str]:
        usable = [n for n, group in self.groups.items() if group.usable() and n not in self.resting]
        return usable or [n for n in self.groups if n not in self.resting] or list(self.groups)

    def _choose(self, demand: Demand, blocks: int) -> Place | None:
        """Take the best pair that has room, or None."""
        rooms = self.admission.rooms
        ranks = [n for n, room in rooms.items() if room.fits(blocks) and self._rank_usable(n) and n not in self.resting]
        groups = self._usable_groups()
        if not ranks or not groups:
            return None
        found = self.directory.lookup(demand.names)
        now = asyncio.get_running_loop().time()
        some = [self._group(name, demand, found, now) for name in self._in_turn(groups)]
        others = [self._rank(name, demand, found) for name in self._in_turn(ranks)]
        best_groups, best_ranks = self._policy(demand, some, others, self._turn)
        self._turn += 1
        group, rank = self._pair(best_groups, best_ranks, now)
        host = max(found.host_blocks.values(), default=0)
        matched = {"host": host, group.name: found.device_blocks.get(group.name, 0)}
        matched[rank.name] = found.device_blocks.get(rank.name, 0)
        return Place(self, group, rank, blocks, demand, Choice(matched, tuple(best_groups), tuple(best_ranks)))

    def _pair(self, groups: list[Group], ranks: list[Rank], now: float) -> tuple[Group, Rank]:
        """The best pair that is not left out; the best one if all are."""
        first = groups[0], ranks[0]
        if self.breakers.allows((first[0].name, first[1].name), now):
            return first
        order = sorted(((g, r) for g in range(len(groups)) for r in range(len(ranks))), key=sum)
        for g, r in order:
            if self.breakers.allows((groups[g].name, ranks[r].name), now):
                return groups[g], ranks[r]
        return first

    def _in_turn(self, names: list[str]) -> list[str]:
        start = self._turn % len(names)
        return names[start:] + names[:start]

    def _group(self, name: str, demand: Demand, found: Placement, now: float) -> Group:
        work, load = self._work(name, demand, found, now), self.groups[name]
        return Group(name, load.pending_s, work, self.costs.prefill_s(work), load.prompts)

    def _rank(self, name: str, demand: Demand, found: Placement) -> Rank:
        total = -(-demand.prompt_tokens // BLOCK_TOKENS)
        missing = total - min(found.device_blocks.get(name, 0), total)
        load = self.admission.rooms[name].sequences
        return Rank(name, missing, self.costs.decode_s(missing, load), load)

    def _work(self, group: str, demand: Demand, found: Placement, now: float) -> PromptWork:
        """What the group would do."""
        device = found.device_blocks.get(group, 0)
        host = max(found.host_blocks.values(), default=0)
        known = max(device, host, max(found.stored_blocks.values(), default=0))
        depth, _ = self.flights.along(demand.names, known, now)
        theirs = self.flights.of(demand.names[depth - 1]) if depth > known else None
        if theirs is not None and theirs.group == group:
            device = known = depth  # it computes that, or just did
        elif theirs is not None and theirs.over.is_set():
            host = known = depth  # another one has written it through
        cached = min(known * BLOCK_TOKENS, demand.prompt_tokens - 1)
        return PromptWork(
            demand.prompt_tokens - cached, max(0, known - device), max(0, known - max(host, device)), cached
        )
