"""Tables of tuned configurations: nearest entry, round trip, files that are none."""

import json
from pathlib import Path

import pytest
import torch

from headrace.errors import KernelUnsupported
from headrace.kernels import tuned
from headrace.kernels.launch import architecture
from headrace.kernels.tuned import MEASURED, Entry, Table

TABLE = Table(
    "linear",
    "sm_90",
    MEASURED,
    "a test",
    (
        Entry("e4m3", {"rows": 16, "out": 2048, "inner": 6144}, {"m": 16, "kind": "a"}, 10.5),
        Entry("e4m3", {"rows": 4096, "out": 2048, "inner": 6144}, {"m": 128, "kind": "b"}),
        Entry("e4m3", {"rows": 4096, "out": 16384, "inner": 6144}, {"m": 256, "kind": "a"}),
        Entry("bf16", {"rows": 16, "out": 2048, "inner": 6144}, {"m": 64, "kind": "a"}),
    ),
)


def config(rows: int, out: int = 2048, dtype: str = "e4m3", **wanted: str) -> object:
    found = TABLE.lookup({"rows": rows, "out": out, "inner": 6144}, dtype, **wanted)
    return found and found["m"]


def test_the_nearest_entry_in_octaves() -> None:
    assert config(1) == 16
    assert config(255) == 16
    assert config(257) == 128
    assert config(100_000, 40_000) == 256
    assert config(5000, 6000) == 256
    assert config(5000, 5000) == 128
    assert config(4096, dtype="bf16") == 64
    assert config(4096, dtype="fp16") is None
    assert config(4096, kind="a") == 256


def test_a_table_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    path = tuned.save(TABLE, tmp_path)
    assert path.name == "linear.sm_90.json"
    assert tuned.load("linear", "sm_90", tmp_path) == TABLE
    assert tuned.load("linear", "gfx950", tmp_path).entries == ()
    assert len(path.read_text().splitlines()) == 6 + len(TABLE.entries)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"entries": [{"dtype": "e4m3", "shape": {"rows": 0}, "config": {}}]}, "above 0"),
        ({"entries": [{"dtype": "e4m3", "shape": {"rows": 1}, "config": {"m": [1]}}]}, "integers or strings"),
        ({"status": "guessed"}, "compiled, not run"),
        ({"arch": "gfx950"}, "holds linear on gfx950"),
    ],
)
def test_a_file_that_is_no_table_is_named(tmp_path: Path, change: dict[str, object], what: str) -> None:
    path = tuned.save(TABLE, tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(KernelUnsupported, match=what):
        tuned.load("linear", "sm_90", tmp_path)


def test_every_packaged_table_can_be_read() -> None:
    for path in tuned.FOLDER.glob("*.json"):
        op, arch = path.stem.split(".")
        assert tuned.load(op, arch).entries


def test_a_cpu_has_no_architecture() -> None:
    assert architecture(torch.device("cpu")) == "cpu"
