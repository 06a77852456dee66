"""Connection to one box that speaks Hello, Status and Flush: greet, check the fingerprint, forget when it is lost."""

import asyncio
import dataclasses

from headrace.errors import IncompatiblePeer, RankLost
from headrace.ids import Incarnation
from headrace.messages import BoxStatus, FlushDone, FlushRequest, Hello, StatusRequest
from headrace.rpc import Channel

HELLO_TIMEOUT_S = 5.0


@dataclasses.dataclass(slots=True)
class PeerIdentity:
    """Who this router is, and the fingerprint that all its peers must share.

    Deploy tells it, because the router knows no layouts. Empty: the first answer is taken over. Every peer that gives
    another one is refused.
    """

    name: str
    incarnation: Incarnation
    fingerprint: bytes = b""

    def greeting(self) -> Hello:
        return Hello(name=self.name, role="router", incarnation=self.incarnation, fingerprint=self.fingerprint)

    def check(self, hello: Hello) -> None:
        """Raises IncompatiblePeer."""
        if not self.fingerprint:
            self.fingerprint = hello.fingerprint
        if hello.fingerprint != self.fingerprint:
            raise IncompatiblePeer(
                f"{hello.name} has fingerprint {hello.fingerprint.hex()[:16]}, "
                f"the others {self.fingerprint.hex()[:16]}: other naming, layout or weights"
            )


class Peer:
    """One box. `ready` greets it when needed; a connection that failed is thrown away, so that the next attempt dials
    at once instead of waiting out gRPC's back-off."""

    def __init__(self, name: str, address: str, service: str, token: str, identity: PeerIdentity) -> None:
        self.name = name
        self.address = address
        self._service = service
        self._token = token
        self._identity = identity
        self._channel: Channel | None = None
        self._greeting = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()
        self.incarnation: Incarnation | None = None
        self.healthy = True
        """False from a failure until the next successful greeting."""

    async def ready(self) -> Channel:
        """A greeted channel. Raises RankLost or IncompatiblePeer."""
        if self._channel is not None:
            return self._channel
        async with self._greeting:
            if self._channel is None:
                self._channel = await self._dial()
            return self._channel

    async def _dial(self) -> Channel:
        channel = Channel(self.address, self._service, self._token)
        try:
            hello = await channel.call("Hello", self._identity.greeting(), HELLO_TIMEOUT_S)
            if not isinstance(hello, Hello):
                raise IncompatiblePeer(f"{self.name} answered Hello with {type(hello).__name__}")
            self._identity.check(hello)
        except BaseException:
            self.healthy = False
            await channel.close()
            raise
        self.incarnation = hello.incarnation
        self.healthy = True
        return channel

    def lost(self, channel: Channel | None) -> None:
        """This connection failed: drop it. Calls that run on it end with RankLost. A newer one is left alone."""
        if channel is not None and channel is self._channel:
            self.healthy = False
            self._channel = None
            task = asyncio.ensure_future(channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def move(self, address: str) -> None:
        """The box was started again elsewhere."""
        if address != self.address:
            self.address = address
            self.lost(self._channel)

    async def status(self, timeout_s: float) -> BoxStatus:
        """Raises HeadraceError."""
        reply = await self._call("Status", StatusRequest(), timeout_s)
        if not isinstance(reply, BoxStatus):
            raise IncompatiblePeer(f"{self.name} answered Status with {type(reply).__name__}")
        return reply

    async def flush(self, timeout_s: float) -> int:
        """Blocks dropped. Raises HeadraceError."""
        reply = await self._call("Flush", FlushRequest(), timeout_s)
        if not isinstance(reply, FlushDone):
            raise IncompatiblePeer(f"{self.name} answered Flush with {type(reply).__name__}")
        return reply.blocks

    async def _call(self, method: str, request: object, timeout_s: float) -> object:
        try:
            async with asyncio.timeout(timeout_s):
                channel = await self.ready()
                return await channel.call(method, request, timeout_s)
        except TimeoutError as error:
            raise RankLost(f"{self.name} ({self.address}) did not answer {method} within {timeout_s} s") from error
        except RankLost:
            self.healthy = False
            raise

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()
        if self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)
