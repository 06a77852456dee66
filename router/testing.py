"""A whole router against fake pools, on a real HTTP port, in one process: for tests and for the router's benchmarks."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

from headrace.config import Config, from_dict
from headrace.ids import new_incarnation
from headrace.router.assemble import Backends, Router, assemble
from headrace.router.fake import FakeDecode, FakePrefill, FakeStore, Script, echo
from headrace.router.http.server import HttpServer
from headrace.router.served import load_served_model


@dataclasses.dataclass(kw_only=True)
class Stack:
    url: str
    router: Router
    store: FakeStore
    prefill: list[FakePrefill]
    decode: list[FakeDecode]

    def held(self) -> int:
        """Sequences that any fake still holds, and blocks still reserved."""
        reserved = sum(room.reserved_blocks for room in self.router.placer.admission.rooms.values())
        return sum(len(box.held) for box in (*self.prefill, *self.decode)) + reserved

    async def idle(self, timeout_s: float = 5.0) -> None:
        """Returns when nothing is held anywhere. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while self.held() or self.router.engine.running or self.router.service.inflight:
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running_stack(
    *, groups: int = 1, ranks: int = 2, script: Script = echo, router: dict[str, object] | None = None
) -> AsyncIterator[Stack]:
    """`router`: settings of the router section that differ from the defaults."""
    config: Config = from_dict({"router": {"port": 0, **(router or {})}, "deploy": {"start_timeout_s": 10.0}})
    store = FakeStore()
    prefill = [FakePrefill(name=f"prefill-{g}", store=store, token="t", script=script) for g in range(groups)]
    decode = [FakeDecode(name=f"decode-0.{r}", store=store, token="t", script=script) for r in range(ranks)]
    async with contextlib.AsyncExitStack() as stack:
        boxes: list[FakePrefill | FakeDecode] = [*prefill, *decode]
        for box in boxes:
            await box.start()
            stack.push_async_callback(box.stop)
        backends = Backends(
            prefill={box.name: box.address for box in prefill},
            decode={box.name: box.address for box in decode},
            nodes={},
            token="t",
            incarnation=new_incarnation(),
        )
        made = await assemble(config, load_served_model(config), store, backends)
        stack.push_async_callback(made.close)
        server = HttpServer(made.app, config.router)
        url = await server.start()
        stack.push_async_callback(server.stop)
        yield Stack(url=url, router=made, store=store, prefill=prefill, decode=decode)
