"""Readers: each format gives the sessions, lengths and shared blocks that its file holds."""

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import InputError
from headrace.lab import cli
from headrace.lab.analysis.ideal import ideal_hits
from headrace.lab.traces import detect, read_trace
from headrace.lab.traces.form import Trace, take_blocks, to_runs
from headrace.lab.traces.options import ReadOptions
from headrace.lab.traces.recorded import write

DATA = Path(__file__).parent / "data"


def weka_rows() -> list[dict[str, Any]]:
    with gzip.open(DATA / "weka.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One token a byte: any text, no training."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    built = Tokenizer(models.BPE({c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    built.save(str(path))
    return str(path)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("mooncake.jsonl.gz", "mooncake"),
        ("weka.jsonl.gz", "weka"),
        ("aiperf.jsonl.gz", "aiperf"),
        ("miniswe.jsonl.xz", "text"),
        ("azure.csv.gz", "azure"),
    ],
)
def test_format_is_recognised(file: str, name: str) -> None:
    assert detect(DATA / file) == name


def test_mooncake_requests_are_sessions_of_their_own() -> None:
    trace = read_trace(DATA / "mooncake.jsonl.gz")
    assert (trace.block_tokens, len(trace.sessions)) == (512, 100)
    first, second = (session.requests[0] for session in trace.sessions[:2])
    assert (first.input_tokens, first.output_tokens, first.num_blocks) == (6758, 500, 14)
    assert first.blocks()[0] == second.blocks()[0]
    assert set(first.blocks()[1:]).isdisjoint(second.blocks()[1:])


def test_weka_sub_agents_become_sessions_and_local_ids_do_not_meet() -> None:
    trace = read_trace(DATA / "weka.jsonl.gz")
    rows = weka_rows()
    agents = [r for row in rows for r in row["requests"] if r["type"] == "subagent"]
    assert len(trace.sessions) == len(rows) + len(agents)
    roots = [i for i, s in enumerate(trace.sessions) if s.parent is None]
    blocks = []
    for root in roots:
        family = [s for i, s in enumerate(trace.sessions) if root in (i, s.parent)]
        blocks.append({b for s in family for r in s.requests for b in r.blocks()})
    assert blocks[0].isdisjoint(blocks[1])
    child = next(s for s in trace.sessions if s.parent is not None)
    assert child.start_s == agents[0]["t"]
    assert child.after_request == rows[0]["requests"].index(agents[0]) - 1
    assert sorted(r.sequence for r in trace.requests()) == list(range(sum(1 for _ in trace.requests())))


def test_weka_chains_keep_equality_of_blocks() -> None:
    """Renumbering is a bijection on the ids of one session."""
    trace = read_trace(DATA / "weka.jsonl.gz")
    row = weka_rows()[0]
    mine = [r for r in row["requests"] if r["type"] != "subagent"]
    to_dense: dict[int, int] = {}
    for source, request in zip(mine, trace.sessions[0].requests, strict=True):
        ids = [i for first, count in source["hash_runs"] for i in range(first, first + count)]
        assert len(ids) == request.num_blocks == source["in"] // 64
        for local, dense in zip(ids, request.blocks(), strict=True):
            assert to_dense.setdefault(local, dense) == dense
    assert len(set(to_dense.values())) == len(to_dense)


def test_weka_takes_plain_hash_ids_and_runs_alike(tmp_path: Path) -> None:
    lines = []
    for row in weka_rows():
        for request in row["requests"]:
            for call in request.get("requests", [request]):
                call["hash_ids"] = [i for first, n in call.pop("hash_runs") for i in range(first, first + n)]
        lines.append(json.dumps(row))
    plain = tmp_path / "plain.jsonl"
    plain.write_text("\n".join(lines))
    assert read_trace(plain).sessions == read_trace(DATA / "weka.jsonl.gz").sessions


def test_aiperf_prompts_grow_by_the_answer_and_the_new_turn() -> None:
    trace = read_trace(DATA / "aiperf.jsonl.gz")
    turns = trace.sessions[0].requests
    assert turns[1].input_tokens == turns[0].input_tokens + turns[0].output_tokens + 1855
    assert turns[1].think_s == pytest.approx(12.1901)
    for before, after in itertools.pairwise(turns):
        assert after.num_blocks == after.input_tokens // 512
        assert after.blocks()[: before.num_blocks] == before.blocks()


def test_text_prompts_share_the_blocks_of_their_common_prefix(tokenizer: str) -> None:
    trace = read_trace(DATA / "miniswe.jsonl.xz", options=ReadOptions(tokenizer=tokenizer))
    assert sum(1 for _ in trace.requests()) == 24
    for session in trace.sessions:
        for before, after in itertools.pairwise(session.requests):
            assert before.offset_s < after.offset_s
            assert after.blocks()[: before.num_blocks] == before.blocks()


def test_openai_style_messages_share_their_prefix(tokenizer: str, tmp_path: Path) -> None:
    base = [{"role": "system", "content": "s" * 200}, {"role": "user", "content": "first question"}]
    more = [*base, {"role": "assistant", "content": "a" * 100}, {"role": "user", "content": "next"}]
    rows = [{"messages": base, "timestamp": 10, "usage": {"completion_tokens": 7}}, {"messages": more, "timestamp": 12}]
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(map(json.dumps, rows)))
    trace = read_trace(log, options=ReadOptions(tokenizer=tokenizer))
    one, two = (a.request for a in trace.arrivals())
    assert one.output_tokens == 7
    assert two.blocks()[: one.num_blocks] == one.blocks()
    assert trace.sessions[1].start_s == 2.0


def test_text_without_tokenizer_says_what_to_give() -> None:
    with pytest.raises(InputError, match="--tokenizer"):
        read_trace(DATA / "miniswe.jsonl.xz")


def test_azure_has_lengths_and_no_prefixes() -> None:
    trace = read_trace(DATA / "azure.csv.gz")
    assert not trace.has_prefixes
    assert (len(trace.sessions), trace.sessions[1].requests[0].input_tokens) == (199, 3180)
    assert trace.sessions[1].start_s == pytest.approx(0.052)


@pytest.mark.parametrize("file", ["weka.jsonl.gz", "aiperf.jsonl.gz", "mooncake.jsonl.gz"])
def test_recorded_form_round_trips(file: str, tmp_path: Path) -> None:
    trace = read_trace(DATA / file)
    (tmp_path / "copy.jsonl").write_text("".join(write(trace)))
    copy = read_trace(tmp_path / "copy.jsonl")
    assert detect(tmp_path / "copy.jsonl") == "recorded"
    assert copy.num_blocks == trace.num_blocks
    assert [s.parent is None for s in copy.sessions].count(True) == [s.parent is None for s in trace.sessions].count(
        True
    )
    for ours, theirs in zip(trace.arrivals(), copy.arrivals(), strict=True):
        assert ours.at_s == pytest.approx(theirs.at_s)
        assert ours.request.input_tokens == theirs.request.input_tokens
        assert ours.request.num_blocks == theirs.request.num_blocks


@pytest.mark.parametrize("text", ["", "not json", '{"timestamp": 1, "input_length": 2, "hash_ids": 7}', '{"a": 1}'])
def test_wrong_files_are_input_errors(text: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(text)
    with pytest.raises(InputError):
        read_trace(bad)


def test_a_cut_gzip_file_is_an_input_error(tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes((DATA / "mooncake.jsonl.gz").read_bytes()[:4000])
    with pytest.raises(InputError, match="damaged"):
        read_trace(cut)


def test_head_keeps_sub_agents_with_their_parents() -> None:
    trace = read_trace(DATA / "weka.jsonl.gz")
    one = trace.head(1)
    assert [s.parent for s in one.sessions if s.parent is not None] == [0] * (len(one.sessions) - 1)
    assert trace.head(2).sessions == trace.sessions


def test_runs() -> None:
    assert to_runs([4, 5, 6, 1, 3]) == ((4, 3), (1, 1), (3, 1))
    assert to_runs([]) == ()
    assert take_blocks(((4, 3), (9, 2)), 4) == ((4, 3), (9, 1))
    assert Trace("x", 64, 0, ()).arrivals() == []


def test_converted_logs_hold_no_text(tokenizer: str, tmp_path: Path) -> None:
    out = tmp_path / "anonymous.jsonl"
    assert cli.main(["convert", str(DATA / "miniswe.jsonl.xz"), str(out), "--tokenizer", tokenizer]) == 0
    text = out.read_text()
    assert "django" not in text.lower()
    assert "063925220f0d2954" not in text
    original = read_trace(DATA / "miniswe.jsonl.xz", options=ReadOptions(tokenizer=tokenizer))
    assert ideal_hits(read_trace(out)).rates() == ideal_hits(original).rates()
