"""Two processes over gloo: expert parallel with uneven and empty ranks, and context parallel, equal one process bit by
bit and always make the same number of collectives."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from headrace.kvstore.pool import DevicePool
from headrace.model.base import StepRows
from headrace.model.exchange import GroupExchange, LocalExchange
from headrace.model.mtp import extend_and_draft
from headrace.model.testing import tiny_model

LENGTH = 80
TOKENS = [(i * 37 + 5) % 500 for i in range(LENGTH + 1)]


def rows_of(tokens: list[int], start: int, local: torch.Tensor | None = None) -> StepRows:
    every = torch.arange(len(tokens))
    return StepRows(
        token_ids=torch.tensor(tokens, dtype=torch.int64),
        positions=every + start,
        seq=torch.zeros_like(every),
        write=torch.ones_like(every, dtype=torch.bool),
        block_tables=torch.arange(4).unsqueeze(0),
        local=every if local is None else local,
    )


def step(model: Any, pool: DevicePool, tokens: list[int], next_tokens: list[int], exchange: Any) -> tuple[Any, Any]:
    """One step over `tokens` from position 0 (they may be none) and its MTP chain with 3 drafts."""
    rows = rows_of(tokens, 0)
    hidden = model.forward(rows, pool, exchange)
    last = torch.tensor([len(tokens) - 1] if tokens else [], dtype=torch.int64)
    draft_exchange = exchange
    if isinstance(exchange, GroupExchange):
        # The extend of this step has the forward's counts; the drafts have one row on each rank that has a sequence.
        draft_exchange = GroupExchange()
        draft_exchange.begin_step([1, 1 if exchange._counts[1] else 0])
    extend = rows_of(next_tokens, 0)
    drafted = extend_and_draft(model, extend, hidden, last, 3, pool, exchange, draft_exchange)
    return hidden, drafted.tokens


def worker(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2)
    results: dict[str, Any] = {}
    exchange = GroupExchange()
    model = tiny_model(ep_rank=rank, ep_size=2)
    layout = model.spec.slab_layout("tile656")
    for name, counts in {"both": (80, 33), "idle": (80, 0)}.items():
        pool = DevicePool(layout, 4, "cpu")
        count = counts[rank]
        before, sent = exchange.collectives, dict(exchange.sent_bytes)
        exchange.begin_step(counts)
        hidden, drafts = step(model, pool, TOKENS[:count], TOKENS[1 : count + 1], exchange)
        results[f"{name} bytes"] = {leg: exchange.sent_bytes[leg] - sent[leg] for leg in sent}
        results[name] = (hidden, drafts, pool.latent, pool.index, exchange.collectives - before)
    results["cp"] = context_parallel(model, layout, exchange, rank)
    torch.save(results, f"{directory}/{rank}.pt")
    dist.destroy_process_group()


def context_parallel(model: Any, layout: Any, exchange: GroupExchange, rank: int) -> tuple[Any, ...]:
    """Rows dealt 0,3,6.. / the rest: uneven on purpose."""
    every = torch.arange(LENGTH)
    lists = [every[every % 3 == 0], every[every % 3 != 0]]
    pool = DevicePool(layout, 4, "cpu")
    exchange.begin_step([part.shape[0] for part in lists], lists)
    rows = rows_of(TOKENS[:LENGTH], 0, lists[rank])
    hidden = model.forward(rows, pool, exchange)
    out = model.mtp_extend(rows_of(TOKENS[1:], 0, lists[rank]), hidden, pool, exchange)
    return hidden, out.hidden, pool.latent, pool.index


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    # The workers run this file as a script: a spawned child could not import a test module by name.
    children = [subprocess.Popen([sys.executable, __file__, str(rank), str(tmp_path)]) for rank in range(2)]
    assert [child.wait(120) for child in children] == [0, 0]
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    model = tiny_model()
    alone = {}
    for count in (80, 33):
        pool = DevicePool(model.spec.slab_layout("tile656"), 4, "cpu")
        hidden, drafts = step(model, pool, TOKENS[:count], TOKENS[1 : count + 1], LocalExchange())
        alone[count] = (hidden, drafts, pool.latent, pool.index)
    for name, rank, count in (("both", 0, 80), ("both", 1, 33), ("idle", 0, 80)):
        for got, wanted in zip(ranks[rank][name], alone[count]):
            assert torch.equal(got, wanted), (name, rank)
    assert ranks[1]["idle"][0].shape == (0, model.hidden_size)
    calls = {ranks[rank][name][-1] for rank in range(2) for name in ("both", "idle")}
    assert len(calls) == 1, f"collectives differ between ranks or counts: {calls}"
    check_context_parallel(ranks, model, alone[80])
    check_bytes(ranks, model.spec)


def check_bytes(ranks: list[Any], spec: Any) -> None:
    """What left each rank, by formula: codes, scales and routing of its rows to the other rank; the other rank's fp64
    sums back. The forward's MoE layers and the extend's one have these counts; nothing else goes over `exchange`."""
    layers = sum(not spec.is_dense(layer) for layer in range(spec.num_hidden_layers)) + 1
    width, chosen = spec.hidden_size, spec.num_experts_per_tok
    row = width + 4 * -(-width // 128) + chosen * (4 + 4)
    for name, counts in {"both": (80, 33), "idle": (80, 0)}.items():
        for rank in range(2):
            sums = layers * counts[1 - rank] * 8 * width
            wanted = {"gather": layers * counts[rank] * row, "reduce": sums, "cache": 0}
            assert ranks[rank][f"{name} bytes"] == wanted, (name, rank)


def check_context_parallel(ranks: list[Any], model: Any, alone: tuple[Any, ...]) -> None:
    every = torch.arange(LENGTH)
    parts = [every[every % 3 == 0], every[every % 3 != 0]]
    for rank, part in enumerate(parts):
        hidden, _, latent, index = ranks[rank]["cp"]
        assert torch.equal(hidden, alone[0][part])
        # The pool of every rank holds all rows, those of the MTP layer too.
        assert torch.equal(latent, alone[2])
        assert torch.equal(index, alone[3])


if __name__ == "__main__":
    worker(int(sys.argv[1]), sys.argv[2])
