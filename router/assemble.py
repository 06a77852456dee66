"""Put one router together on the running event loop: clients, placement, engine, service, application.

`RouterBox` calls it in its own thread; tests call it against the fakes.
"""

import asyncio
import dataclasses
import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from fastapi import FastAPI

from headrace.config import Config
from headrace.ids import Incarnation, Namespace
from headrace.kernels.formats import BLOCK_TOKENS
from headrace.kvstore.base import Directory
from headrace.kvstore.names import namespace
from headrace.router.admission import SPECULATION_ROWS, Admission, RankRoom
from headrace.router.costs import CostModel
from headrace.router.decode_client import DecodeClient
from headrace.router.engine import Engine
from headrace.router.fleet import Box, Fleet
from headrace.router.http.admin import Admin
from headrace.router.http.app import build_app
from headrace.router.http.body import BodyBudget
from headrace.router.http.limits import TenantLimits, parse_limits
from headrace.router.http.recall import Recall
from headrace.router.http.service import Service
from headrace.router.http.tenants import Tenants, tenant_salt
from headrace.router.journal import Journal
from headrace.router.metrics import Metrics
from headrace.router.observe import Observers
from headrace.router.peer import PeerIdentity
from headrace.router.placement import GroupLoad, Placer
from headrace.router.policies import policy_of
from headrace.router.prefill_client import PrefillClient
from headrace.router.served import ServedModel
from headrace.router.tokens.known import KnownTexts

WORKER_THREADS = 2
BODIES_AT_ONCE = 8
"""So many of the largest bodies may be in memory while they are being read."""
IMPLICIT_ANSWER_SHARE = 4
"""A client that gives no limit gets at most this fraction (1/4) of a decode rank for its answer."""


@dataclasses.dataclass(kw_only=True)
class Router:
    """Everything one router owns. `close` gives all of it back."""

    app: FastAPI
    service: Service
    engine: Engine
    fleet: Fleet
    placer: Placer
    directory: Directory
    workers: ThreadPoolExecutor

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, let running ones finish within `grace_s`, abort the rest."""
        self.service.draining = True
        await self.engine.drain(grace_s)

    async def close(self) -> None:
        self.service.draining = True
        await self.engine.drain(0.0)
        await self.fleet.close()
        await self.directory.close()
        self.workers.shutdown(wait=False, cancel_futures=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backends:
    """The boxes behind a router, and who it says it is."""

    prefill: Mapping[str, str]
    """name -> address, as `decode`"""
    decode: Mapping[str, str]
    nodes: Mapping[str, Box]
    token: str
    incarnation: Incarnation
    fingerprint: bytes = b""
    """Empty: take over the first box's."""


async def assemble(config: Config, model: ServedModel, directory: Directory, backends: Backends) -> Router:
    """Connect to the boxes and build the application. Raises HeadraceError when a box does not answer within
    `deploy.start_timeout_s` or is incompatible; nothing is left open then."""
    identity = PeerIdentity("router", backends.incarnation, backends.fingerprint)
    token = backends.token
    prefill_clients = {n: PrefillClient(n, address, token, identity) for n, address in backends.prefill.items()}
    decode_clients = {n: DecodeClient(n, address, token, identity) for n, address in backends.decode.items()}
    fleet = Fleet(prefill_clients, decode_clients, backends.nodes)
    costs = CostModel()
    metrics = Metrics(costs)
    clock = asyncio.get_running_loop().time
    limits = TenantLimits(parse_limits(config.router.tenant_limits), clock)
    placer = _placer(config, prefill_clients, decode_clients, directory, costs, limits)
    journal = Journal(config.router.explain_bytes, clock, lambda ids: model.tokenizer.decode(ids, skip_special=False))
    engine = Engine(prefill_clients, decode_clients, placer, Observers(metrics, journal))
    workers = ThreadPoolExecutor(WORKER_THREADS, thread_name_prefix="tokenise")

    def root(tenant: str) -> Namespace | None:
        return namespace(identity.fingerprint, tenant_salt(tenant)) if identity.fingerprint else None

    known = KnownTexts(model.tokenizer, config.router.known_text_bytes)
    service = Service(
        config=config.router,
        model=model,
        engine=engine,
        metrics=metrics,
        tenants=Tenants(config.router.api_keys, config.router.admin_key),
        limits=limits,
        bodies=BodyBudget(BODIES_AT_ONCE * config.router.max_body_bytes),
        journal=journal,
        workers=workers,
        recall=Recall(known, model.tokenizer, workers, root),
        fingerprint=lambda: identity.fingerprint,
        largest_answer=lambda prompt_tokens: _largest_answer(placer.admission, prompt_tokens),
        retry_after_s=lambda: _retry_after_s(placer),
    )
    metrics.queued.set_function(lambda: placer.admission.queued)
    metrics.refused_early.set_function(lambda: placer.refused_early)
    metrics.open_pairs.set_function(lambda: len(placer.breakers.open(clock())))
    admin = Admin(service=service, fleet=fleet, whole_config=config, placer=placer)
    router = Router(
        app=build_app(service, admin),
        service=service,
        engine=engine,
        fleet=fleet,
        placer=placer,
        directory=directory,
        workers=workers,
    )
    try:
        await directory.start()
        await fleet.start(config.deploy.start_timeout_s)
        await fleet.refresh(placer.groups, placer.admission)
    except BaseException:
        await asyncio.shield(router.close())
        raise
    fleet.watch(placer.groups, placer.admission)
    return router


def _placer(
    config: Config,
    prefill: Mapping[str, PrefillClient],
    decode: Mapping[str, DecodeClient],
    directory: Directory,
    costs: CostModel,
    limits: TenantLimits,
) -> Placer:
    limit = config.decode.max_running + config.decode.max_queued
    rooms = {name: RankRoom(blocks=config.decode.device_blocks, sequences_limit=limit) for name in decode}
    groups = {
        name: GroupLoad(blocks=config.prefill.device_blocks, usable=functools.partial(_healthy, client))
        for name, client in prefill.items()
    }
    strict = config.decode.admission == "strict"
    admission = Admission(rooms, queue_limit=config.decode.max_queued, strict=strict, weight=limits.weight)
    return Placer(
        directory,
        costs,
        groups,
        admission,
        lambda name: decode[name].connected,
        policy=policy_of(config.router.policy),
        slo_ttft_s=config.router.slo_ttft_s,
    )


def _healthy(client: PrefillClient) -> bool:
    return client.peer.healthy


def _largest_answer(admission: Admission, prompt_tokens: int) -> int:
    rank_tokens = max((room.blocks for room in admission.rooms.values()), default=0) * BLOCK_TOKENS
    return min(rank_tokens // IMPLICIT_ANSWER_SHARE, rank_tokens - prompt_tokens - SPECULATION_ROWS)


def _retry_after_s(placer: Placer) -> float:
    """When asking again may help: the shortest prefill backlog, between 1 and 30 s."""
    backlog = min((group.pending_s for group in placer.groups.values()), default=1.0)
    return min(30.0, max(1.0, backlog))
