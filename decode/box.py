"""One decode rank as a process: model, pool, store client, group, engine, gRPC. A thin shell (deploy's `Box`)."""

import asyncio
import datetime
import logging
import threading
from typing import Any

import torch
import torch.distributed as dist

from headrace.decode.assemble import make_rank
from headrace.decode.base import DecodeOptions
from headrace.decode.lockstep import GroupControl
from headrace.decode.rank import DecodeRank
from headrace.decode.service import DecodeService, box_status, decode_hello
from headrace.errors import RankLost
from headrace.ids import new_incarnation
from headrace.kvstore.client import NodeClient
from headrace.kvstore.copiers import map_watcher_for
from headrace.kvstore.pool import DevicePool
from headrace.model.choose import device_of, load_from_config, load_grammars
from headrace.model.exchange import GroupExchange
from headrace.model.placement import Placement
from headrace.model.spec import ModelSpec

log = logging.getLogger(__name__)
GROUP_TIMEOUT_S = 60.0
"""An idle rank enters the control exchange every half second; a rank silent for this long is lost."""


class DecodeRankBox:
    """`context` is deploy's BoxContext, taken structurally: config, name, rank, world, rendezvous, token, endpoints,
    run_dir, layout (kvstore SlabLayout) and fingerprint (32 bytes)."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._incarnation = new_incarnation()
        self._hello = decode_hello(context.name, self._incarnation, context.fingerprint)
        self._rank: DecodeRank | None = None
        self._client: NodeClient | None = None
        self._loop = asyncio.new_event_loop()
        self._serving = threading.Thread(target=self._loop.run_forever, name="decode-grpc", daemon=True)
        self._server: Any = None

    def start(self) -> dict[str, str]:
        context = self._context
        spec = ModelSpec.from_dir(context.config.model.path)
        local_index = context.rank % max(1, torch.cuda.device_count())
        device = device_of(context.config, local_index)
        model = load_from_config(
            context.config, spec, Placement.expert_split(context.rank, context.world), local_index=local_index
        )
        control, exchange = self._join_group(device)
        pool = DevicePool(context.layout, context.config.decode.device_blocks, device)
        self._client = NodeClient(context.endpoints["node-0"], self._hello, context.layout, map_watcher_for(device))
        self._rank = make_rank(
            model=model,
            pool=pool,
            client=self._client,
            options=_options(context.config, spec),
            exchange=exchange,
            control=control,
            policy=context.config.store.device_policy,
            verify_share=context.config.store.verify_share,
            grammars=load_grammars(context.config.model.path, spec),
        )
        self._rank.start()
        self._serving.start()
        port = asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(30.0)
        return {context.name: f"127.0.0.1:{port}"}

    def status(self) -> dict[str, Any]:
        if self._rank is None:
            return {"ready": False, "incarnation": self._incarnation}
        status = box_status(self._rank, self._hello)
        return {"ready": status.ready, "incarnation": status.incarnation, "values": status.values}

    def stop(self, grace_s: float) -> None:
        if self._rank is not None:
            self._rank.stop(grace_s)
        if self._server is not None:
            asyncio.run_coroutine_threadsafe(self._server.stop(0.5), self._loop).result(5.0)
        if self._serving.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._serving.join(2.0)
        if self._client is not None:
            self._client.close()
        # After a lost peer the group cannot be torn down together; the process ends anyway.
        if dist.is_initialized() and self._rank is not None and self._rank.failure is None:
            dist.destroy_process_group()

    def _join_group(self, device: torch.device) -> tuple[Any, Any]:
        """(control, exchange) of a group; (None, None) for a rank alone."""
        context = self._context
        if context.world == 1:
            return None, None
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=context.rendezvous,
            rank=context.rank,
            world_size=context.world,
            timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S),
        )
        small = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S))
        return GroupControl(small), GroupExchange()

    async def _serve(self) -> int:
        assert self._rank is not None
        self._server = DecodeService(self._rank, self._hello).server(self._context.token)
        port: int = self._server.add_insecure_port("127.0.0.1:0")
        if not port:
            raise RankLost("no free TCP port on 127.0.0.1")
        await self._server.start()
        return port


def _options(config: Any, spec: ModelSpec) -> DecodeOptions:
    context_tokens = spec.max_position_embeddings
    if config.router.max_context:
        context_tokens = min(context_tokens, config.router.max_context)
    return DecodeOptions(
        max_running=config.decode.max_running,
        max_queued=config.decode.max_queued,
        draft_tokens=config.decode.draft_tokens if spec.has_mtp else 0,
        context_tokens=context_tokens,
        adaptive=config.decode.adaptive_drafts,
        strict=config.decode.admission == "strict",
    )
