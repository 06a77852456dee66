"""One rank of a prefill group as a plain object: joins its group, then leads or follows. No gRPC, no launcher."""

import dataclasses
import datetime
import logging
import threading

import torch
import torch.distributed as dist

from headrace.config import Config
from headrace.kvstore.device_index import DeviceIndex
from headrace.kvstore.layout import SlabLayout
from headrace.kvstore.policies import make_policy
from headrace.kvstore.pool import DevicePool
from headrace.model.choose import load_grammars
from headrace.model.spec import ModelSpec
from headrace.model.transformer import Transformer
from headrace.prefill.base import NodeStore, Slabs, StepExchange
from headrace.prefill.exchange import AloneExchange, DealtExchange
from headrace.prefill.executor import Executor
from headrace.prefill.group import PrefillGroup
from headrace.prefill.link import LeaderLink, Stream, connect
from headrace.prefill.ranks import GroupRunner, follow
from headrace.prefill.scheduler import Limits, Scheduler
from headrace.prefill.shard import ShardedSlabs
from headrace.prefill.slabs import ArenaSlabs

log = logging.getLogger(__name__)
GROUP_TIMEOUT_S = 60.0
"""A rank that is this late in a collective is lost. Idle ranks are in none: they wait for a plan."""


@dataclasses.dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place in its group."""

    rank: int
    world: int
    rendezvous: str


class PrefillRank:
    """Made once per process, then `start`, then `stop`. Owns everything it makes; the store client is the caller's."""

    def __init__(
        self, config: Config, seat: Seat, spec: ModelSpec, model: Transformer, layout: SlabLayout, client: NodeStore
    ) -> None:
        self._config, self._seat, self._spec, self._model = config, seat, spec, model
        self.client = client
        self.pool = DevicePool(layout, config.prefill.device_blocks, model.device)
        self._stream: Stream | None = None
        self._follower: threading.Thread | None = None
        self._in_step = True
        self.group: PrefillGroup | None = None
        """The engine, on rank 0."""

    @property
    def alive(self) -> bool:
        if self.group is not None:
            return self.group.alive
        return self._follower is not None and self._follower.is_alive()

    def start(self) -> None:
        """Returns when all ranks of the group are there. Raises RankLost when they do not come."""
        exchange = self._join()
        slabs = self._slabs()
        grammars = load_grammars(self._config.model.path, self._spec) if self._seat.rank == 0 else None
        executor = Executor(self._model, self.pool, slabs, exchange, has_mtp=self._spec.has_mtp, grammars=grammars)
        link = self._meet()
        if self._seat.rank == 0:
            self.group = PrefillGroup(self._scheduler(), GroupRunner(executor, link, self._seat.world))
            self.group.start()
        else:
            name = f"prefill-follower-{self._seat.rank}"
            self._follower = threading.Thread(target=self._follow, args=(executor,), name=name, daemon=True)
            self._follower.start()

    def wait(self) -> None:
        """Until the follower's loop has ended."""
        if self._follower is not None:
            self._follower.join()

    def stop(self, grace_s: float) -> None:
        """End the engine (leader) or the loop (follower) and leave the group."""
        if self.group is not None:
            self._in_step = self.group.failure is None
            self.group.stop(grace_s)
        if self._follower is not None:
            # Normally the leader's word ends the loop; a follower that is stopped alone closes its stream.
            self._follower.join(grace_s)
        if self._stream is not None:
            self._stream.close()
        if self._follower is not None:
            self._follower.join(1.0)
        # After a lost peer NCCL cannot be torn down; the process ends anyway.
        together = self._in_step or self._model.device.type == "cpu"
        if self._seat.world > 1 and together and dist.is_initialized():
            dist.destroy_process_group()

    def _join(self) -> StepExchange:
        seat, device = self._seat, self._model.device
        if seat.world == 1:
            return AloneExchange()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=seat.rendezvous,
            rank=seat.rank,
            world_size=seat.world,
            timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S),
        )
        return DealtExchange(device)

    def _meet(self) -> LeaderLink | None:
        """Agree on the plan stream: its port and nonce go round once, when the group forms."""
        seat = self._seat
        if seat.world == 1:
            return None
        link = LeaderLink() if seat.rank == 0 else None
        secret = torch.zeros(20, dtype=torch.uint8)
        if link is not None:
            secret = torch.frombuffer(bytearray(link.port.to_bytes(4, "little") + link.nonce), dtype=torch.uint8)
        dist.broadcast(secret, 0)
        if link is None:
            data = bytes(secret.tolist())
            self._stream = connect(int.from_bytes(data[:4], "little"), seat.rank, data[4:])
        else:
            link.accept(seat.world - 1, GROUP_TIMEOUT_S)
        return link

    def _slabs(self) -> Slabs:
        prefill = self._config.prefill
        wanted = {"on": True, "off": False, "auto": self.pool.device.type != "cpu"}[prefill.shard_restores]
        shard = wanted and self._seat.world > 1
        # What goes through an exchange of whole blocks cannot come layer by layer.
        groups = 1 if shard else prefill.restore_groups
        slabs = ArenaSlabs(self.pool, self.client, self._config.store.verify_share, groups)
        return ShardedSlabs(slabs, self.pool) if shard else slabs

    def _scheduler(self) -> Scheduler:
        blocks, layout = self.pool.slots, self.pool.layout
        policy = make_policy(self._config.store.device_policy, blocks)
        index = DeviceIndex(blocks, policy, slot_bytes=layout.slot_bytes)
        limits = limits_of(self._config, self._spec, layout)
        return Scheduler(index, self.client, limits, self._seat.world)

    def _follow(self, executor: Executor) -> None:
        assert self._stream is not None
        try:
            log.info("rank %d ends: %s", self._seat.rank, follow(self._stream, executor, self._seat.rank))
        except Exception:
            # `follow` has logged and reported it; the launcher sees a rank that is not ready and restarts the group.
            self._in_step = False
        finally:
            self._stream.close()


def limits_of(config: Config, spec: ModelSpec, layout: SlabLayout) -> Limits:
    drafts = config.decode.draft_tokens if spec.has_mtp else 0
    context = spec.max_position_embeddings
    if config.router.max_context:
        context = min(context, config.router.max_context)
    return Limits(
        chunk_tokens=config.prefill.chunk_tokens,
        max_running=config.prefill.max_running,
        max_queued=config.prefill.max_queued,
        draft_tokens=drafts,
        draft_rows=0 if spec.shares_draft_index else drafts,
        host_blocks=config.store.host_bytes // layout.slot_bytes,
        max_context=context,
        restore_ahead=config.prefill.restore_groups > 1,
        vocab_size=spec.vocab_size,
        promote_wait_s=config.store.promote_wait_s,
    )
