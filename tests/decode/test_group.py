"""Real gloo groups, one process a rank: same tokens as one rank, equal collective counts, no rank left behind."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.messages import SamplingParams
from headrace.model.mono import MonoEngine

WORKER = Path(__file__).parent / "workers" / "group_rank.py"


def run_group(tmp_path: Path, scenario: dict[str, Any], dies: int = -1) -> list[dict[str, Any]]:
    scenario = scenario | {"rendezvous": f"file://{tmp_path}/rendezvous"}
    path = tmp_path / "scenario.json"
    path.write_text(json.dumps(scenario))
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(path), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(scenario["world"])
    ]
    results = []
    try:
        for rank, process in enumerate(processes):
            out, err = process.communicate(timeout=150)
            assert process.returncode == (9 if rank == dies else 0), err[-4000:]
            if rank != dies:
                results.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
    if dies < 0:
        check_lockstep(results)
    return results


def check_lockstep(results: list[dict[str, Any]]) -> None:
    for name in ("control_exchanges_total", "collectives_total", "steps_total"):
        assert len({result["status"][name] for result in results}) == 1, name
    for result in results:
        assert result["failure"] is None
        assert result["held"] == 0
        assert result["integrity"] == []
        assert result["status"]["prompt_rows_computed_total"] == 0


def wanted(model: Any, request: dict[str, Any]) -> list[int]:
    return MonoEngine(model).generate(request["prompt"], SamplingParams(**request["params"]), 4).tokens[1:]


@pytest.mark.parametrize(("drafts", "adaptive"), [(0, False), (4, False), (4, True)])
def test_two_ranks_give_the_tokens_of_one(tmp_path, model, make_prompt, drafts, adaptive):
    requests = [
        {
            "id": f"{length}-{temperature}",
            "rank": at % 2,
            "delay_s": 0.01 * (at % 3),
            "prompt": make_prompt(length),
            "params": {"max_tokens": 6 + at, "temperature": temperature, "seed": at},
        }
        for temperature in (0.0, 0.9)
        for at, length in enumerate((1, 63, 64, 65, 127, 128, 129))
    ]
    results = run_group(tmp_path, {"world": 2, "drafts": drafts, "adaptive": adaptive, "requests": requests})
    for result in results:
        assert result["status"]["exchange_bytes_total{leg=gather}"] > 0
        assert result["status"]["exchange_bytes_total{leg=cache}"] == 0, "decode ranks keep their own caches"
    tokens = results[0]["tokens"] | results[1]["tokens"]
    for request in requests:
        assert tokens[request["id"]] == wanted(model, request), request["id"]


@pytest.mark.parametrize("world", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_one_request_on_many_ranks(tmp_path, model, make_prompt, world):
    """All ranks sleep, and would for a minute: the bell has to wake them."""
    request = {
        "id": "a", "rank": 1, "prompt": make_prompt(100), "params": {"max_tokens": 20, "temperature": 0.0},
        "delay_s": 1.2, "alone": True,
    }  # fmt: skip
    results = run_group(tmp_path, {"world": world, "drafts": 4, "idle_s": 60.0, "requests": [request]})
    assert results[1]["tokens"]["a"] == wanted(model, request)
    assert results[1]["status"]["collectives_total"] > 0
    assert results[1]["first_token_s"]["a"] < 30


def test_ranks_that_finish_abort_and_fail_in_the_same_steps(tmp_path, agreeing_model, make_prompt):
    greedy = {"max_tokens": 25, "temperature": 0.0}
    requests = [
        {"id": "ends", "rank": 0, "prompt": make_prompt(64), "params": greedy | {"max_tokens": 6}},
        {"id": "stays", "rank": 0, "prompt": make_prompt(65), "params": greedy | {"temperature": 1.0, "seed": 2}},
        {
            "id": "aborted",
            "rank": 1,
            "prompt": make_prompt(30),
            "params": greedy | {"max_tokens": 900},
            "abort_after": 3,
        },
        {"id": "fails", "rank": 1, "prompt": make_prompt(31), "params": greedy, "fails": True},
        {"id": "later", "rank": 1, "prompt": make_prompt(33), "params": greedy, "delay_s": 0.2},
    ]
    results = run_group(tmp_path, {"world": 2, "drafts": 4, "vocab": 3, "requests": requests})
    assert results[0]["tokens"]["ends"] == wanted(agreeing_model, requests[0])
    assert results[0]["tokens"]["stays"] == wanted(agreeing_model, requests[1])
    assert results[1]["aborted"] == ["aborted"]
    assert results[1]["failed"]["fails"] == ["EngineError"]
    assert results[1]["tokens"]["later"] == wanted(agreeing_model, requests[4])


def test_when_a_rank_dies_the_others_say_so_at_once(tmp_path, make_prompt):
    long = {"max_tokens": 1500, "temperature": 0.0}
    requests = [
        {"id": "survivor", "rank": 0, "prompt": make_prompt(64), "params": long},
        {"id": "victim", "rank": 1, "prompt": make_prompt(65), "params": long, "die": 5},
    ]
    (survivor,) = run_group(tmp_path, {"world": 2, "drafts": 4, "one_dies": True, "requests": requests}, dies=1)
    assert survivor["failed"]["survivor"] == ["RankLost"]
    assert survivor["held"] == 0
    assert survivor["integrity"] == []
    assert survivor["failure"] is not None
