"""A whole prefill side in one process for tests: scheduler, executor and tiny model, with a host tier in memory.

`mono_reference` computes what prefill has to hand over with the model's own reference engine.
"""

import dataclasses
import itertools
import mmap
import multiprocessing
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headrace.config import load_config
from headrace.ids import RequestId
from headrace.kernels.formats import BLOCK_TOKENS
from headrace.kvstore.device_index import DeviceIndex
from headrace.kvstore.layout import SlabLayout
from headrace.kvstore.names import chain
from headrace.kvstore.policies import make_policy
from headrace.kvstore.pool import DevicePool
from headrace.messages import PrefillDone, PrefillRequest, SamplingParams
from headrace.model.base import StepRows
from headrace.model.exchange import LocalExchange
from headrace.model.mtp import extend_and_draft
from headrace.model.testing import tiny_model, tiny_spec
from headrace.model.transformer import Transformer
from headrace.prefill.exchange import AloneExchange
from headrace.prefill.executor import Executor
from headrace.prefill.fake import ROOT, FollowerStore, MemoryStore
from headrace.prefill.group import PrefillGroup
from headrace.prefill.rank import PrefillRank, Seat
from headrace.prefill.scheduler import Limits, Scheduler
from headrace.prefill.slabs import ArenaSlabs

_request_ids = itertools.count()


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(500), k=length)


def make_request(tokens: Sequence[int], **fields: object) -> PrefillRequest:
    data = np.array(tokens, dtype="<u4").tobytes()
    return PrefillRequest(
        request_id=RequestId(f"r{next(_request_ids)}"),
        tokens=data,
        block_names=tuple(chain(ROOT, data)),
        **({"sampling": SamplingParams(max_tokens=16, temperature=0.0)} | fields),  # type: ignore[arg-type]
    )


class PrefillHouse:
    """One rank. `run` submits a prompt and steps until it is answered; its blocks stay pinned until `close`."""

    def __init__(
        self,
        *,
        device_blocks: int = 16,
        host_blocks: int = 32,
        chunk: int = 512,
        shares_draft_index: bool = True,
        restore_groups: int = 1,
    ) -> None:
        spec = tiny_spec(shares_draft_index=shares_draft_index)
        self.model = tiny_model(spec)
        layout = spec.slab_layout("tile656")
        self.pool = DevicePool(layout, device_blocks, "cpu")
        self.store = MemoryStore(host_blocks, layout.slot_bytes)
        exchange = AloneExchange()
        self.executor = Executor(
            self.model, self.pool, ArenaSlabs(self.pool, self.store, 1.0, restore_groups), exchange
        )
        self.index = DeviceIndex(device_blocks, make_policy("lru", device_blocks))
        limits = Limits(
            chunk_tokens=chunk,
            max_running=8,
            max_queued=8,
            draft_tokens=4,
            draft_rows=0 if shares_draft_index else 4,
            host_blocks=host_blocks,
            max_context=spec.max_position_embeddings,
            restore_ahead=restore_groups > 1,
            vocab_size=spec.vocab_size,
        )
        self.scheduler = Scheduler(self.index, self.store, limits, 1)
        self.answers: dict[RequestId, PrefillDone] = {}

    def step(self) -> bool:
        plan = self.scheduler.next_plan()
        if plan is not None:
            self.scheduler.finish(plan, self.executor.run(plan))
        self.answers |= {answer.request_id: answer for answer in self.scheduler.take_answers()}
        return plan is not None

    def drain(self) -> None:
        while self.step():
            pass

    def run(self, tokens: Sequence[int], **fields: object) -> PrefillDone:
        return self.run_all([tokens], **fields)[0]

    def run_all(self, prompts: Sequence[Sequence[int]], **fields: object) -> list[PrefillDone]:
        """`fields` of `PrefillRequest` override greedy sampling and 16 tokens."""
        requests = [make_request(tokens, **fields) for tokens in prompts]
        for request in requests:
            self.scheduler.submit(request)
        self.drain()
        return [self.answers[request.request_id] for request in requests]

    def close(self, answer: PrefillDone) -> None:
        self.scheduler.close(answer.request_id)

    def slabs(self, tokens: Sequence[int], answer: PrefillDone) -> list[bytes]:
        return slabs_of(self.store, self.pool.layout, tokens, answer)


@dataclasses.dataclass(frozen=True, slots=True)
class MonoReference:
    first_token: int
    draft_tokens: tuple[int, ...]
    mtp_hidden: bytes
    index_seed: bytes
    logits: Tensor
    """fp32 [V] of row L - 1"""
    slabs: list[bytes]
    """After the MTP row of position L - 1, before any draft step."""


@torch.inference_mode()
def mono_reference(model: Transformer, tokens: Sequence[int], drafts: int = 4) -> MonoReference:
    """Greedy, the whole prompt in one step, one rank."""
    length = len(tokens)
    blocks = length // BLOCK_TOKENS + 1
    pool = DevicePool(model.spec.slab_layout(model.fmt.name), blocks + 1, model.device)
    exchange = LocalExchange()
    hidden = model.forward(_rows(tokens, pool.slots), pool, exchange)
    logits = model.logits(hidden[-1:])[0]
    first = int(logits.argmax())
    rows = _rows([*tokens[1:], first], pool.slots)
    last = torch.tensor([length - 1])
    out = model.mtp_extend(rows, hidden, pool, exchange)
    slabs = [
        b"".join(plane[:, i].contiguous().numpy().tobytes() for plane in (pool.latent, pool.index))
        for i in range(blocks)
    ]
    drafted = extend_and_draft(model, rows, hidden, last, drafts, pool, exchange)
    seed = out.selection[-1]
    return MonoReference(
        first_token=first,
        draft_tokens=tuple(drafted.tokens[0].tolist()),
        mtp_hidden=out.hidden[-1].numpy().tobytes(),
        index_seed=seed[seed >= 0].numpy().tobytes() if model.shares_draft_index else b"",
        logits=logits,
        slabs=slabs,
    )


def _rows(tokens: Sequence[int], blocks: int) -> StepRows:
    every = torch.arange(len(tokens))
    return StepRows(
        token_ids=torch.tensor(tokens, dtype=torch.int64),
        positions=every,
        seq=torch.zeros_like(every),
        write=torch.ones_like(every, dtype=torch.bool),
        block_tables=torch.arange(blocks).unsqueeze(0),
        local=every,
    )


def tiny_rank(seat: Seat, memory: mmap.mmap, host_blocks: int, overrides: Sequence[str]) -> PrefillRank:
    """A rank of a tiny model whose host tier is a fake over `memory`, shared by the processes of the group."""
    torch.set_num_threads(1)
    spec = tiny_spec()
    layout = spec.slab_layout("tile656")
    kind = FollowerStore if seat.rank else MemoryStore
    store = kind(host_blocks, layout.slot_bytes, memory)
    # No checkpoint of this name: the tiny model has no tokenizer, so no grammars.
    settings = ["model.path=tiny", f"store.host_bytes={host_blocks * layout.slot_bytes}", "store.verify_share=1.0"]
    model = tiny_model(spec, ep_rank=seat.rank, ep_size=seat.world)
    return PrefillRank(load_config(overrides=[*settings, *overrides]), seat, spec, model, layout, store)


def follower_main(seat: Seat, memory_path: str, host_blocks: int, overrides: Sequence[str]) -> None:
    """Body of a follower's process: runs until the leader's stream ends."""
    with Path(memory_path).open("r+b") as file:
        rank = tiny_rank(seat, mmap.mmap(file.fileno(), 0), host_blocks, overrides)
    rank.start()
    rank.wait()
    rank.stop(1.0)


class GroupHouse:
    """A real group on this machine: rank 0 in this process, followers in their own, gloo between them."""

    def __init__(self, directory: Path, world: int, *, host_blocks: int = 64, overrides: Sequence[str] = ()) -> None:
        size = host_blocks * tiny_spec().slab_layout("tile656").slot_bytes
        path = directory / "host-tier"
        path.write_bytes(bytes(size))
        rendezvous = f"file://{directory / 'rendezvous'}"
        context = multiprocessing.get_context("spawn")
        self.followers = [
            context.Process(
                target=follower_main, args=(Seat(rank, world, rendezvous), str(path), host_blocks, overrides)
            )
            for rank in range(1, world)
        ]
        for process in self.followers:
            process.start()
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self.rank = tiny_rank(Seat(0, world, rendezvous), self._memory, host_blocks, overrides)
        self.rank.start()

    @property
    def store(self) -> MemoryStore:
        store = self.rank.client
        assert isinstance(store, MemoryStore)
        return store

    @property
    def group(self) -> PrefillGroup:
        assert self.rank.group is not None
        return self.rank.group

    def run(self, tokens: Sequence[int], timeout_s: float = 60.0) -> PrefillDone:
        return self.group.submit(make_request(tokens)).result(timeout_s)

    def slabs(self, tokens: Sequence[int], answer: PrefillDone) -> list[bytes]:
        return slabs_of(self.store, self.rank.pool.layout, tokens, answer)

    def stop(self) -> None:
        self.rank.stop(1.0)
        for process in self.followers:
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join()


def slabs_of(store: MemoryStore, layout: SlabLayout, tokens: Sequence[int], answer: PrefillDone) -> list[bytes]:
    """Payloads of the prompt's blocks in the host tier, the private one last."""
    assert answer.handover is not None
    names = [*chain(ROOT, np.array(tokens, dtype="<u4")), answer.handover.private_name]
    return [bytes(store.slot_view(store.ready[name][0])[: layout.payload_bytes]) for name in names]
