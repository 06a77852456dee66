"""The gRPC service with real connections: tokens, broken streams, slow readers, greeting, flush."""

import asyncio
from typing import Any

import grpc
import pytest

from headrace import rpc
from headrace.decode.service import SERVICE, DecodeService, Outbox, decode_hello
from headrace.errors import IncompatiblePeer, NotAuthenticated
from headrace.ids import RequestId
from headrace.messages import (
    Aborted,
    AbortRequest,
    Accepted,
    FlushRequest,
    Hello,
    SamplingParams,
    SequenceFailed,
    StatusRequest,
    StepTokens,
)

TOKEN = "secret"
HELLO = decode_hello("decode-0.0", "1234", b"f" * 32)
LONG = SamplingParams(max_tokens=2000, temperature=0.0)


def serve(here: Any, body: Any, **options: Any) -> None:
    """Run `body(channel)` against a server around `here.rank`."""

    async def run() -> None:
        server = DecodeService(here.rank, HELLO, **options).server(TOKEN)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        channel = rpc.Channel(f"127.0.0.1:{port}", SERVICE, TOKEN)
        try:
            await asyncio.wait_for(body(channel), 60)
        finally:
            await channel.close()
            await server.stop(0.2)

    asyncio.run(run())


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_tokens_over_a_stream(model, house, make_prompt, reference):
    here = house(model)
    params = SamplingParams(max_tokens=9, temperature=0.0)

    async def body(channel: rpc.Channel) -> None:
        call = channel.bidi("Stream")
        await call.write(here.prefill.request("a", make_prompt(65), params))
        messages = []
        async for message in call:
            messages.append(message)
            if isinstance(message, StepTokens) and message.sequences[0].finish_reason:
                break
        call.cancel()
        assert isinstance(messages[0], Accepted)
        tokens = [token for m in messages[1:] for token in m.sequences[0].tokens]
        assert tokens == reference(model, make_prompt(65), params)

    serve(here, body)


def test_a_broken_stream_releases_its_requests_within_one_step(model, house, make_prompt):
    here = house(model, slots=120, max_running=2)

    async def body(channel: rpc.Channel) -> None:
        call = channel.bidi("Stream")
        for at in range(4):  # two run, two wait
            await call.write(here.prefill.request(str(at), make_prompt(40, at), LONG))
        async for message in call:
            if isinstance(message, StepTokens):
                break
        await until(lambda: here.rank.status()["queued"] == 2)
        steps = here.rank.counters.steps_total
        call.cancel()
        await until(here.idle)
        assert here.rank.counters.aborted_total == 4
        assert here.rank.counters.steps_total - steps < 100  # LONG takes two thousand

    serve(here, body)


def test_other_streams_go_on_and_cannot_abort_each_other(model, house, make_prompt, reference):
    here = house(model, slots=120)
    params = SamplingParams(max_tokens=40, temperature=0.0)

    async def body(channel: rpc.Channel) -> None:
        first, second = channel.bidi("Stream"), channel.bidi("Stream")
        await first.write(here.prefill.request("a", make_prompt(40), LONG))
        await second.write(here.prefill.request("b", make_prompt(41), params))
        assert isinstance(await first.read(), Accepted)
        await second.write(AbortRequest(request_id=RequestId("a")))
        await second.write(AbortRequest(request_id=RequestId("unknown")))
        first.cancel()
        tokens, aborted = [], []
        async for message in second:
            if isinstance(message, Aborted):
                aborted.append(message.request_id)
            if isinstance(message, StepTokens):
                tokens += message.sequences[0].tokens
                if message.sequences[0].finish_reason:
                    break
        assert tokens == reference(model, make_prompt(41), params)
        assert aborted == ["a", "unknown"]
        second.cancel()
        await until(here.idle)

    serve(here, body)


def test_a_reader_that_lags_loses_its_requests_not_the_step_loop(model, house, make_prompt):
    here = house(model)

    async def body(_channel: rpc.Channel) -> None:
        outbox = Outbox(asyncio.get_running_loop(), room=5)
        stream = here.rank.open_stream(outbox)
        here.rank.submit(stream, here.prefill.request("slow", make_prompt(40), SamplingParams(max_tokens=300)))
        await until(lambda: here.rank.counters.failed_total == 1)
        await until(here.idle)
        kinds = [type(await outbox.get()) for _ in range(6)]
        assert kinds == [Accepted, *[StepTokens] * 4, SequenceFailed]
        here.rank.close_stream(stream)

    serve(here, body)


def test_greeting_status_and_flush(model, house, make_prompt):
    here = house(model)
    here.submit("a", make_prompt(128), SamplingParams(max_tokens=4, temperature=0.0))
    here.finish("a")

    async def body(channel: rpc.Channel) -> None:
        mine = Hello(name="router", role="router", incarnation="1", fingerprint=HELLO.fingerprint)
        assert (await channel.call("Hello", mine, 5)).name == "decode-0.0"
        other = Hello(name="router", role="router", incarnation="1", fingerprint=b"g" * 32)
        with pytest.raises(IncompatiblePeer, match="other weights"):
            await channel.call("Hello", other, 5)
        status = await channel.call("Status", StatusRequest(), 5)
        assert status.ready
        assert status.values["restored_tokens_total{tier=host}"] == 128
        assert status.values["device_cached_blocks"] == 2
        assert (await channel.call("Flush", FlushRequest(), 5)).blocks == 2
        stranger = rpc.Channel(channel.address, SERVICE, "guess")
        with pytest.raises(NotAuthenticated):
            await stranger.call("Status", StatusRequest(), 5)
        call = stranger.bidi("Stream")
        await call.write(AbortRequest(request_id=RequestId("a")))
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        await stranger.close()

    serve(here, body)
