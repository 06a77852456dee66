"""Settings, sweeps, reports and the command around them."""

import csv
import dataclasses
import json
import xml.etree.ElementTree
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.lab import cli
from headrace.lab.report import svg
from headrace.lab.simulate.settings import PoolSettings, parse_settings, parse_sweep, to_blocks
from headrace.lab.simulate.sweep import pool_case, run_sweep, with_bound
from headrace.lab.traces import read_trace

TRACE = Path(__file__).parent / "data" / "mooncake.jsonl.gz"


@pytest.mark.parametrize(
    ("text", "blocks"),
    [("0.5M", 7812), ("1000b", 1000), ("64k", 1000), ("1GiB", 306), ("1GB", 285), ("unlimited", 0)],
)
def test_sizes(text: str, blocks: int) -> None:
    assert to_blocks(text, 64) == blocks


def test_bytes_scale_with_the_block_size() -> None:
    assert to_blocks("1GiB", 512) == 306 // 8


@pytest.mark.parametrize("text", ["", "many", "-3M", "10", "1 QB", "0.1b"])
def test_wrong_sizes_say_what_is_expected(text: str) -> None:
    with pytest.raises(ConfigError, match="size"):
        to_blocks(text, 64)


def test_settings_and_sweeps() -> None:
    base = parse_settings(PoolSettings, ["policy=arc", "slab_bytes=100"])
    assert (base.policy, base.slab_bytes) == ("arc", 100)
    cases = parse_sweep(base, ["capacity=1M,2M", "policy=lru,arc"])
    assert [(c.capacity, c.policy) for c in cases] == [("1M", "lru"), ("1M", "arc"), ("2M", "lru"), ("2M", "arc")]
    assert len(with_bound(cases)) == 6
    assert parse_sweep(base, []) == [base]


@pytest.mark.parametrize("text", ["polcy=lru", "policy", "slab_bytes=x", "slab_bytes=0", "evict=some"])
def test_wrong_settings_name_the_field(text: str) -> None:
    with pytest.raises(ConfigError, match=text.split("=")[0]):
        parse_settings(PoolSettings, [text])


def test_processes_give_the_same_rows_as_one() -> None:
    trace = read_trace(TRACE)
    cases = parse_sweep(PoolSettings(), ["capacity=100b,800b", "policy=lru,s3fifo"])
    seen: list[tuple[int, int]] = []
    alone = run_sweep(trace, cases, pool_case, 1)
    spread = run_sweep(trace, cases, pool_case, 2, lambda done, total: seen.append((done, total)))
    clocks = ("seconds", "block_events_per_s")
    assert [{k: v for k, v in row.items() if k not in clocks} for row in alone] == [
        {k: v for k, v in row.items() if k not in clocks} for row in spread
    ]
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_command_writes_csv_json_and_html(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, table = tmp_path / "out.html", tmp_path / "out.csv"
    arguments = ["simulate", str(TRACE), "--sweep", "capacity=100b,800b", "--sweep", "policy=lru,lfu", "--bound"]
    assert cli.main([*arguments, "--jobs", "1", "--json", "--html", str(page), "--csv", str(table)]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 6
    with table.open() as file:
        assert [row["policy"] for row in csv.DictReader(file)] == [row["policy"] for row in rows]
    text = page.read_text()
    assert "clairvoyant" in text
    assert "<polyline" in text
    assert "http" not in text.replace("http://www.w3.org", "")
    embedded = text.split('id="rows">')[1].split("</script>")[0]
    assert json.loads(embedded) == rows


def test_wrong_field_is_reported_by_the_command() -> None:
    with pytest.raises(ConfigError, match="policy"):
        cli.main(["simulate", str(TRACE), "--set", "policy=best"])


@pytest.mark.parametrize("log_x", [True, False])
def test_charts_are_well_formed(log_x: bool) -> None:
    chart = svg.lines("a <title>", "x", "y", [("one & two", [(1, 0.5), (1000, 0.7)]), ("b", [(10, 0.1)])], log_x=log_x)
    xml.etree.ElementTree.fromstring(chart)
    xml.etree.ElementTree.fromstring(svg.stacked("t", "s", ["a", "b"], [("p", [1, 2]), ("q", [3, 0])]))
    assert svg.lines("t", "x", "y", []) == ""


def test_every_setting_is_documented() -> None:
    for field in dataclasses.fields(PoolSettings):
        assert field.metadata["doc"]
