"""How places are chosen: the policies by name, shared prefixes in flight, replication, refusals, breakers, fit."""

import asyncio
import random

import pytest

from headrace.errors import CapacityError, ConfigError
from headrace.ids import BlockName
from headrace.kvstore.base import Placement
from headrace.router.admission import Admission, RankRoom
from headrace.router.base import Demand
from headrace.router.breakers import OPEN_S, TRIPS, Breakers
from headrace.router.costs import CostModel, LineFit, PromptWork
from headrace.router.placement import GroupLoad, Placer
from headrace.router.policies import POLICIES, policy_of


class Memory:
    """A directory that is told."""

    def __init__(self) -> None:
        self.host: set[BlockName] = set()
        self.device: dict[str, set[BlockName]] = {}

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def lookup(self, names: list[BlockName]) -> Placement:
        def leading(held: set[BlockName]) -> int:
            return next((i for i, name in enumerate(names) if name not in held), len(names))

        devices = {name: leading(held) for name, held in self.device.items()}
        return Placement(host_blocks={"node-0": leading(self.host)}, device_blocks=devices)

    def stats(self) -> dict[str, float]:
        return {}


def placer_of(
    directory: Memory, policy: str = "predicted", *, groups: int = 4, ranks: int = 2, slo: float = 0
) -> Placer:
    rooms = {f"decode-0.{r}": RankRoom(blocks=100_000, sequences_limit=10_000) for r in range(ranks)}
    loads = {f"prefill-{g}": GroupLoad(blocks=100_000) for g in range(groups)}
    admission = Admission(rooms, queue_limit=64)
    return Placer(directory, CostModel(), loads, admission, lambda name: True, policy=policy_of(policy), slo_ttft_s=slo)


def names_of(conversation: int, blocks: int) -> list[BlockName]:
    return [BlockName(conversation.to_bytes(28, "big") + i.to_bytes(4, "big")) for i in range(blocks)]


def demand(names: list[BlockName], extra: int = 10, **fields: object) -> Demand:
    now = asyncio.get_running_loop().time()
    tokens = 64 * len(names) + extra
    return Demand(names=names, prompt_tokens=tokens, answer_tokens=64, deadline=now + 20, **fields)  # type: ignore[arg-type]


async def test_a_burst_of_siblings_is_computed_once_and_then_spread() -> None:
    directory = Memory()
    placer = placer_of(directory)
    shared = names_of(1, 40)
    first = await placer.place(demand(shared))
    others = [asyncio.create_task(placer.place(demand([*shared, *names_of(i + 2, 1)]))) for i in range(12)]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in others)
    directory.host.update(shared)
    first.prefill_finished()
    places = await asyncio.gather(*others)
    assert {p.prefill for p in places} == set(placer.groups)
    assert all(p.predicted_cached_tokens >= 64 * 40 for p in places)
    assert len(placer.flights) < 64


async def test_siblings_of_a_prefix_that_failed_compute_it_themselves() -> None:
    placer = placer_of(Memory())
    shared = names_of(1, 40)
    first = await placer.place(demand(shared))
    other = asyncio.create_task(placer.place(demand(shared)))
    await asyncio.sleep(0.01)
    first.prefill_finished(computed=False)
    assert (await other).predicted_cached_tokens == 0


async def test_a_short_shared_beginning_of_a_long_prompt_is_not_waited_for() -> None:
    placer = placer_of(Memory())
    await placer.place(demand(names_of(1, 2000)))
    async with asyncio.timeout(1):
        await placer.place(demand([*names_of(1, 8), *names_of(2, 4)]))


async def test_a_hot_prefix_replicates_when_waiting_costs_more_than_moving_it() -> None:
    directory = Memory()
    shared = names_of(1, 100)
    directory.host.update(shared)
    directory.device["prefill-0"] = set(shared)
    placer = placer_of(directory, groups=2)
    places = [await placer.place(demand([*shared, *names_of(i + 2, 4)])) for i in range(12)]
    used = [p.prefill for p in places]
    assert used[0] == "prefill-0"
    assert 2 <= used.count("prefill-1") < used.count("prefill-0") + 2


async def test_early_refusals_need_a_proven_model_and_no_idle_group() -> None:
    placer = placer_of(Memory(), groups=2, slo=1.0)

    async def ask(i: int) -> None:
        await placer.place(demand(names_of(i, 40)))  # about 2.6 s

    await ask(1)
    await ask(2)
    await ask(3)  # nothing has been observed yet
    for _ in range(40):
        work = PromptWork(2048, 0)
        placer.costs.learn_prefill(placer.costs.prefill_s(work), work, 0.0, placer.costs.prefill_s(work))
    with pytest.raises(CapacityError) as refused:
        await ask(4)
    assert refused.value.retry_after_s > 1
    assert placer.refused_early == 1
    placer.costs.error = 0.9
    await ask(5)
    placer.costs.error = 0.0
    idle = placer.groups["prefill-0"]
    idle.prompts, idle.pending_s = 0, 0.0
    await ask(6)


async def test_policies_choose_as_their_names_say() -> None:
    directory = Memory()
    directory.device["prefill-2"] = set(names_of(1, 40))
    loads: dict[str, list[str]] = {}
    for policy in POLICIES:
        placer = placer_of(directory, policy)
        placer.groups["prefill-2"].pending_s, placer.groups["prefill-2"].prompts = 9.0, 50
        loads[policy] = [(await placer.place(demand(names_of(1, 40), session="s"))).prefill for _ in range(8)]
    assert set(loads["prefix_overlap"]) == {"prefill-2"}
    assert [loads["round_robin"].count(f"prefill-{g}") for g in range(4)] == [2, 2, 2, 2]
    assert "prefill-2" not in loads["least_loaded"]
    assert len(set(loads["session"])) == 1
    assert "prefill-2" not in loads["predicted"]
    assert "prefill-2" not in loads["consistent_hash"]
    with pytest.raises(ConfigError, match="consistent_hash"):
        policy_of("best")


async def test_consistent_hash_keeps_conversations_together_within_its_bound() -> None:
    placer = placer_of(Memory(), "consistent_hash")
    homes = {}
    for conversation in range(200):
        homes[conversation] = (await placer.place(demand(names_of(conversation, 8)))).prefill
    counts = [list(homes.values()).count(f"prefill-{g}") for g in range(4)]
    assert max(counts) <= 1.3 * 200 / 4 + 1
    fresh = placer_of(Memory(), "consistent_hash")
    again = [(await fresh.place(demand(names_of(c, 8)))).prefill for c in range(20)]
    assert sum(homes[c] == home for c, home in enumerate(again)) >= 15


async def test_two_routers_that_share_only_the_directory_agree() -> None:
    directory, draw = Memory(), random.Random(5)
    for conversation in range(300):
        group = f"prefill-{draw.randrange(4)}"
        directory.device.setdefault(group, set()).update(names_of(conversation, 60))
        directory.host.update(names_of(conversation, 60))
    routers = [placer_of(directory), placer_of(directory)]
    same = 0
    for _ in range(400):
        conversation = draw.randrange(300)
        places = [await r.place(demand(names_of(conversation, 60))) for r in routers]
        same += places[0].prefill == places[1].prefill
        for place in places:
            place.prefill_finished()
            place.release()
    assert same > 0.95 * 400


def test_a_pair_that_fails_is_left_out_and_heals() -> None:
    breakers, pair = Breakers(), ("prefill-0", "decode-0.0")
    for _ in range(TRIPS):
        assert breakers.allows(pair, 0.0)
        breakers.failed(pair, 0.0)
    assert not breakers.allows(pair, OPEN_S[0] / 2)
    assert breakers.open(0.0) == [pair]
    assert breakers.allows(pair, OPEN_S[0])
    breakers.taken(pair, OPEN_S[0])
    assert not breakers.allows(pair, OPEN_S[0] * 1.5)
    breakers.failed(pair, OPEN_S[0] * 1.5)
    assert not breakers.allows(pair, OPEN_S[0] * 3)
    breakers.worked(pair)
    assert breakers.allows(pair, OPEN_S[0] * 3)


async def test_an_open_pair_is_replaced_by_the_next_best_and_never_stops_everything() -> None:
    placer = placer_of(Memory(), groups=1, ranks=2)
    for _ in range(TRIPS):
        place = await placer.place(demand(names_of(1, 2)))
        assert place.decode == "decode-0.0"
        place.failed()
        place.release()
        placer._turn = 0
    used = set()
    for i in range(4):
        place = await placer.place(demand(names_of(i + 9, 2)))
        used.add(place.decode)
        place.release()
    assert used == {"decode-0.1"}
    for rank in placer.admission.rooms:
        for _ in range(TRIPS):
            placer.breakers.failed(("prefill-0", rank), asyncio.get_running_loop().time())
    await placer.place(demand(names_of(77, 2)))


def test_the_fit_finds_what_context_costs() -> None:
    fit, draw = LineFit(0.02, 1e-3, 2048.0), random.Random(3)
    for _ in range(400):
        tokens, context = draw.randrange(10, 8000), draw.randrange(0, 120_000)
        fit.learn(tokens, 0.05 + tokens * (2e-4 + context * 3e-9), context)
    for tokens, context in ((500, 1000), (4000, 100_000)):
        assert fit.predict(tokens, context) == pytest.approx(0.05 + tokens * (2e-4 + context * 3e-9), rel=0.02)
    for bad in (float("nan"), -1.0, float("inf")):
        fit.learn(bad, 1.0)
        fit.learn(1.0, bad)
    assert min(fit.fixed, fit.slope, fit.context_slope) >= 0
