"""Ideal hit rates and reuse distances, on tiny cases and on the published check values."""

import json
from pathlib import Path

import pytest

from headrace.lab import cli
from headrace.lab.analysis.ideal import ideal_hits
from headrace.lab.analysis.reuse import reuse_histogram
from headrace.lab.analysis.summary import inspect
from headrace.lab.analysis.text import render
from headrace.lab.traces import read_trace
from headrace.lab.traces.form import Request, Session, Trace, to_runs

TRACES = Path(cli.__file__).resolve().parent / "data"
EXCERPTS = Path(__file__).parent / "data"


def trace_of(*chains: list[int]) -> Trace:
    sessions = [
        Session(str(i), float(i), (Request(0.0, None, 64 * len(chain) + 10, 1, to_runs(chain), i),))
        for i, chain in enumerate(chains)
    ]
    return Trace("tiny", 64, 1 + max(b for chain in chains for b in chain), tuple(sessions))


def test_only_the_leading_run_hits() -> None:
    tally = ideal_hits(trace_of([0, 1, 2], [0, 3, 2], [4], [0, 1, 5, 2]))
    assert (tally.blocks, tally.hit_blocks, tally.requests_hit) == (11, 3, 2)
    assert tally.block_weighted == pytest.approx(3 / 11)
    assert tally.token_weighted == pytest.approx(3 * 64 / (11 * 64 + 40))
    assert tally.request_mean == pytest.approx((64 / 202 + 128 / 266) / 4)


@pytest.mark.parametrize(
    ("file", "block", "token", "mean"),
    [
        ("mooncake_conversation.jsonl.gz", 0.3664, 0.3736, 0.4094),
        ("mooncake_synthetic.jsonl.gz", 0.6396, 0.6512, 0.4315),
    ],
)
def test_mooncake_check_values(file: str, block: float, token: float, mean: float) -> None:
    rates = ideal_hits(read_trace(TRACES / file)).rates()
    assert [round(rate, 4) for rate in rates.values()] == [block, token, mean]


def test_weka_check_value() -> None:
    tally = ideal_hits(read_trace(TRACES / "weka_claude_code_v8.jsonl.gz"))
    assert tally.requests == 49_334
    assert round(tally.block_weighted, 3) == 0.963


def test_reuse_distance_counts_other_blocks() -> None:
    histogram = reuse_histogram(trace_of([0, 1], [2, 3], [0, 1], [0, 1]))
    # 0 and 1 come back after three other blocks, then after one
    assert histogram.first_uses == 4
    assert sum(histogram.counts) == 4
    assert sum(c for high, c in zip(histogram.edges[1:], histogram.counts) if high <= 2) == 2


def test_exact_distances_are_the_lru_curve() -> None:
    """All uses at distance < C hit an LRU cache of C blocks."""
    trace = read_trace(EXCERPTS / "mooncake.jsonl.gz")
    histogram = reuse_histogram(trace)
    events = [b for a in trace.arrivals() for b in a.request.blocks()]
    for capacity in (16, 256, 1024):
        cache: dict[int, None] = {}
        hits = 0
        for block in events:
            hits += block in cache
            cache.pop(block, None)
            cache[block] = None
            if len(cache) > capacity:
                del cache[next(iter(cache))]
        counted = sum(c for high, c in zip(histogram.edges[1:], histogram.counts) if high <= capacity)
        assert counted == hits


def test_sampled_histogram_is_near_the_exact_one() -> None:
    trace = read_trace(TRACES / "mooncake_synthetic.jsonl.gz")
    exact, sampled = reuse_histogram(trace), reuse_histogram(trace, max_events=20_000)
    assert exact.sample_rate == 1.0
    assert sampled.sample_rate < 0.2
    assert sampled.uses == pytest.approx(exact.uses, rel=0.05)
    for edge in (4096, 16_384):
        shares = [
            sum(c for high, c in zip(h.edges[1:], h.counts) if high <= edge) / h.uses for h in (exact, sampled)
        ]  # fmt: skip
        assert shares[0] == pytest.approx(shares[1], abs=0.03)


def test_text_names_all_three_definitions() -> None:
    text = render(inspect(read_trace(EXCERPTS / "weka.jsonl.gz")))
    for word in ("block-weighted", "token-weighted", "mean per request", "reuse distance", "working set"):
        assert word in text


def test_command_prints_json_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = tmp_path / "out.svg"
    assert cli.main(["inspect", str(EXCERPTS / "mooncake.jsonl.gz"), "--json", "--figure", str(figure)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["requests"] == 100
    assert facts["working_set"]["seen_blocks"][-1] == facts["unique_blocks"]
    assert "<svg" in figure.read_text()
