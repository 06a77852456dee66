"""Real gRPC around a real engine with one rank and the tiny model."""

import asyncio
import time

import grpc
import pytest
import torch

from headrace.errors import IncompatiblePeer, NotAuthenticated
from headrace.ids import Incarnation
from headrace.messages import (
    FlushDone,
    FlushRequest,
    Hello,
    PrefillDone,
    PrefillFailed,
    SamplingParams,
    StatusRequest,
)
from headrace.prefill.service import SERVICE, PrefillService, prefill_hello
from headrace.prefill.testing import GroupHouse, make_request, random_prompt
from headrace.rpc import Channel

HELLO = prefill_hello("prefill-0", Incarnation("abc"), b"f" * 32)


@pytest.fixture
def house(tmp_path):
    torch.set_num_threads(1)
    house = GroupHouse(tmp_path, 1, overrides=["prefill.chunk_tokens=64", "prefill.device_blocks=32"])
    yield house
    house.stop()


def with_service(house, body, token="secret"):
    async def main():
        server = PrefillService(house.group, HELLO).server("secret")
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        channel = Channel(f"127.0.0.1:{port}", SERVICE, token)
        try:
            return await body(channel)
        finally:
            await channel.close()
            await server.stop(0)

    return asyncio.run(main())


async def until(condition, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "still not so"
        await asyncio.sleep(0.01)


def free(house):
    status = house.group.status()
    return house.store.idle and status["device_free_blocks"] == status["device_blocks"] and not status["running"]


def test_one_answer_then_the_stream_pins_everything_until_it_is_cancelled(house):
    async def body(channel):
        call = channel.server_stream("Run", make_request(random_prompt(130)))
        answer = await call.read()
        assert isinstance(answer, PrefillDone)
        assert len(answer.handover.draft_tokens) == 4
        await asyncio.sleep(0.1)
        assert len(house.store.leases) == 3
        call.cancel()
        await until(lambda: free(house))
        assert answer.handover.private_name not in house.store.ready

    with_service(house, body)


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.05, 0.1, 0.2])
def test_cancelling_at_any_moment_gives_everything_back(house, delay_s):
    async def body(channel):
        call = channel.server_stream("Run", make_request(random_prompt(900)))
        await asyncio.sleep(delay_s)
        call.cancel()
        await until(lambda: free(house))

    with_service(house, body)


def test_a_client_whose_connection_breaks_is_noticed(house):
    async def body(channel):
        other = Channel(channel.address, SERVICE, "secret")
        call = other.server_stream("Run", make_request(random_prompt(70)))
        assert isinstance(await call.read(), PrefillDone)
        await other.close()
        await until(lambda: free(house))

    with_service(house, body)


def test_a_refused_prompt_is_a_typed_failure_and_holds_nothing(house):
    async def body(channel):
        running = make_request(random_prompt(70))
        first = channel.server_stream("Run", running)
        assert isinstance(await first.read(), PrefillDone)
        again = await channel.server_stream("Run", running).read()
        assert isinstance(again, PrefillFailed)
        assert again.error.kind == "InputError"
        assert len(house.store.leases) == 2, "the first one keeps its pins"
        large = await channel.server_stream("Run", make_request(random_prompt(2100))).read()
        assert large.error.kind == "NeverFits"
        first.cancel()
        await until(lambda: free(house))

    with_service(house, body)


def test_a_single_token_needs_no_handover(house):
    async def body(channel):
        request = make_request(
            random_prompt(70), sampling=SamplingParams(max_tokens=1, temperature=0.0, top_logprobs=2)
        )
        answer = await channel.server_stream("Run", request).read()
        assert answer.handover is None
        assert answer.finish_reason == "length"
        assert len(answer.logprob.top) == 2

    with_service(house, body)


def test_hello_status_and_flush(house):
    async def body(channel):
        router = Hello(name="router", role="router", incarnation=Incarnation("r"), fingerprint=b"")
        assert await channel.call("Hello", router, 5) == HELLO
        stranger = Hello(name="x", role="router", incarnation=Incarnation("r"), fingerprint=b"g" * 32)
        with pytest.raises(IncompatiblePeer, match="x has fingerprint"):
            await channel.call("Hello", stranger, 5)
        call = channel.server_stream("Run", make_request(random_prompt(130)))
        await call.read()
        assert await channel.call("Flush", FlushRequest(), 5) == FlushDone(blocks=0)
        call.cancel()
        await until(lambda: free(house))
        assert await channel.call("Flush", FlushRequest(), 5) == FlushDone(blocks=2)
        status = await channel.call("Status", StatusRequest(), 5)
        assert status.ready
        assert status.values["computed_tokens_total"] == 130
        assert status.values["cached_tokens_total{tier=device}"] == 0
        assert status.values["published_blocks_total"] == 3

    with_service(house, body)


def test_a_wrong_token_is_refused(house):
    async def body(channel):
        with pytest.raises(NotAuthenticated):
            await channel.call("Status", StatusRequest(), 5)
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.server_stream("Run", make_request([1])).read()

    with_service(house, body, token="wrong")
