"""gRPC without generated stubs: registered messages in, registered messages out, one token, one size limit.

Server side, a service is a table {method name: handler}; client side, `unary` and `stream` build callables. Both use
`headrace.messages` for the bytes. The token travels as metadata and is compared in constant time; a wrong one gets
UNAUTHENTICATED before the handler runs. Handlers are grpc.aio coroutines.
"""

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from headrace.errors import HeadraceError, NotAuthenticated, from_wire
from headrace.messages import ErrorInfo, decode, encode

MAX_MESSAGE_BYTES = 64 << 20
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
)
_TOKEN_KEY = "authorization"

Unary = Callable[[Any, Any], Awaitable[Any]]
Streaming = Callable[[Any, Any], AsyncIterator[Any]]


class _TokenGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        sent = dict(details.invocation_metadata).get(_TOKEN_KEY, "")
        if hmac.compare_digest(str(sent), self._token):
            return await continuation(details)

        async def refuse(_request: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong or missing token")

        return grpc.unary_unary_rpc_method_handler(refuse)


def server(
    service: str,
    token: str,
    *,
    unary: dict[str, Unary] | None = None,
    server_stream: dict[str, Streaming] | None = None,
    bidi: dict[str, Streaming] | None = None,
) -> grpc.aio.Server:
    """Build (not start) a server. `unary` handlers return one message for one message, `server_stream` yield many for
    one, `bidi` yield many for an async iterator of many. The caller adds a port and starts it."""
    built = grpc.aio.server(interceptors=(_TokenGuard(token),), options=_OPTIONS)
    wire = {"request_deserializer": decode, "response_serializer": encode}
    handlers: dict[str, Any] = {}
    for name, handler in (unary or {}).items():
        handlers[name] = grpc.unary_unary_rpc_method_handler(handler, **wire)
    for name, stream in (server_stream or {}).items():
        handlers[name] = grpc.unary_stream_rpc_method_handler(stream, **wire)
    for name, stream in (bidi or {}).items():
        handlers[name] = grpc.stream_stream_rpc_method_handler(stream, **wire)
    built.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    return built


class Channel:
    """A client connection to one service of one peer. Create and close it on the event loop that uses it."""

    def __init__(self, address: str, service: str, token: str) -> None:
        self.address = address
        self._service = service
        self._metadata = ((_TOKEN_KEY, token),)
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)

    async def call(self, method: str, request: Any, timeout_s: float) -> Any:
        """One message for one message. Raises HeadraceError: what the peer reported, or DaemonUnavailable-like
        trouble as `from_rpc_error` says."""
        stub = self._channel.unary_unary(self._path(method), request_serializer=encode, response_deserializer=decode)
        try:
            reply = await stub(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(self.address, error) from error
        if isinstance(reply, ErrorInfo):
            raise from_wire(reply.kind, reply.text)
        return reply

    def server_stream(self, method: str, request: Any) -> Any:
        """One message, many back: an async-iterable grpc call with `cancel()`."""
        stub = self._channel.unary_stream(self._path(method), request_serializer=encode, response_deserializer=decode)
        return stub(request, metadata=self._metadata)

    def bidi(self, method: str) -> Any:
        """A grpc stream-stream call: `await call.write(message)`, `async for message in call`, `call.cancel()`."""
        stub = self._channel.stream_stream(self._path(method), request_serializer=encode, response_deserializer=decode)
        return stub(metadata=self._metadata)

    async def close(self) -> None:
        await self._channel.close()

    def _path(self, method: str) -> str:
        return f"/{self._service}/{method}"


def from_rpc_error(address: str, error: grpc.aio.AioRpcError) -> HeadraceError:
    """The HeadraceError that a failed gRPC call means to its caller."""
    code, text = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return NotAuthenticated(f"{address}: {text}")
    kinds = {
        grpc.StatusCode.CANCELLED: "Cancelled",
        grpc.StatusCode.UNAVAILABLE: "RankLost",
        grpc.StatusCode.DEADLINE_EXCEEDED: "RankLost",
    }
    return from_wire(kinds.get(code, "HeadraceError"), f"{address}: {code.name} {text}")
