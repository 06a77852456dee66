"""One prefill rank as a process: model, store client, rank, and on rank 0 gRPC. A thin shell (deploy's `Box`)."""

import asyncio
import threading
from typing import Any

import torch

from headrace.errors import RankLost
from headrace.ids import new_incarnation
from headrace.kvstore.client import NodeClient
from headrace.kvstore.copiers import map_watcher_for
from headrace.model.choose import load_from_config
from headrace.model.placement import Placement
from headrace.model.spec import ModelSpec
from headrace.prefill.rank import PrefillRank, Seat
from headrace.prefill.service import PrefillService, box_status, prefill_hello


class PrefillRankBox:
    """`context` is deploy's BoxContext, taken structurally: config, name, group, rank, world, rendezvous, token,
    endpoints, layout (kvstore SlabLayout) and fingerprint (32 bytes)."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._incarnation = new_incarnation()
        self._hello = prefill_hello(context.group, self._incarnation, context.fingerprint)
        self._client: NodeClient | None = None
        self._rank: PrefillRank | None = None
        self._loop = asyncio.new_event_loop()
        self._serving = threading.Thread(target=self._loop.run_forever, name="prefill-grpc", daemon=True)
        self._server: Any = None

    def start(self) -> dict[str, str]:
        context = self._context
        spec = ModelSpec.from_dir(context.config.model.path)
        placement = Placement.expert_split(context.rank, context.world)
        model = load_from_config(context.config, spec, placement, local_index=_local_gpu(context.rank))
        # Every rank greets under the group's name: routers know groups, not prefill ranks, and the daemon must know who
        # may write into the slots that the leader takes. Only the leader announces.
        self._client = NodeClient(
            context.endpoints["node-0"], self._hello, context.layout, map_watcher_for(model.device)
        )
        seat = Seat(context.rank, context.world, context.rendezvous)
        self._rank = PrefillRank(context.config, seat, spec, model, context.layout, self._client)
        self._rank.start()
        if self._rank.group is None:
            return {}
        self._serving.start()
        port = asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(30.0)
        return {context.group: f"127.0.0.1:{port}"}

    def status(self) -> dict[str, Any]:
        rank = self._rank
        if rank is not None and rank.group is not None:
            status = box_status(rank.group, self._hello)
            return {"ready": status.ready, "incarnation": status.incarnation, "values": status.values}
        return {"ready": rank is not None and rank.alive, "incarnation": self._incarnation}

    def stop(self, grace_s: float) -> None:
        draining = None
        if self._server is not None:
            # New prompts are refused at once; running streams may end within the grace.
            draining = asyncio.run_coroutine_threadsafe(self._server.stop(grace_s), self._loop)
        if self._rank is not None:
            self._rank.stop(grace_s)
        if draining is not None:
            asyncio.run_coroutine_threadsafe(self._server.stop(0.0), self._loop).result(5.0)
            draining.result(5.0)
        if self._serving.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._serving.join(2.0)
        if self._client is not None:
            self._client.close()

    async def _serve(self) -> int:
        assert self._rank is not None
        assert self._rank.group is not None
        self._server = PrefillService(self._rank.group, self._hello).server(self._context.token)
        port: int = self._server.add_insecure_port("127.0.0.1:0")
        if not port:
            raise RankLost("no free TCP port on 127.0.0.1")
        await self._server.start()
        return port


def _local_gpu(rank: int) -> int:
    return rank % max(1, torch.cuda.device_count())
