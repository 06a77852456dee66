"""Tuning in the interpreter: candidates are compared, unusable ones named, the tables found again by the kernels."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from headrace.kernels import tune, tuned
from headrace.kernels.cases import cases_of
from headrace.kernels.launch import Tile
from headrace.kernels.registry import default_registry

CPU = torch.device("cpu")
TILES = (Tile(16, 32, 4, 1), Tile(32, 32, 4, 1), Tile(24, 32, 4, 1))
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="this process compiles for its GPU")


@interpreted
def test_the_fastest_that_agrees_is_written_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speed = iter([9.0, 5.0] * 10)
    found = tune.tune(CPU, ["sparse_mla"], tiny=True, tiles=TILES, timer=lambda call: next(speed), source="a test")
    refused = [trial for trial in found.trials if trial.us is None]
    assert {trial.tile.m for trial in refused} == {24}
    assert "power of 2" in refused[0].text
    (path,) = tune.save(found, tmp_path)
    table = tuned.load("triton-sparse_mla", "cpu", tmp_path)
    assert (path.name, table.status, table.source) == ("triton-sparse_mla.cpu.json", tuned.MEASURED, "a test")
    assert {entry.dtype for entry in table.entries} == {"tile656", "plain576"}
    assert all((entry.config["m"], entry.us, entry.shape) == (32, 5.0, {"heads": 8}) for entry in table.entries)
    load = tuned.load
    monkeypatch.setattr(tuned, "load", lambda op, arch: load(op, arch, tmp_path))
    assert tuned.tile("sparse_mla", CPU, "tile656", {"heads": 8}, Tile(64, 64)) == TILES[1]
    assert tuned.tile("linear", CPU, "e4m3", {"rows": 8}, Tile(64, 64)) == Tile(64, 64)


@interpreted
def test_a_candidate_that_computes_something_else_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = default_registry().backend("linear", "triton").create(cases_of("linear", tiny=True)[0].context(CPU, False))
    plain = type(kernel)._tile

    def spoiled(self: Any, x: torch.Tensor, weight: Any) -> Tile:
        tile: Tile = plain(self, x, weight)
        if tile.m == 32:
            weight.scale.mul_(2)
        return tile

    monkeypatch.setattr(type(kernel), "_tile", spoiled)
    found = tune.tune(CPU, ["linear"], tiny=True, tiles=TILES[:2], timer=lambda call: 1.0)
    assert {trial.tile.m for trial in found.trials if trial.us is not None} == {16}
    assert all("differs from the default" in trial.text for trial in found.trials if trial.tile.m == 32)


def test_candidates_are_distinct_and_fit_the_architecture() -> None:
    for op in tune.TUNABLE:
        for target in ("gfx950", "sm_90"):
            tiles = tune.candidates(op, target)
            assert len(set(tiles)) == len(tiles) > 5
            assert target == "sm_90" or max(tile.stages for tile in tiles) == 2


def test_amd_tables_say_that_they_were_only_compiled() -> None:
    for arch in ("gfx950", "gfx942"):
        table = tuned.load("triton-sparse_mla", arch)
        assert (table.status, len(table.entries)) == (tuned.COMPILED, 6)
        assert all(entry.us is None for entry in table.entries)
