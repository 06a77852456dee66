"""A sequence's life over both pools: retries, loss and resume, aborts, and that nothing is ever left held."""

import asyncio
import random

import httpx
import pytest

from headrace.errors import BlockMiss, CapacityError, EngineError, RankLost
from headrace.messages import DecodeRequest, PrefillRequest
from headrace.router.testing import Stack, running_stack

PROMPT = "def add(a, b):\n    return a + b\n" * 20


async def complete(stack: Stack, client: httpx.AsyncClient, **fields: object) -> httpx.Response:
    body = {"model": "nano", "prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, **fields}
    return await client.post(f"{stack.url}/v1/completions", json=body, timeout=20)


async def expected_text(**fields: object) -> str:
    async with running_stack() as stack, httpx.AsyncClient() as client:
        text: str = (await complete(stack, client, **fields)).json()["choices"][0]["text"]
        return text


async def test_a_missed_block_goes_back_through_prefill_with_what_was_sent() -> None:
    expected = await expected_text()
    async with running_stack() as stack, httpx.AsyncClient() as client:
        for rank in stack.decode:
            rank.fail_next.append(BlockMiss("block 3 of 9 is gone"))
        response = await complete(stack, client)
        assert response.status_code == 200
        assert response.json()["choices"][0]["text"] == expected
        assert response.json()["usage"]["completion_tokens"] == 40
        prompts = [r for r in stack.prefill[0].seen if isinstance(r, PrefillRequest)]
        assert [r.output_index for r in prompts] == list(range(len(prompts)))
        assert {len(r.tenant) for r in prompts} == {8}, "the store counts blocks for a tenant"
        assert len({r.tenant for r in prompts}) == 1
        assert len(prompts) > 1
        await stack.idle()


async def test_misses_without_end_fail_the_request() -> None:
    async with running_stack(ranks=1) as stack, httpx.AsyncClient() as client:
        stack.decode[0].fail_next += [BlockMiss("gone")] * 20
        response = await complete(stack, client)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "BlockMiss"
        await stack.idle()


async def test_a_lost_decode_rank_is_resumed_where_it_stopped() -> None:
    expected = await expected_text(max_tokens=120)
    async with running_stack() as stack, httpx.AsyncClient() as client:
        for rank in stack.decode:
            rank.step_s = 0.01
        request = asyncio.create_task(complete(stack, client, max_tokens=120))
        victim = await _busy_rank(stack)
        await asyncio.sleep(0.1)
        await victim.stop()
        response = await request
        assert response.json()["choices"][0]["text"] == expected
        assert response.json()["usage"]["completion_tokens"] == 120
        resumed = [r for r in stack.prefill[0].seen if r.output_index > 0]
        assert len(resumed) == 1
        survivor = next(rank for rank in stack.decode if rank is not victim)
        taken = [r for r in survivor.seen if isinstance(r, DecodeRequest)]
        assert taken[-1].output_index == resumed[0].output_index + 1
        await stack.idle()


async def _busy_rank(stack: Stack):  # type: ignore[no-untyped-def]
    async with asyncio.timeout(5):
        while True:
            for rank in stack.decode:
                if rank.held:
                    return rank
            await asyncio.sleep(0.002)


async def test_a_restarted_rank_is_used_again() -> None:
    async with running_stack(ranks=1) as stack, httpx.AsyncClient() as client:
        rank = stack.decode[0]
        port = int(rank.address.rpartition(":")[2])
        await rank.stop()
        request = asyncio.create_task(complete(stack, client))
        await asyncio.sleep(0.3)
        await rank.start(port)
        response = await request
        assert response.status_code == 200, response.text
        await stack.idle()


async def test_a_lost_prefill_group_is_retried_elsewhere() -> None:
    async with running_stack(groups=2) as stack, httpx.AsyncClient() as client:
        for group in stack.prefill:
            group.compute_s = 0.3
        request = asyncio.create_task(complete(stack, client))
        async with asyncio.timeout(5):
            while not any(group.held for group in stack.prefill):
                await asyncio.sleep(0.005)
        victim = next(group for group in stack.prefill if group.held)
        await victim.stop()
        response = await request
        assert response.status_code == 200, response.text
        await stack.idle()


async def test_a_prefill_refusal_for_capacity_is_a_429() -> None:
    async with running_stack() as stack, httpx.AsyncClient() as client:
        stack.prefill[0].fail_next.append(CapacityError("256 prompts wait"))
        response = await complete(stack, client)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        await stack.idle()


async def test_a_failed_generation_is_a_5xx() -> None:
    async with running_stack() as stack, httpx.AsyncClient() as client:
        stack.prefill[0].fail_next.append(EngineError("the step failed"))
        response = await complete(stack, client)
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        stack.prefill[0].fail_next.append(RankLost("the group restarts"))
        assert (await complete(stack, client)).status_code == 200
        await stack.idle()


async def test_the_deadline_ends_a_request_and_releases_it() -> None:
    async with running_stack(router={"request_timeout_s": 1.0}) as stack, httpx.AsyncClient() as client:
        for rank in stack.decode:
            rank.step_s = 0.3
        response = await complete(stack, client)
        assert response.status_code == 504
        await stack.idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_frees_both_sides_at_once(stream: bool, phase: str, n: int) -> None:
    async with running_stack() as stack:
        stack.prefill[0].compute_s = 30.0 if phase == "prefill" else 0.0
        for rank in stack.decode:
            rank.step_s = 0.02
        async with httpx.AsyncClient() as client:
            request = asyncio.create_task(complete(stack, client, max_tokens=4000, stream=stream, n=n))
            boxes = stack.prefill if phase == "prefill" else stack.decode
            async with asyncio.timeout(5):
                while not any(box.held for box in boxes):
                    await asyncio.sleep(0.005)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
        await stack.idle(1.0)
        assert sum(box.aborted for box in boxes) >= 1


async def test_200_mixed_requests_with_random_aborts_leave_nothing() -> None:
    dice = random.Random(7)
    async with running_stack(groups=2) as stack, httpx.AsyncClient(limits=httpx.Limits(max_connections=40)) as client:
        for rank in stack.decode:
            rank.step_s = 0.002

        async def one(i: int) -> None:
            await asyncio.sleep(dice.random() * 2)
            fields = {"n": dice.choice([1, 1, 3]), "stream": dice.random() < 0.5, "max_tokens": dice.randint(1, 60)}
            task = asyncio.create_task(
                complete(stack, client, prompt=f"{i % 9} {PROMPT}"[: dice.randint(2, 600)], **fields)
            )
            if dice.random() < 0.5:
                await asyncio.sleep(dice.random() * 0.2)
                task.cancel()
            result = (await asyncio.gather(task, return_exceptions=True))[0]
            if isinstance(result, httpx.Response):
                assert result.status_code == 200, result.text

        await asyncio.gather(*(one(i) for i in range(200)))
        await stack.idle()
        admission = stack.router.placer.admission
        assert admission.check_integrity() == []
        assert all(room.reserved_blocks == 0 for room in admission.rooms.values())
        assert all(group.pending_s == 0 and group.prompts == 0 for group in stack.router.placer.groups.values())
        assert all(client.sequences == 0 for client in stack.router.fleet.decode.values())


async def test_drain_lets_running_streams_finish_and_refuses_new_ones() -> None:
    async with running_stack() as stack, httpx.AsyncClient() as client:
        for rank in stack.decode:
            rank.step_s = 0.02
        running = asyncio.create_task(complete(stack, client, max_tokens=30))
        await _busy_rank(stack)
        drained = asyncio.create_task(stack.router.drain(5.0))
        await asyncio.sleep(0.01)
        refused = await complete(stack, client)
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert (await running).json()["usage"]["completion_tokens"] == 30
        await drained
        assert stack.held() == 0


async def test_what_outlives_the_grace_is_told_so() -> None:
    async with running_stack() as stack, httpx.AsyncClient() as client:
        for rank in stack.decode:
            rank.step_s = 0.05
        running = asyncio.create_task(complete(stack, client, max_tokens=200))
        await _busy_rank(stack)
        await stack.router.drain(0.1)
        answer = await running
        assert answer.status_code == 503
        assert "shutting down" in answer.json()["error"]["message"]
        assert stack.held() == 0


async def test_every_stream_survives_boxes_that_die_and_return() -> None:
    expected = {}
    for i in range(4):
        expected[i] = await expected_text(prompt=f"{i} {PROMPT}", max_tokens=90)
    dice = random.Random(5)
    async with running_stack(groups=2) as stack, httpx.AsyncClient(limits=httpx.Limits(max_connections=60)) as client:
        for rank in stack.decode:
            rank.step_s = 0.01
        for group in stack.prefill:
            group.compute_s = 0.05

        async def one(i: int) -> None:
            await asyncio.sleep(dice.random() * 1.5)
            response = await complete(stack, client, prompt=f"{i % 4} {PROMPT}", max_tokens=90)
            assert response.status_code == 200, response.text
            assert response.json()["choices"][0]["text"] == expected[i % 4]
            assert response.json()["usage"]["completion_tokens"] == 90

        requests = [asyncio.create_task(one(i)) for i in range(40)]
        for _ in range(5):
            await asyncio.sleep(0.2)
            victim = dice.choice([*stack.decode, *stack.prefill])
            port = int(victim.address.rpartition(":")[2])
            await victim.stop()
            await asyncio.sleep(0.1)
            await victim.start(port)
        await asyncio.gather(*requests)
        await stack.idle()
        assert stack.router.placer.admission.check_integrity() == []
