"""Placement and admission as pure objects: where hits, load and room send a prompt, and that counts always balance."""

import asyncio
import random

import pytest

from headrace.errors import CapacityError, NeverFits
from headrace.ids import BlockName
from headrace.kvstore.base import Placement
from headrace.router.admission import Admission, RankRoom, blocks_for
from headrace.router.base import Demand
from headrace.router.costs import CostModel, LineFit, PromptWork
from headrace.router.placement import GroupLoad, Place, Placer


class FixedDirectory:
    def __init__(self, host: int = 0, device: dict[str, int] | None = None, stored: int = 0) -> None:
        deeper = {"node-0": stored} if stored > host else {}
        self.answer = Placement(host_blocks={"node-0": host}, device_blocks=device or {}, stored_blocks=deeper)

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def lookup(self, names: object) -> Placement:
        return self.answer

    def stats(self) -> dict[str, float]:
        return {}


def make(
    directory: FixedDirectory | None = None, *, groups: int = 2, ranks: int = 2, blocks: int = 100, queue: int = 4
) -> Placer:
    rooms = {f"decode-0.{r}": RankRoom(blocks=blocks, sequences_limit=64) for r in range(ranks)}
    loads = {f"prefill-{g}": GroupLoad(blocks=1000) for g in range(groups)}
    return Placer(
        directory or FixedDirectory(), CostModel(), loads, Admission(rooms, queue_limit=queue), lambda name: True
    )


def demand(tokens: int, answer: int = 64, *, seed: int = 0, timeout_s: float = 5.0) -> Demand:
    names = [BlockName(bytes([seed]) * 28 + i.to_bytes(4, "big")) for i in range(tokens // 64)]
    deadline = asyncio.get_running_loop().time() + timeout_s
    return Demand(names=names, prompt_tokens=tokens, answer_tokens=answer, deadline=deadline)


async def test_cold_prompts_spread_over_groups_and_ranks() -> None:
    placer = make(groups=4, ranks=4, blocks=10_000)
    places = [await placer.place(demand(1000, seed=i)) for i in range(40)]
    for kind in ("prefill", "decode"):
        counts = [sum(getattr(p, kind) == n for p in places) for n in {getattr(p, kind) for p in places}]
        assert len(counts) == 4
        assert max(counts) <= 1.5 * min(counts)


async def test_a_device_hit_is_worth_waiting_for_only_so_long() -> None:
    placer = make(FixedDirectory(device={"prefill-1": 100}), blocks=10_000)
    placer.costs.restore_s = 0.01
    first = await placer.place(demand(6400))
    assert first.prefill == "prefill-1"
    assert first.predicted_cached_tokens == 6399
    others = [await placer.place(demand(6400, seed=9)) for _ in range(5)]
    assert {p.prefill for p in others} == {"prefill-1"}
    placer.groups["prefill-1"].pending_s = 100.0
    assert (await placer.place(demand(1000, seed=3))).prefill == "prefill-0"


async def test_blocks_on_disk_count_as_hits_and_cost_more_than_blocks_in_the_host_tier() -> None:
    tokens = 64 * 40
    cold, host, disk = [
        await make(directory, groups=1, blocks=1000).place(demand(tokens))
        for directory in (FixedDirectory(), FixedDirectory(host=40), FixedDirectory(host=10, stored=40))
    ]
    assert (cold.predicted_cached_tokens, host.predicted_cached_tokens) == (0, tokens - 1)
    assert disk.predicted_cached_tokens == tokens - 1
    assert host.predicted_prefill_s < disk.predicted_prefill_s < cold.predicted_prefill_s
    # What is on the device already need not come up.
    near = await make(FixedDirectory(device={"prefill-0": 40}, stored=40), groups=1, blocks=1000).place(demand(tokens))
    assert near.predicted_prefill_s < host.predicted_prefill_s


def test_the_cost_of_coming_up_is_learnt_beside_that_of_restoring() -> None:
    costs = CostModel()
    for blocks in range(1, 200):
        costs.learn_prefill(0.1, PromptWork(100, blocks), 0.002 * blocks, 0.1)
        costs.learn_prefill(0.1, PromptWork(100, blocks, blocks // 2), 0.002 * blocks + 0.01 * (blocks // 2), 0.1)
    assert costs.restore_s == pytest.approx(0.002, rel=0.05)
    assert costs.promote_s == pytest.approx(0.01, rel=0.1)


async def test_decode_goes_where_the_conversation_is() -> None:
    placer = make(FixedDirectory(host=50, device={"decode-0.1": 50}), blocks=1000)
    assert {(await placer.place(demand(3200))).decode for _ in range(3)} == {"decode-0.1"}


async def test_siblings_follow_the_group_that_is_computing_their_prefix() -> None:
    placer = make(groups=2, ranks=1, blocks=10_000)
    first = await placer.place(demand(64 * 40))
    first.prefill_finished()
    assert (await placer.place(demand(64 * 40))).prefill == first.prefill


async def test_reservations_are_exact_and_given_back_once() -> None:
    placer = make(ranks=1, blocks=20)
    need = blocks_for(640, 64)
    place = await placer.place(demand(640))
    room = placer.admission.rooms["decode-0.0"]
    assert (room.reserved_blocks, room.sequences) == (need, 1)
    for _ in range(2):
        place.prefill_finished()
        place.release()
    assert (room.reserved_blocks, room.sequences) == (0, 0)
    assert placer.admission.check_integrity() == []


async def test_never_fits_is_told_apart_from_try_later() -> None:
    placer = make(ranks=2, blocks=20, queue=0)
    with pytest.raises(NeverFits, match="20"):
        await placer.place(demand(64 * 30))
    held = [await placer.place(demand(64 * 15, seed=i)) for i in range(2)]
    with pytest.raises(CapacityError, match="limit 0"):
        await placer.place(demand(64 * 15))
    small = await placer.place(demand(64))
    for place in [*held, small]:
        place.release()
    assert placer.admission.check_integrity() == []


async def test_waiters_come_in_order_and_leave_on_deadline() -> None:
    placer = make(ranks=1, blocks=20)
    held = await placer.place(demand(64 * 15, seed=8))
    order: list[int] = []

    async def wait(i: int) -> Place:
        place = await placer.place(demand(64 * 15, seed=i))
        order.append(i)
        return place

    tasks = [asyncio.create_task(wait(i)) for i in range(3)]
    with pytest.raises(CapacityError, match="deadline"):
        await placer.place(demand(64 * 15, seed=9, timeout_s=0.05))
    tasks[1].cancel()
    await asyncio.sleep(0)
    held.release()
    (await tasks[0]).release()
    (await tasks[2]).release()
    assert order == [0, 2]
    assert placer.admission.rooms["decode-0.0"].reserved_blocks == 0


async def test_random_traffic_balances() -> None:
    dice = random.Random(3)
    placer = make(groups=3, ranks=3, blocks=60, queue=8)

    async def one() -> None:
        await asyncio.sleep(dice.random() * 0.1)
        try:
            place = await placer.place(demand(dice.randrange(1, 1500), dice.randrange(1, 400), timeout_s=0.2))
        except CapacityError:
            return
        try:
            assert all(room.reserved_blocks <= room.blocks for room in placer.admission.rooms.values())
            await asyncio.sleep(dice.random() * 0.02)
        finally:
            place.release()

    tasks = [asyncio.create_task(one()) for _ in range(300)]
    for task in dice.sample(tasks, 60):
        asyncio.get_running_loop().call_later(dice.random() * 0.15, task.cancel)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(r) for r in results} <= {type(None), asyncio.CancelledError}
    assert placer.admission.check_integrity() == []
    assert all(room.sequences == 0 for room in placer.admission.rooms.values())
    assert all(group.prompts == 0 for group in placer.groups.values())
    assert placer.admission.queued == 0


def test_the_fit_finds_the_line_and_follows_a_change() -> None:
    dice = random.Random(1)
    fit = LineFit(0.02, 1e-3, 2048.0)
    for _ in range(300):
        x = dice.randrange(1, 8000)
        fit.learn(x, (0.1 + 2e-4 * x) * dice.uniform(0.95, 1.05))
    assert fit.fixed == pytest.approx(0.1, rel=0.2)
    assert fit.slope == pytest.approx(2e-4, rel=0.05)
    for _ in range(300):
        fit.learn(x := dice.randrange(1, 8000), 0.1 + 1e-3 * x)
    assert fit.slope == pytest.approx(1e-3, rel=0.05)


def test_the_models_error_falls_as_it_learns() -> None:
    costs = CostModel()
    dice = random.Random(2)
    for _ in range(200):
        work = PromptWork(dice.randrange(1, 4000), dice.randrange(0, 50))
        measured = 0.05 + 3e-4 * work.new_tokens
        costs.learn_prefill(costs.prefill_s(work), work, 0.004 * work.restore_blocks, measured)
    assert costs.error < 0.1
    assert costs.restore_s == pytest.approx(0.004, rel=0.1)
    costs.compute.learn(float("nan"), 1.0)
    costs.compute.learn(5.0, -1.0)
    assert costs.compute.predict(100) > 0
