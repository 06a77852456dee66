"""Advice: each choice follows from the simulations that are shown with it."""

import dataclasses
import json
from pathlib import Path

import pytest

from headrace.errors import ConfigError, InputError
from headrace.lab import cli
from headrace.lab.simulate.advise import Wishes, advise
from headrace.lab.simulate.service_settings import ServiceSettings
from headrace.lab.traces import read_trace
from headrace.lab.traces.shrink import shrink

DATA = Path(__file__).parent / "data"
BASE = ServiceSettings(prefill_size="2000b", decode_size="20000b", decode_ranks=2, fixed_s=0.3, token_s=1e-3)
WISHES = Wishes(ttft_p90_s=8.0, max_host_bytes=1e13, max_groups=8)


def test_steps_show_what_they_were_chosen_from() -> None:
    trace = shrink(read_trace(DATA / "mooncake.jsonl.gz"), 8)
    heard: list[str] = []
    memory, policy, groups = advise(trace, BASE, WISHES, heard.append)
    assert memory.rows[-1]["hit"] >= memory.rows[0]["hit"]
    assert all(row["hit"] < memory.rows[-1]["hit"] for row in memory.rows[:-1])
    assert policy.choice == "lru"
    chosen = {row["groups"]: row for row in groups.rows}
    fewest = int(groups.choice)
    assert chosen[fewest]["ttft_p90_s"] <= 8.0
    assert all(row["ttft_p90_s"] > 8.0 or row["refused"] for n, row in chosen.items() if n < fewest)
    assert fewest == 1 or fewest - 1 in chosen
    assert any("prefill groups" in text for text in heard)


def test_a_small_budget_is_said_to_be_the_limit() -> None:
    trace = read_trace(DATA / "weka.jsonl.gz")
    memory = advise(trace, BASE, dataclasses.replace(WISHES, max_host_bytes=1e9, max_groups=1), lambda _t: None)[0]
    assert "budget ends here" in memory.reason
    with pytest.raises(InputError, match="holds no block"):
        advise(trace, BASE, dataclasses.replace(WISHES, max_host_bytes=10.0), lambda _t: None)


def test_a_target_out_of_reach_is_not_called_met() -> None:
    trace = shrink(read_trace(DATA / "mooncake.jsonl.gz"), 8)
    groups = advise(trace, BASE, dataclasses.replace(WISHES, ttft_p90_s=0.01, max_groups=2), lambda _t: None)[2]
    assert (groups.choice, "still misses" in groups.reason) == ("2", True)


def test_lengths_alone_give_no_advice() -> None:
    with pytest.raises(InputError, match="lengths only"):
        advise(read_trace(DATA / "azure.csv.gz"), BASE, WISHES, lambda _t: None)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["advise", str(DATA / "mooncake.jsonl.gz"), "--max-groups", "2", "--set", "decode_ranks=2"]
    assert cli.main(arguments) == 0
    assert "headrace serve --set store.host_bytes=" in capsys.readouterr().out
    assert cli.main([*arguments, "--json"]) == 0
    assert [step["title"] for step in json.loads(capsys.readouterr().out)] == ["host tier", "policy", "prefill groups"]
    with pytest.raises(ConfigError, match="bytes"):
        cli.main([*arguments, "--max-host", "5M"])
