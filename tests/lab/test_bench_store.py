"""The store's benchmark runs and says what its goals are; speeds are not asserted on a shared machine."""

import json

import pytest

from headrace.lab import bench_store


def test_the_table_has_a_row_for_each_measure_with_goal_and_ratio(capsys):
    assert bench_store.main(["names", "calls", "--rounds", "2", "--json"]) == 0
    rows = {row["what"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["match + lease of 2,048 blocks, one call"]["goal"] == "≤ 2"
    assert all(row["value"] > 0 for row in rows.values())


def test_an_unknown_suite_lists_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        bench_store.main(["disks"])
    assert "names, calls, index, slabs" in capsys.readouterr().err
