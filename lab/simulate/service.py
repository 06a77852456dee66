"""A service in simulated time: the router's own placement and admission, device indexes, a node's tiers, prefill groups
that take prompts in turn, decode ranks that hold their conversations.

One request:
1. the placer waits for a decode reservation and picks group and rank (`router.placement`, unchanged);
2. it queues for its group (one prompt at a time);
3. the group restores what the node has and computes the rest, one behind the other's back: the longer of both counts;
4. its blocks are on the device and written through to the host tier; the first token is out;
5. the decode rank pulls the blocks it lacks and decodes; then, if answers are published, their full blocks are stored;
6. the reservation is given back.

Not modelled: chunks of several prompts interleaving, decode steps slowing prefill in hybrid ranks, failures.
"""

import asyncio
import dataclasses
from collections.abc import Sequence

from headrace.errors import CapacityError
from headrace.ids import BlockName, SlotIndex
from headrace.kernels.formats import BLOCK_TOKENS
from headrace.kvstore.base import Placement
from headrace.kvstore.device_index import DeviceIndex
from headrace.kvstore.policies import make_policy
from headrace.lab.simulate.costs import PrefillCosts
from headrace.lab.simulate.service_settings import ServiceSettings
from headrace.lab.simulate.settings import to_blocks
from headrace.lab.simulate.tiers import Node, TierCache
from headrace.router.admission import Admission, RankRoom, blocks_for
from headrace.router.base import Demand
from headrace.router.costs import CostModel, LineFit, PromptWork
from headrace.router.placement import GroupLoad, Placer

_NODE = "node-0"
_ENDLESS_BLOCKS = 1 << 40


@dataclasses.dataclass(slots=True)
class Outcome:
    """What one request met. Seconds of simulated time; tokens by who gave them."""

    prompt_tokens: int
    arrived_s: float
    refused: bool = False
    device_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    queue_s: float = 0.0
    """Admission, placement and the group's queue."""
    restore_s: float = 0.0
    """What restoring took beyond computing."""
    compute_s: float = 0.0
    handover_s: float = 0.0
    decode_s: float = 0.0

    @property
    def hit_tokens(self) -> int:
        return self.device_tokens + self.host_tokens + self.disk_tokens

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.restore_s + self.compute_s

    @property
    def total_s(self) -> float:
        return self.ttft_s + self.handover_s + self.decode_s


def tier_blocks(size: str, slab_bytes: int) -> int:
    """Blocks of 64 tokens; 0 for no tier."""
    if size in ("0", "0b"):
        return 0
    return to_blocks(size, BLOCK_TOKENS, slab_bytes) or _ENDLESS_BLOCKS


class Service:
    """Everything of one simulated deployment. Lives on one (virtual) event loop."""

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings = settings
        self._clock = asyncio.get_running_loop().time
        self.costs = PrefillCosts(
            fixed_s=settings.fixed_s, token_s=settings.token_s, context_s=settings.context_s
        )  # fmt: skip
        self.groups = {f"prefill-{i}": self._device(settings.prefill_size) for i in range(settings.groups)}
        self.ranks = {f"decode-0.{i}": self._device(settings.decode_size) for i in range(settings.decode_ranks)}
        self.node = Node(
            self._tier(settings.host_size, settings.host_policy), self._tier(settings.disk_size, settings.disk_policy)
        )
        self.busy_s = dict.fromkeys(self.groups, 0.0)
        self._turns = {name: asyncio.Lock() for name in self.groups}
        self.admission = Admission(
            {name: RankRoom(index.num_slots, settings.decode_running) for name, index in self.ranks.items()},
            queue_limit=settings.max_queued,
        )
        self._placer = Placer(
            self,
            self._cost_model(),
            {name: GroupLoad(index.num_slots) for name, index in self.groups.items()},
            self.admission,
            lambda _rank: True,
        )

    def _device(self, size: str) -> DeviceIndex:
        blocks = tier_blocks(size, self.settings.slab_bytes)
        return DeviceIndex(blocks, make_policy(self.settings.device_policy, blocks), self._clock)

    def _tier(self, size: str, policy: str) -> TierCache:
        return TierCache(tier_blocks(size, self.settings.slab_bytes), policy, self.settings.slab_bytes)

    def _cost_model(self) -> CostModel:
        """The router's model, started at the truth for short prompts; it goes on learning from what prompts take."""
        model = CostModel()
        model.compute = LineFit(self.settings.fixed_s, self.settings.token_s, 2048.0)
        model.restore_s = self.settings.slab_bytes / (self.settings.host_gbps * 1e9)
        model.step_s = self.settings.answer_token_s
        return model

    async def start(self) -> None:
        """Directory interface: nothing to start."""

    async def close(self) -> None:
        """Directory interface: nothing to close."""

    def stats(self) -> dict[str, float]:
        return {}

    @property
    def prediction_error(self) -> float:
        """The router's own smoothed relative error of predicted prefill times."""
        return self._placer.costs.error

    def lookup(self, names: Sequence[BlockName]) -> Placement:
        """Directory interface, always up to date: the event streams of production are faster than a prompt."""
        devices = {name: _leading(index, names) for name, index in {**self.groups, **self.ranks}.items()}
        return Placement({_NODE: self.node.leading(names)}, devices)

    async def serve(
        self, names: Sequence[BlockName], prompt_tokens: int, answer_tokens: int, answered: Sequence[BlockName]
    ) -> Outcome:
        """One request through the house. `names`: full blocks of the prompt; `answered`: full blocks of prompt and
        answer as the next turn will name them (empty when unknown)."""
        arrived = self._clock()
        outcome = Outcome(prompt_tokens, arrived)
        demand = Demand(
            names=names, prompt_tokens=prompt_tokens, answer_tokens=answer_tokens,
            deadline=arrived + self.settings.timeout_s,
        )  # fmt: skip
        try:
            place = await self._placer.place(demand)
        except CapacityError:  # also NeverFits
            outcome.refused = True
            return outcome
        try:
            async with self._turns[place.prefill]:
                outcome.queue_s = self._clock() - arrived
                await self._prefill(place.prefill, names, outcome, place.predicted_prefill_s)
            place.prefill_finished()
            await self._decode(place.decode, names, answer_tokens, outcome, answered)
        finally:
            place.release()
        return outcome

    async def _prefill(self, group: str, names: Sequence[BlockName], outcome: Outcome, predicted_s: float) -> None:
        index, node, settings = self.groups[group], self.node, self.settings
        node.expire(self._clock())
        slots = index.acquire(names)
        device, tokens = len(slots), outcome.prompt_tokens
        host, disk = node.run_below(names, device)
        restored = names[device : device + host + disk]
        pinned = node.host.pin(restored, self._clock())
        _split_hits(outcome, device, host, disk)
        slab = settings.slab_bytes / 1e9
        restore_s = max((host + disk) * slab / settings.host_gbps, disk * slab / settings.disk_gbps)
        compute_s = self.costs.seconds(tokens - outcome.hit_tokens, outcome.hit_tokens)
        missing = len(names) - device
        # One more than has names when the prompt ends inside a block: the private last block.
        fresh = index.allocate(-(-tokens // BLOCK_TOKENS) - device)
        assert fresh is not None, "the placer lets no prompt pass that is longer than a group's device tier"
        await asyncio.sleep(max(restore_s, compute_s))
        self.busy_s[group] += max(restore_s, compute_s)
        outcome.compute_s, outcome.restore_s = compute_s, max(0.0, restore_s - compute_s)
        work = PromptWork(tokens - outcome.hit_tokens, host + disk)
        self._placer.costs.learn_prefill(predicted_s, work, outcome.restore_s, compute_s)
        index.release(_name_all(index, slots, fresh[:missing], names))
        index.release(fresh[missing:])
        node.host.unpin(pinned, self._clock())
        node.restored(restored, host, disk, self._clock())
        node.write_through(names, self._clock())

    async def _decode(
        self, rank: str, names: Sequence[BlockName], answer_tokens: int, outcome: Outcome, answered: Sequence[BlockName]
    ) -> None:
        if answer_tokens <= 1:
            return
        index, settings = self.ranks[rank], self.settings
        slots = index.acquire(names)
        lacking = len(names) - len(slots)
        fresh = index.allocate(blocks_for(outcome.prompt_tokens, answer_tokens) - len(slots))
        assert fresh is not None, "admission reserved these blocks"
        self.node.moved.prefill_to_decode += lacking
        outcome.handover_s = lacking * settings.slab_bytes / 1e9 / settings.link_gbps
        others = self.admission.rooms[rank].sequences - 1
        outcome.decode_s = (answer_tokens - 1) * (settings.answer_token_s + others * settings.crowd_s)
        await asyncio.sleep(outcome.handover_s + outcome.decode_s)
        chain = answered if settings.publish_answers and answered else names
        missing = len(chain) - len(slots)
        index.release(_name_all(index, slots, fresh[:missing], chain))
        index.release(fresh[missing:])
        if len(chain) > len(names):
            self.node.write_through(chain, self._clock())


def _split_hits(outcome: Outcome, device: int, host: int, disk: int) -> None:
    """Blocks to tokens; a hit ends one row early, so the last tier gives one token less when all is cached."""
    left = outcome.prompt_tokens - 1
    tokens = []
    for blocks in (device, host, disk):
        tokens.append(min(blocks * BLOCK_TOKENS, left))
        left -= tokens[-1]
    outcome.device_tokens, outcome.host_tokens, outcome.disk_tokens = tokens


def _name_all(
    index: DeviceIndex, held: Sequence[SlotIndex], fresh: Sequence[SlotIndex], names: Sequence[BlockName]
) -> list[SlotIndex]:
    """Name the fresh slots as the rest of `names`; returns every slot that is held now."""
    all_held = list(held)
    for depth, slot in enumerate(fresh, len(held)):
        all_held.append(index.name_slot(slot, names[depth], names[depth - 1] if depth else None, depth))
    return all_held


def _leading(index: DeviceIndex, names: Sequence[BlockName]) -> int:
    """Length of the leading run here, by bisection: children leave before their parents, so a run has no gaps."""
    low, high = 0, len(names)
    while low < high:
        middle = (low + high) // 2
        if index.match(names[middle : middle + 1]):
            low = middle + 1
        else:
            high = middle
    return low
