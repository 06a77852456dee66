"""One rank of a real gloo group, as a process: `python group_rank.py SCENARIO.json RANK`. Prints one JSON line."""

import json
import os
import sys
import threading
import time

import torch
import torch.distributed as dist

from headrace.decode import rank as rank_module
from headrace.decode.assemble import make_rank
from headrace.decode.base import DecodeOptions
from headrace.decode.fake import FakePrefill, ListSink, MemoryStore
from headrace.decode.lockstep import GroupControl
from headrace.kvstore.pool import DevicePool
from headrace.messages import Aborted, Refused, SamplingParams, SequenceFailed
from headrace.model.exchange import GroupExchange
from headrace.model.testing import tiny_model, tiny_spec


def ended(sink: ListSink, request_id: str) -> bool:
    gone = [kind for kind in (Aborted, Refused, SequenceFailed) if sink.of(kind, request_id)]
    return bool(gone or sink.finish_reason(request_id))


def options_of(scenario: dict) -> DecodeOptions:
    return DecodeOptions(
        max_running=8,
        max_queued=8,
        draft_tokens=scenario["drafts"],
        context_tokens=4096,
        adaptive=scenario.get("adaptive", False),
    )


def main(scenario: dict, rank: int) -> dict:
    torch.set_num_threads(1)
    world = scenario["world"]
    dist.init_process_group("gloo", init_method=scenario["rendezvous"], rank=rank, world_size=world)
    spec = tiny_spec(used_vocab_size=scenario.get("vocab", 500))
    whole = tiny_model(spec)
    shard = tiny_model(spec, ep_rank=rank, ep_size=world)
    layout = spec.slab_layout("tile656")
    store = MemoryStore(layout.slot_bytes)
    pool = DevicePool(layout, 48, "cpu")
    pool.latent.fill_(0xFF)
    pool.index.fill_(0xFF)
    engine = make_rank(
        model=shard,
        pool=pool,
        client=store,
        options=options_of(scenario),
        exchange=GroupExchange(),
        control=GroupControl(dist.new_group(backend="gloo")),
    )
    sink = ListSink()
    stream = engine.open_stream(sink)
    rank_module.IDLE_S = scenario.get("idle_s", rank_module.IDLE_S)
    engine.start()
    mine = [request for request in scenario["requests"] if request["rank"] == rank]
    prefill = FakePrefill(whole, store)
    made = {r["id"]: prefill.request(r["id"], r["prompt"], SamplingParams(**r["params"]), **broken(r)) for r in mine}
    together = dist.new_group(backend="gloo")
    dist.barrier(together)
    first_token_s = {}
    for request in mine:
        time.sleep(request.get("delay_s", 0.0))
        started = time.perf_counter()
        engine.submit(stream, made[request["id"]])
        if request.get("abort_after") is not None:
            watch(sink, request, lambda r: engine.abort(stream, r["id"]))
        if request.get("die") is not None:
            request["abort_after"] = request["die"]
            watch(sink, request, lambda _: os._exit(9))
        if request.get("alone"):
            sink.wait(lambda: bool(sink.tokens(request["id"])))  # noqa: B023
            first_token_s[request["id"]] = time.perf_counter() - started

    sink.wait(lambda: all(ended(sink, r["id"]) for r in mine), 60)
    if not scenario.get("one_dies"):
        dist.barrier(together)
    engine.stop(30.0)
    if not scenario.get("one_dies"):  # else its threads can end before the interpreter does, and abort the process
        dist.destroy_process_group()
    index = engine._scheduler.index
    return {
        "tokens": {r["id"]: sink.tokens(r["id"]) for r in mine},
        "failed": {r["id"]: [m.error.kind for m in sink.of(SequenceFailed, r["id"])] for r in mine},
        "aborted": [r["id"] for r in mine if sink.of(Aborted, r["id"])],
        "status": engine.status(),
        "held": index.held_count,
        "integrity": index.check_integrity(),
        "failure": repr(engine.failure) if engine.failure else None,
        "first_token_s": first_token_s,
    }


def broken(request: dict) -> dict:
    """A sampler that fails on this rank only: a bias outside the vocabulary."""
    if not request.get("fails"):
        return {}
    return {"sampling": SamplingParams(**request["params"], logit_bias={10**6: 1.0})}


def watch(sink, request, act) -> None:
    """Act when so many tokens of the request are out."""

    def run() -> None:
        sink.wait(lambda: len(sink.tokens(request["id"])) >= request["abort_after"])
        act(request)

    threading.Thread(target=run, daemon=True).start()


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        print(json.dumps(main(json.load(file), int(sys.argv[2]))))
