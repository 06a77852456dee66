"""The simulated service: production placement in simulated time, tiers, sessions."""

import asyncio
import dataclasses
import io
import json
import sys
from pathlib import Path

import pytest

from headrace.errors import InputError
from headrace.ids import BlockName, Incarnation
from headrace.kvstore.base import BlockMeta
from headrace.kvstore.host_tier import HostTier
from headrace.kvstore.policies import make_policy
from headrace.lab import cli
from headrace.lab.simulate.clock import run_virtual, sleep_until
from headrace.lab.simulate.costs import PrefillCosts, fit, load
from headrace.lab.simulate.driver import service_case, simulate_service
from headrace.lab.simulate.pool import block_names
from headrace.lab.simulate.service_settings import ServiceSettings
from headrace.lab.simulate.sweep import progress_bar
from headrace.lab.simulate.tiers import TierCache
from headrace.lab.traces import read_trace
from headrace.lab.traces.form import Request, Session, Trace, to_runs

DATA = Path(__file__).parent / "data"
SMALL = ServiceSettings(
    prefill_size="4000b", decode_ranks=2, decode_size="20000b", host_size="unlimited", token_s=1e-3, context_s=0.0,
    fixed_s=0.5, answer_token_s=0.1, crowd_s=0.0, publish_answers=False,
)  # fmt: skip


def turn(offset_s: float, think_s: float | None, chain: range, output: int = 11, sequence: int = 0) -> Request:
    return Request(offset_s, think_s, 64 * len(chain) + 1, output, to_runs(chain), sequence)


def trace_of(*sessions: Session) -> Trace:
    top = max(first + count for s in sessions for r in s.requests for first, count in r.runs)
    return Trace("made", 64, top, sessions)


@pytest.fixture(scope="module")
def weka() -> Trace:
    return read_trace(DATA / "weka.jsonl.gz")


def test_the_clock_jumps_and_keeps_order() -> None:
    seen: list[tuple[float, str]] = []

    async def mark(at_s: float, name: str) -> None:
        await sleep_until(at_s)
        seen.append((asyncio.get_running_loop().time(), name))

    async def main() -> None:
        await asyncio.gather(mark(100_000.0, "late"), mark(5.0, "early"), mark(0.0, "now"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3600):
                await asyncio.Event().wait()

    run_virtual(main())
    assert [name for _, name in seen] == ["now", "early", "late"]
    assert seen[-1][0] == pytest.approx(100_000.0)


def test_a_stuck_simulation_says_so() -> None:
    with pytest.raises(RuntimeError, match="stuck"):
        run_virtual(asyncio.Event().wait())


def test_one_session_by_hand() -> None:
    """Two turns of 10 and 15 blocks: the second finds the first on its group's device."""
    trace = trace_of(Session("s", 2.0, (turn(0.0, None, range(10)), turn(99.0, 4.0, range(15)))))
    outcomes, figures = simulate_service(trace, SMALL)
    first, second = outcomes
    assert first.ttft_s == pytest.approx(0.5 + 641e-3)
    assert first.decode_s == pytest.approx(10 * 0.1)
    assert (second.device_tokens, second.host_tokens) == (640, 0)
    assert second.arrived_s == pytest.approx(2.0 + first.total_s + 4.0)
    assert second.compute_s == pytest.approx(0.5 + (961 - 640) * 1e-3)
    assert figures["device_to_host_gb"] == pytest.approx(15 * SMALL.slab_bytes / 1e9)
    assert figures["prefill_to_decode_gb"] == pytest.approx(15 * SMALL.slab_bytes / 1e9)


def test_open_loop_keeps_recorded_times() -> None:
    trace = trace_of(Session("s", 2.0, (turn(0.0, None, range(10)), turn(1.0, 4.0, range(15)))))
    outcomes, _ = simulate_service(trace, dataclasses.replace(SMALL, loop="open"))
    assert sorted(o.arrived_s for o in outcomes) == [2.0, 3.0]


def test_published_answers_are_hit_by_the_next_turn() -> None:
    """641 prompt tokens and 200 of answer: 64 * floor(840 / 64) tokens are there for the next turn."""
    trace = trace_of(Session("s", 0.0, (turn(0.0, None, range(10), 200), turn(0.0, 1.0, range(20)))))
    outcomes, _ = simulate_service(trace, dataclasses.replace(SMALL, publish_answers=True))
    assert outcomes[1].hit_tokens == 64 * (840 // 64)
    assert (outcomes[1].device_tokens, outcomes[1].host_tokens) == (640, 192)


def test_a_fully_cached_prompt_computes_one_token() -> None:
    same = Request(0.0, 1.0, 640, 2, to_runs(range(10)), 1)
    trace = trace_of(Session("s", 0.0, (dataclasses.replace(same, think_s=None), same)))
    outcomes, _ = simulate_service(trace, SMALL)
    assert outcomes[1].hit_tokens == 639
    assert outcomes[1].compute_s == pytest.approx(0.501)


def test_host_tier_gives_back_what_the_device_lost() -> None:
    a = Session("a", 0.0, (turn(0.0, None, range(60)), turn(0.0, 500.0, range(60))))
    b = Session("b", 100.0, (turn(0.0, None, range(60, 120)),))
    settings = dataclasses.replace(SMALL, prefill_size="80b", host_gbps=1e-3)
    outcomes, figures = simulate_service(trace_of(a, b), settings)
    again = outcomes[-1]
    assert (again.device_tokens, again.host_tokens) == (19 * 64, 41 * 64)
    slow = 41 * SMALL.slab_bytes / 1e6
    assert again.restore_s + again.compute_s == pytest.approx(slow)
    assert figures["host_to_device_gb"] == pytest.approx(41 * SMALL.slab_bytes / 1e9)
    without, _ = simulate_service(trace_of(a, b), dataclasses.replace(settings, host_size="0b"))
    assert without[-1].hit_tokens == 19 * 64


def test_disk_tier_catches_what_the_host_drops() -> None:
    a = Session("a", 0.0, (turn(0.0, None, range(60)), turn(0.0, 500.0, range(60))))
    b = Session("b", 100.0, (turn(0.0, None, range(60, 120)),))
    settings = dataclasses.replace(SMALL, prefill_size="61b", host_size="70b", disk_size="1000b")
    outcomes, figures = simulate_service(trace_of(a, b), settings)
    assert outcomes[-1].disk_tokens == 50 * 64
    assert outcomes[-1].host_tokens == 10 * 64
    assert figures["host_to_disk_gb"] > 0


def test_sub_agents_start_after_their_parents_request(weka: Trace) -> None:
    outcomes, figures = simulate_service(weka, dataclasses.replace(SMALL, prefill_size="20000b"))
    assert figures["requests"] == len(outcomes) == sum(1 for _ in weka.requests())
    assert figures["refused"] == 0


def test_unlimited_room_gives_the_ideal_hit_rate(weka: Trace) -> None:
    """Every token of a block that an earlier prompt had is hit, whatever group it went to."""
    roomy = dataclasses.replace(SMALL, prefill_size="20000b", groups=3, loop="open")
    outcomes, figures = simulate_service(weka, dataclasses.replace(roomy, time_scale=1e-3))
    from headrace.lab.analysis.ideal import ideal_hits

    assert figures["hit"] == pytest.approx(ideal_hits(weka).token_weighted, abs=1e-3)
    assert all(o.hit_tokens < o.prompt_tokens for o in outcomes)


def test_same_seed_same_course(weka: Trace) -> None:
    settings = dataclasses.replace(SMALL, starts="poisson", seed=7, groups=2, prefill_size="5000b")
    first, second = simulate_service(weka, settings), simulate_service(weka, settings)
    assert first == second
    other = simulate_service(weka, dataclasses.replace(settings, seed=8))
    assert other != first


def test_more_groups_wait_less() -> None:
    burst = [Session(str(i), 0.0, (turn(0.0, None, range(60 * i, 60 * i + 60)),)) for i in range(6)]
    one = service_case(trace_of(*burst), SMALL)
    three = service_case(trace_of(*burst), dataclasses.replace(SMALL, groups=3))
    assert one["queue_s"] > 2 * three["queue_s"]
    assert one["prefill_busy"] > three["prefill_busy"]


def test_concurrency_limits_open_sessions() -> None:
    burst = [Session(str(i), 0.0, (turn(0.0, None, range(60 * i, 60 * i + 60)),)) for i in range(4)]
    outcomes, _ = simulate_service(trace_of(*burst), dataclasses.replace(SMALL, concurrency=1, groups=2))
    assert [o.queue_s for o in outcomes] == [0.0] * 4


def test_refusals_are_counted_and_do_not_stop_the_run() -> None:
    long = Session("long", 0.0, (turn(0.0, None, range(5000)),))
    short = Session("short", 1.0, (turn(0.0, None, range(5000, 5010)),))
    row = service_case(trace_of(long, short), SMALL)
    assert (row["requests"], row["refused"]) == (2, 1)


def test_overload_is_refused_at_the_queue_limit() -> None:
    burst = [Session(str(i), 0.0, (turn(0.0, None, range(10 * i, 10 * i + 10)),)) for i in range(8)]
    tight = dataclasses.replace(SMALL, decode_ranks=1, decode_running=1, max_queued=2)
    row = service_case(trace_of(*burst), tight)
    assert row["refused"] == 5


def test_a_full_tier_of_pinned_blocks_skips_the_write() -> None:
    tier = TierCache(3, "lru", 1)
    names = [BlockName(bytes([i])) for i in range(6)]
    chain = [BlockMeta(n, names[i - 1] if i else None, i, 1) for i, n in enumerate(names[:3])]
    assert tier.put(chain, 0.0) == (3, [])
    pinned = tier.pin(names[:3], 1.0)
    assert tier.put([BlockMeta(names[4], None, 0, 1)], 2.0) == (0, [])
    tier.unpin(pinned, 3.0)
    written, evicted = tier.put([BlockMeta(names[4], None, 0, 1)], 4.0)
    assert (written, [meta.name for meta in evicted]) == (1, [names[2]])
    assert tier.violations() == []


@pytest.mark.parametrize("policy", ["lru", "lfu", "s3fifo", "arc", "gdsf", "density", "ttl:40"])
def test_the_tier_holds_what_the_host_tier_holds(policy: str) -> None:
    """The same puts and touches through the daemon's bookkeeping, slots, leases, two phases and all."""
    now = [0.0]
    trace = read_trace(DATA / "mooncake.jsonl.gz")
    host = HostTier(slots=300, slot_bytes=1, policy=make_policy(policy, 300), lease_s=1e9, clock=lambda: now[0])
    owner = Incarnation("me")
    host.attach(owner)
    tier, names = TierCache(300, policy, 1), block_names(trace)
    for index, arrival in enumerate(trace.arrivals()):
        now[0] = arrival.at_s + index * 0.5
        host.tick()
        tier.expire(now[0])
        chain = [names[b] for b in arrival.request.blocks()]
        found = host.match(chain)
        assert found == next((i for i, n in enumerate(chain) if not tier.has(n)), len(chain))
        tier.touch(chain[:found], now[0])
        blocks = [(n, chain[d - 1] if d else None, d) for d, n in enumerate(chain)]
        slots = host.begin_put(owner, blocks)
        host.commit_put(owner, [(n, s, b"0" * 16) for n, s in zip(chain, slots) if s >= 0], keep_lease=False)
        tier.put([BlockMeta(*block, 1) for block in blocks], now[0])
    assert tier.violations() == []
    assert set(host.names()) == {n for n in names if tier.has(n)}


def test_a_chain_never_evicts_its_own_parent() -> None:
    tier = TierCache(2, "lru", 1)
    names = [BlockName(bytes([i])) for i in range(4)]
    chain = [BlockMeta(n, names[i - 1] if i else None, i, 1) for i, n in enumerate(names)]
    assert tier.put(chain, 0.0)[0] == 2
    assert [tier.has(n) for n in names] == [True, True, False, False]


def test_cost_fit_finds_the_line(tmp_path: Path) -> None:
    truth = PrefillCosts(fixed_s=0.04, token_s=6e-5, context_s=3e-11)
    points = [(n, c, truth.seconds(n, c)) for n in (64, 1024, 8192, 65536) for c in (0, 4096, 131072)]
    found = fit(points)
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(truth), rel=1e-3)
    (tmp_path / "costs.json").write_text(json.dumps(points))
    assert load(str(tmp_path / "costs.json")) == found


def test_cost_fit_has_no_negative_part() -> None:
    found = fit([(100, 0, 1.0), (200, 0, 1.0), (400, 0, 0.9), (800, 0, 1.0)])
    assert min(dataclasses.astuple(found)) >= 0
    with pytest.raises(InputError, match="3 points"):
        fit([(1, 0, 1.0)])


def test_command_simulates_a_service(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    arguments = ["simulate", str(DATA / "weka.jsonl.gz"), "--service", "--jobs", "1", "--sweep", "groups=1,2"]
    assert cli.main([*arguments, "--html", str(page)]) == 0
    assert "ttft_p90_s" in capsys.readouterr().out
    assert "where the time of a request goes" in page.read_text()
    assert cli.main([*arguments, "--fields"]) == 0
    assert "host_gbps=200.0" in capsys.readouterr().out


def test_the_progress_bar_goes_to_what_stderr_is_now(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    show = progress_bar()
    assert show is not None
    show(1, 2)
    assert "1/2" in terminal.getvalue()
