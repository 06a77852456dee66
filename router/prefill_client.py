"""Client of one prefill group. One gRPC stream per prompt: it carries the answer and then, by staying open, the pin."""

import asyncio
from typing import Any

import grpc
import grpc.aio

from headrace.errors import Cancelled, HeadraceError, RankLost, from_wire
from headrace.messages import PrefillDone, PrefillFailed, PrefillRequest
from headrace.router.peer import Peer, PeerIdentity
from headrace.rpc import Channel, from_rpc_error

SERVICE = "headrace.Prefill"


class PrefillClient:
    """One per prefill group, for the router's life."""

    def __init__(self, name: str, address: str, token: str, identity: PeerIdentity) -> None:
        self.name = name
        self.peer = Peer(name, address, SERVICE, token, identity)

    async def run(self, request: PrefillRequest) -> "PrefillRun":
        """Send a prompt. Raises RankLost (not reachable) or IncompatiblePeer."""
        channel = await self.peer.ready()
        return PrefillRun(self.peer, channel, channel.server_stream("Run", request))

    async def close(self) -> None:
        await self.peer.close()


class PrefillRun:
    """One prompt at a prefill group. Whoever made it must `close` it: until then its blocks stay pinned."""

    def __init__(self, peer: Peer, channel: Channel, call: Any) -> None:
        self._peer = peer
        self._channel = channel
        self._call = call

    async def done(self) -> PrefillDone:
        """The single answer. Raises what the group reported, or RankLost when the stream broke."""
        try:
            reply = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._broken(error) from error
        except asyncio.CancelledError:
            # grpc raises this too when the call, not this task, was cancelled.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise RankLost(f"{self._peer.name} ({self._peer.address}) cancelled the call") from None
        if isinstance(reply, PrefillDone):
            return reply
        if isinstance(reply, PrefillFailed):
            raise from_wire(reply.error.kind, reply.error.text)
        raise RankLost(f"{self._peer.name} ended the stream without an answer ({type(reply).__name__})")

    def close(self) -> None:
        """Release the pin, or abort what still runs. Idempotent."""
        self._call.cancel()

    def _broken(self, error: grpc.aio.AioRpcError) -> HeadraceError:
        found = from_rpc_error(self._peer.address, error)
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            self._peer.lost(self._channel)
        if isinstance(found, (RankLost, Cancelled)):
            return RankLost(f"{self._peer.name}: {found}")
        return found
