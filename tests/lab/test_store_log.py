"""A node's event log read as a trace: prompts, turns of a conversation, answers."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import InputError
from headrace.lab.traces import detect, read_trace

HEADER = {"headrace_store_log": 1, "block_tokens": 64, "node": "node-0"}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in (HEADER, *rows)))
    return path


def read(s: float, *blocks: str, role: str = "prefill") -> dict[str, Any]:
    return {"s": s, "op": "read", "who": f"{role}-0", "role": role, "hit": 0, "blocks": list(blocks)}


def put(s: float, parent: str | None, *blocks: str) -> dict[str, Any]:
    return {"s": s, "op": "put", "who": "decode-0.0", "role": "decode", "parent": parent, "blocks": list(blocks)}


def test_turns_of_a_conversation_are_one_session(tmp_path: Path) -> None:
    path = write(
        tmp_path / "log",
        {"s": 0.0, "op": "joined", "who": "prefill-0", "role": "prefill"},
        read(1.0, "a", "b"),
        put(1.1, None, "a", "b"),
        read(2.0, "a", "x"),
        put(2.5, "b", "c"),
        read(2.6, "a", "b", "c", role="decode"),
        put(3.0, "c", "d"),
        {"s": 3.5, "op": "gone", "why": "evicted", "blocks": ["x"]},
        read(9.0, "a", "b", "c", "d", "e"),
        read(9.5, "d", "e"),
    )
    assert detect(path) == "store-log"
    trace = read_trace(path)
    assert [len(session.requests) for session in trace.sessions] == [2, 1]
    first, second = trace.sessions[0].requests
    assert (first.input_tokens, first.output_tokens) == (128, 128)
    assert (second.input_tokens, second.num_blocks) == (320, 5)
    assert second.blocks()[:2] == first.blocks()
    assert trace.sessions[1].requests[0].blocks()[0] == first.blocks()[0]
    assert (trace.sessions[0].start_s, second.offset_s) == (1.0, 8.0)


def test_the_same_prompt_again_is_another_session(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "log", read(0.0, "a", "b"), read(1.0, "a", "b"), read(2.0, "a", "b", "c")))
    assert sorted(len(session.requests) for session in trace.sessions) == [1, 2]


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "log", read(0.0, "a"))
    path.write_text(path.read_text().replace('"headrace_store_log": 1', '"headrace_store_log": 2'))
    with pytest.raises(InputError, match="version 2, this build reads 1"):
        read_trace(path)


def test_a_log_of_a_real_node_replays(tmp_path: Path) -> None:
    """What the lab finds in the log is what the node gave."""
    from headrace.kvstore.names import chain, namespace
    from headrace.kvstore.testing import FINGERPRINT, DaemonFixture
    from headrace.kvstore.testing import put as write_blocks
    from headrace.lab.analysis.ideal import ideal_hits

    daemon = DaemonFixture(tmp_path, slots=64, event_log=tmp_path / "store.jsonl")
    client = daemon.client("prefill-0", "prefill")
    names = chain(namespace(FINGERPRINT, "t"), range(64 * 40))
    hits = 0
    for blocks in (5, 10, 10, 30):
        found = client.lease(names[:blocks])
        hits += sum(lease is not None for lease in found)
        client.release([lease.name for lease in found if lease is not None])
        write_blocks(client, names, 0, blocks)
    assert hits == 25
    client.close()
    daemon.close()
    trace = read_trace(tmp_path / "store.jsonl")
    assert sum(len(session.requests) for session in trace.sessions) == 4
    assert ideal_hits(trace).hit_blocks == hits
