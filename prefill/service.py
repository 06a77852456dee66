"""gRPC of a prefill group: "headrace.Prefill". A thin shell around `PrefillGroup`.

`Run` carries one prompt. It yields one answer and then stays open: the stream is the lifetime of everything the prompt
holds. Cancelling it, closing the channel or losing the client, at any moment, gives all of it back.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from headrace import rpc
from headrace.errors import HeadraceError
from headrace.ids import Incarnation, Role
from headrace.kvstore.legs import legs
from headrace.messages import (
    BoxStatus,
    ErrorInfo,
    FlushDone,
    FlushRequest,
    Hello,
    PrefillDone,
    PrefillFailed,
    PrefillRequest,
    StatusRequest,
)
from headrace.prefill.group import PrefillGroup

SERVICE = "headrace.Prefill"


class PrefillService:
    def __init__(self, group: PrefillGroup, hello: Hello) -> None:
        self._group = group
        self._hello = hello

    def server(self, token: str) -> grpc.aio.Server:
        return rpc.server(
            SERVICE,
            token,
            unary={"Hello": self.hello, "Status": self.status, "Flush": self.flush},
            server_stream={"Run": self.run},
        )

    async def hello(self, peer: Hello, _context: Any) -> Hello | ErrorInfo:
        """A peer without a fingerprint (a router: it holds no slabs) learns ours and compares it with the others'."""
        if peer.fingerprint and peer.fingerprint != self._hello.fingerprint:
            return ErrorInfo(
                kind="IncompatiblePeer",
                text=f"{peer.name} has fingerprint {peer.fingerprint.hex()[:16]}, {self._hello.name} has "
                f"{self._hello.fingerprint.hex()[:16]}: other weights, layout or naming",
            )
        return self._hello

    async def status(self, _request: StatusRequest, _context: Any) -> BoxStatus:
        return box_status(self._group, self._hello)

    async def flush(self, _request: FlushRequest, _context: Any) -> FlushDone | ErrorInfo:
        try:
            return FlushDone(blocks=await asyncio.wrap_future(self._group.flush()))
        except HeadraceError as error:
            return ErrorInfo(kind=error.kind, text=str(error))

    async def run(self, request: PrefillRequest, _context: Any) -> AsyncIterator[PrefillDone | PrefillFailed]:
        future = asyncio.wrap_future(self._group.submit(request))
        # When the client leaves first nobody else looks at the outcome.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        accepted = True
        try:
            try:
                # Shielded: the engine, not this task, resolves the future.
                yield await asyncio.shield(future)
            except HeadraceError as error:
                accepted = False
                yield PrefillFailed(request_id=request.request_id, error=ErrorInfo(kind=error.kind, text=str(error)))
                return
            await asyncio.Event().wait()
        finally:
            if accepted:
                self._group.close(request.request_id)


def box_status(group: PrefillGroup, hello: Hello) -> BoxStatus:
    return BoxStatus(
        name=hello.name, incarnation=hello.incarnation, ready=group.alive, values=group.status() | legs.values()
    )


def prefill_hello(name: str, incarnation: Incarnation, fingerprint: bytes) -> Hello:
    return Hello(name=name, role=Role.PREFILL.value, incarnation=incarnation, fingerprint=fingerprint)
