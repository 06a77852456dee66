"""The arena file: honest allocation, private, recognised when stale, refused with numbers when it does not fit."""

import fcntl
import os
import stat
import subprocess
from pathlib import Path

import pytest

from headrace.errors import ConfigError, IncompatiblePeer
from headrace.kvstore import memory
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
    monkeypatch.setattr(memory, "RESERVE_BYTES", 1 << 50)
    with pytest.raises(ConfigError, match="available memory"):
        make(directory)
    with pytest.raises(ConfigError, match="nowhere"):
        make(directory / "nowhere")
    assert list(directory.iterdir()) == []


def status_kb(pid, field):
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise AssertionError(field)


def test_the_daemons_shared_memory_is_what_was_configured(tmp_path):
    from headrace.kvstore.testing import LAYOUT, DaemonFixture

    made = DaemonFixture(tmp_path, slots=700)
    wanted = HEADER_BYTES + 700 * LAYOUT.slot_bytes
    assert status_kb(made.process.pid, "RssShmem") == wanted // 1024
    assert made.files()[0].stat().st_blocks * 512 == wanted
    client = made.client()
    values = client.stats()
    states = ("free", "writing", "ready", "doomed", "quarantined")
    assert sum(values[f"host_{state}"] for state in states) == 700
    assert values["host_bytes"] == 700 * LAYOUT.slot_bytes
    made.close()


def test_memory_is_taken_in_chunks_and_looked_for_again_before_each(directory, monkeypatch):
    monkeypatch.setattr(memory, "CHUNK_BYTES", 16_384)
    answers = iter([1 << 40, 1 << 40, 1 << 40, 1000])  # preflight, two chunks, then somebody else took the rest
    monkeypatch.setattr(memory, "available_bytes", lambda: next(answers))
    with pytest.raises(ConfigError, match=r"after 32768 of 45056 bytes only 1000 bytes of memory are available"):
        make(directory)
    assert list(directory.iterdir()) == []


def test_what_the_file_system_refuses_is_an_error_and_no_signal(directory, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(memory, "_take", full)
    with pytest.raises(ConfigError, match="cannot allocate 45056 bytes, 0 were taken: No space left on device"):
        make(directory)
    assert list(directory.iterdir()) == []


def test_an_older_kernel_takes_pages_too(directory, monkeypatch):
    monkeypatch.setattr(memory, "_MADV_POPULATE_WRITE", 12345)
    arena = make(directory)
    assert arena.path.stat().st_blocks * 512 == HEADER_BYTES + 40_960
    arena.close()


def test_pages_come_from_the_nodes_that_were_asked_for(directory):
    arena = Arena.create(directory, "run", host_bytes=40_960, slot_bytes=8192, owner="o", numa="0")
    lines = Path("/proc/self/numa_maps").read_text().splitlines() if Path("/proc/self/numa_maps").exists() else []
    policies = [line.split()[1] for line in lines if str(arena.path) in line]
    assert policies in ([], ["bind:0"])
    arena.close()
    for wrong in ("77", "first", "0-99"):
        with pytest.raises(ConfigError, match=r"store\.numa: .* neither `auto` nor of the nodes with memory"):
            Arena.create(directory, "run", host_bytes=40_960, slot_bytes=8192, owner="o", numa=wrong)
    assert list(directory.iterdir()) == []
    assert memory.expand_ranges("0-2,5\n") == [0, 1, 2, 5]


def test_several_nodes_are_dealt_over(directory, monkeypatch):
    """On a machine with one node the kernel refuses a second one: the call is right if it names what we asked."""
    monkeypatch.setattr(memory, "numa_nodes", lambda: [0, 1])
    try:
        arena = Arena.create(directory, "run", host_bytes=40_960, slot_bytes=8192, owner="o")
    except ConfigError as error:
        assert "cannot place memory on 'auto': Invalid argument" in str(error)  # noqa: PT017
        return
    maps = Path("/proc/self/numa_maps").read_text()
    assert any("interleave" in line for line in maps.splitlines() if str(arena.path) in line)
    arena.close()


def test_a_cgroup_limit_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    everything = memory.available_bytes()
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert memory.available_bytes() > everything // 2
    (tmp_path / "memory.max").write_text("5000\n")
    assert memory.available_bytes() == 4000


def test_huge_pages_are_used_where_the_file_system_gives_them(tmp_path):
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "huge=advise", "tmpfs", str(tmp_path)], capture_output=True)
    if mount.returncode:
        pytest.skip("may not mount a file system here")
    try:
        arena = Arena.create(tmp_path, "run", host_bytes=8 << 20, slot_bytes=8192, owner="o")
        assert arena.huge_bytes() >= 4 << 20
        arena.close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
