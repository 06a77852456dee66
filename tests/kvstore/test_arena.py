"""The arena file: honest allocation, private, recognised when stale, refused with numbers when it does not fit."""

import fcntl
import os
import stat
from pathlib import Path

import pytest

from headrace.errors import ConfigError, IncompatiblePeer
from headrace.kvstore import arena as arenas
from headrace.kvstore.arena import HEADER_BYTES, Arena, remove_stale

SHM = Path("/dev/shm")


@pytest.fixture
def directory(tmp_path):
    made = SHM / f"hrtest-{os.getpid()}-{tmp_path.name}"
    made.mkdir()
    yield made
    for path in made.iterdir():
        path.unlink()
    made.rmdir()


def make(directory, owner="aaaa", host_bytes=40_960):
    return Arena.create(directory, "run-node-0", host_bytes=host_bytes, slot_bytes=8192, owner=owner)


def test_created_arena_is_allocated_private_and_removed(directory):
    arena = make(directory)
    info = arena.path.stat()
    assert arena.slots == 5
    assert arena.path.name == "run-node-0-aaaa.arena"
    assert info.st_size == HEADER_BYTES + 5 * 8192
    assert info.st_blocks * 512 >= info.st_size
    assert stat.S_IMODE(info.st_mode) == 0o600
    arena.close()
    arena.close()
    assert list(directory.iterdir()) == []


def test_attached_arena_shares_the_bytes(directory):
    arena = make(directory)
    other = Arena.attach(arena.path, slots=5, slot_bytes=8192, owner="aaaa")
    arena.slot(4)[:3] = b"abc"
    assert bytes(other.slot(4)[:4]) == b"abc\0"
    assert other.region().nbytes == 5 * 8192
    view = other.slot(4)
    other.close()
    arena.close()
    assert bytes(view[:3]) == b"abc"  # a view outlives close and file


@pytest.mark.parametrize("wrong", [{"slots": 6}, {"slot_bytes": 4096}, {"owner": "bbbb"}])
def test_another_daemons_arena_is_refused(directory, wrong):
    arena = make(directory)
    with pytest.raises(IncompatiblePeer, match="is not the arena"):
        Arena.attach(arena.path, **{"slots": 5, "slot_bytes": 8192, "owner": "aaaa", **wrong})
    arena.close()


def test_stale_files_go_living_and_foreign_ones_stay(directory):
    living = make(directory, "living")
    dead = directory / "run-node-0-dead.arena"
    dead.write_bytes(living.path.read_bytes())
    foreign = directory / "notes.arena"
    foreign.write_text("not an arena")
    assert remove_stale(directory) == [dead]
    assert living.path.exists()
    assert foreign.exists()
    living.close()


def test_a_second_start_removes_what_a_killed_daemon_left(directory):
    first = make(directory, "first")
    fcntl.flock(first._fd, fcntl.LOCK_UN)  # as the end of its process would
    second = make(directory, "second")
    assert [path.name for path in directory.iterdir()] == ["run-node-0-second.arena"]
    second.close()


def test_a_place_that_takes_no_file_is_refused_by_its_setting(directory):
    file = directory / "a file"
    file.touch()
    with pytest.raises(ConfigError, match=r"store\.shm_dir: cannot create a file in .*: Not a directory"):
        make(file)


def test_what_does_not_fit_is_refused_with_numbers(directory, monkeypatch):
    with pytest.raises(ConfigError, match="does not hold one block of 8192 bytes"):
        make(directory, host_bytes=8191)
    with pytest.raises(ConfigError, match="free"):
        make(directory, host_bytes=1 << 50)
    monkeypatch.setattr(arenas, "_RESERVE_BYTES", 1 << 50)
    with pytest.raises(ConfigError, match="available memory"):
        make(directory)
    with pytest.raises(ConfigError, match="nowhere"):
        make(directory / "nowhere")
    assert list(directory.iterdir()) == []
