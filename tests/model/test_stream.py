"""Parallel reads: any order of asking, a bound on what is held, errors of readers, threads that end."""

import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.errors import CheckpointError
from headrace.model.shards import ShardFile
from headrace.model.source import SafetensorsSource
from headrace.model.stream import TensorStream

COUNT, VALUES = 40, 256


@pytest.fixture
def source(tmp_path: Path) -> SafetensorsSource:
    tensors = {f"t{i:02}": torch.full((VALUES,), float(i)) for i in range(COUNT)}
    tensors |= {"code": torch.arange(8).to(torch.float8_e4m3fn).view(2, 4), "empty": torch.zeros(0, 3)}
    save_file(tensors, tmp_path / "model.safetensors")
    return SafetensorsSource(tmp_path)


def names() -> list[str]:
    return [f"t{i:02}" for i in range(COUNT)]


def test_a_shard_reads_what_safetensors_reads(source: SafetensorsSource, tmp_path: Path) -> None:
    for name, wanted in load_file(tmp_path / "model.safetensors").items():
        got = source.get(name)
        assert got.dtype == wanted.dtype
        assert got.shape == wanted.shape
        assert got.view(torch.uint8).equal(wanted.view(torch.uint8))


@pytest.mark.parametrize("order", ["forwards", "backwards", "twice"])
@pytest.mark.parametrize("window", [1, 3 * VALUES * 4, 1 << 20])
def test_any_order_and_any_window(source: SafetensorsSource, order: str, window: int) -> None:
    stream = TensorStream(source, names(), readers=3, window_bytes=window)
    asked = {"forwards": names(), "backwards": names()[::-1], "twice": [n for n in names() for _ in (0, 1)]}[order]
    for name in asked:
        assert float(stream.get(name)[0]) == int(name[1:])
    report = stream.report()
    stream.close()
    assert (report.read_tensors, report.read_bytes) == (COUNT, COUNT * VALUES * 4)
    assert report.rank_bytes + report.other_ranks_bytes == report.file_bytes == COUNT * VALUES * 4 + 8
    assert report.peak_bytes <= max(window, VALUES * 4)


def test_readers_run_ahead_only_as_far_as_the_window(source: SafetensorsSource) -> None:
    stream = TensorStream(source, names(), readers=2, window_bytes=5 * VALUES * 4)
    deadline = time.monotonic() + 20
    while stream.report().peak_bytes < 5 * VALUES * 4 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert stream.report().peak_bytes == 5 * VALUES * 4
    assert len(stream._pending) == COUNT - 5
    stream.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reader-")]


def test_a_failed_read_reaches_the_builder(source: SafetensorsSource, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size - VALUES * 4)  # while it is open, as a vanishing network file would
    stream = TensorStream(source, names(), readers=2)
    with pytest.raises(CheckpointError, match="ends at byte"):
        [stream.get(name) for name in names()]
    stream.close()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "header of 0 bytes in 0"),
        (b"\xff" * 16, "not a safetensors file"),
        ((20).to_bytes(8, "little") + b'{"a": {"shape": []}}', "KeyError"),
        (
            (70).to_bytes(8, "little") + b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}'.ljust(70),
            "in 4",
        ),
    ],
)
def test_files_that_are_no_safetensors(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(CheckpointError, match=words):
        ShardFile(tmp_path / "x")
