"""Puts one rank's engine together from its parts, for the box and for tests alike."""

from typing import Any

from headrace.decode.base import Bell, Control, DecodeOptions
from headrace.decode.join import StoreWorker
from headrace.decode.lockstep import DatagramBell, LocalBell, LocalControl, Lockstep
from headrace.decode.mover import StoreMover
from headrace.decode.rank import DecodeRank
from headrace.decode.scheduler import Scheduler
from headrace.decode.step import StepRunner
from headrace.kvstore.base import StoreClient
from headrace.kvstore.device_index import DeviceIndex
from headrace.kvstore.policies import make_policy
from headrace.kvstore.pool import DevicePool
from headrace.model.base import LanguageModel
from headrace.model.exchange import LocalExchange
from headrace.model.grammar import Grammars


def make_rank(
    *,
    model: LanguageModel,
    pool: DevicePool,
    client: StoreClient,
    options: DecodeOptions,
    exchange: Any = None,
    control: Control | None = None,
    policy: str = "lru",
    verify_share: float = 1.0,
    grammars: Grammars | None = None,
) -> DecodeRank:
    """`exchange` and `control` belong to the group; None for a rank alone. Collective when the group has more than one
    rank: its bells exchange their ports."""
    exchange = exchange or LocalExchange()
    control = control or LocalControl()
    bell: Bell = LocalBell() if control.size == 1 else DatagramBell(control)
    lockstep = Lockstep(control)
    scheduler = Scheduler(options, DeviceIndex(pool.slots, make_policy(policy, pool.slots)))
    runner = StepRunner(model, pool, exchange, lockstep, has_mtp=pool.layout.has_mtp, grammars=grammars)
    mover = StoreMover(pool, client, verify_share)
    return DecodeRank(
        options=options,
        scheduler=scheduler,
        runner=runner,
        lockstep=lockstep,
        bell=bell,
        make_worker=lambda done: StoreWorker(client, mover, done),
        collectives=lambda: exchange.collectives,
        sent_bytes=lambda: exchange.sent_bytes,
    )
