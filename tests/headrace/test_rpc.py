"""Real gRPC on loopback: the token, the size limit, what errors become, streams."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from headrace.errors import BlockMiss, HeadraceError, NotAuthenticated, RankLost
from headrace.messages import ErrorInfo, FlushDone, FlushRequest, StatusRequest
from headrace.rpc import MAX_MESSAGE_BYTES, Channel, server

SERVICE, TOKEN = "test.Service", "a-token"


async def flush(_request: Any, _context: Any) -> Any:
    return FlushDone(blocks=3)


async def fail(_request: Any, _context: Any) -> Any:
    return ErrorInfo(kind="BlockMiss", text="block 7 is gone")


async def hang(_request: Any, _context: Any) -> Any:
    await asyncio.sleep(30)


async def swell(request: Any, _context: Any) -> Any:
    return ErrorInfo(kind="X", text="x" * (MAX_MESSAGE_BYTES + 1))


async def count(_request: Any, _context: Any) -> AsyncIterator[Any]:
    for i in range(3):
        yield FlushDone(blocks=i)


async def echo(requests: Any, _context: Any) -> AsyncIterator[Any]:
    async for request in requests:
        yield request


def with_server(work: Callable[[str], Awaitable[None]]) -> None:
    async def run() -> None:
        unary = {"Flush": flush, "Fail": fail, "Hang": hang, "Swell": swell}
        built = server(SERVICE, TOKEN, unary=unary, server_stream={"Count": count}, bidi={"Echo": echo})
        port = built.add_insecure_port("127.0.0.1:0")
        await built.start()
        try:
            await work(f"127.0.0.1:{port}")
        finally:
            await built.stop(0.1)

    asyncio.run(run())


def call(method: str, *, token: str = TOKEN, timeout_s: float = 10.0, request: Any = None) -> Any:
    results = []

    async def work(address: str) -> None:
        channel = Channel(address, SERVICE, token)
        try:
            results.append(await channel.call(method, request or FlushRequest(), timeout_s))
        finally:
            await channel.close()

    with_server(work)
    return results[0]


def test_one_message_for_one() -> None:
    assert call("Flush") == FlushDone(blocks=3)


@pytest.mark.parametrize("token", ["", "a-toke", "a-token ", "A-TOKEN"])
def test_a_wrong_token_is_refused(token: str) -> None:
    with pytest.raises(NotAuthenticated, match="token"):
        call("Flush", token=token)


def test_a_streaming_call_with_a_wrong_token_is_refused() -> None:
    import grpc.aio

    async def work(address: str) -> None:
        channel = Channel(address, SERVICE, "wrong")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in channel.server_stream("Count", StatusRequest()):
                pass
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await channel.close()

    with_server(work)


def test_an_error_message_becomes_the_error() -> None:
    with pytest.raises(BlockMiss, match="block 7 is gone"):
        call("Fail")


def test_a_peer_that_does_not_answer_is_lost() -> None:
    with pytest.raises(RankLost, match="DEADLINE_EXCEEDED"):
        call("Hang", timeout_s=0.2)


def test_nobody_there_is_lost() -> None:
    async def run() -> None:
        channel = Channel("127.0.0.1:9", SERVICE, TOKEN)
        with pytest.raises(RankLost, match=r"127\.0\.0\.1:9"):
            await channel.call("Flush", FlushRequest(), 5.0)
        await channel.close()

    asyncio.run(run())


def test_an_unknown_method_is_an_error() -> None:
    with pytest.raises(HeadraceError, match="UNIMPLEMENTED"):
        call("Nothing")


@pytest.mark.parametrize("method", ["Flush", "Swell"])
def test_messages_over_the_limit_are_refused_in_both_directions(method: str) -> None:
    big = ErrorInfo(kind="X", text="x" * (MAX_MESSAGE_BYTES + 1))
    with pytest.raises(HeadraceError, match="RESOURCE_EXHAUSTED"):
        call(method, request=big if method == "Flush" else None)


def test_streams_both_ways() -> None:
    async def work(address: str) -> None:
        channel = Channel(address, SERVICE, TOKEN)
        got = [message async for message in channel.server_stream("Count", StatusRequest())]
        assert got == [FlushDone(blocks=i) for i in range(3)]
        stream = channel.bidi("Echo")
        for i in range(3):
            await stream.write(FlushDone(blocks=i))
            assert await stream.read() == FlushDone(blocks=i)
        await stream.done_writing()
        await channel.close()

    with_server(work)
