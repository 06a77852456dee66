import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from headrace.deploy.rundir import RUN_MARK, RunDir, remove_stale
from headrace.errors import ConfigError


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Short, because sockets would have to fit; and the system's temp directory for these tests."""
    path = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    (path / "tmp").mkdir()
    (path / "shm").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(path / "tmp"))
        yield path
    shutil.rmtree(path)


def test_a_run_is_private_and_leaves_nothing(tmp_path: Path) -> None:
    run = RunDir("", str(tmp_path / "shm"))
    assert run.path.stat().st_mode & 0o777 == 0o700
    shared = tmp_path / "shm" / f"{run.path.name}-arena"
    shared.write_bytes(b"x")
    other = tmp_path / "shm" / "somebody-else"
    other.write_bytes(b"x")
    run.write_endpoints({"router": "http://x"})
    assert json.loads((run.path / "endpoints.json").read_text()) == {"router": "http://x"}
    run.close()
    assert not run.path.exists()
    assert list((tmp_path / "shm").iterdir()) == [other]


def test_a_named_directory_keeps_its_logs_only(tmp_path: Path) -> None:
    run = RunDir(str(tmp_path / "mine"), str(tmp_path / "shm"))
    (run.path / "router.log").write_text("hello\n")
    (run.path / "sub").mkdir()
    run.close()
    assert [p.name for p in run.path.iterdir()] == ["router.log"]


def test_two_runs_cannot_share_a_directory(tmp_path: Path) -> None:
    run = RunDir(str(tmp_path / "mine"), str(tmp_path / "shm"))
    with pytest.raises(ConfigError, match="in use by another run"):
        RunDir(str(tmp_path / "mine"), str(tmp_path / "shm"))
    run.close()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"deploy\.run_dir: cannot create .*file/run: Not a directory"):
        RunDir(str(tmp_path / "file" / "run"), str(tmp_path / "shm"))


def test_a_path_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"deploy\.run_dir.*at most 80"):
        RunDir(str(tmp_path / ("x" * 90)), str(tmp_path / "shm"))


def test_a_dead_run_is_removed_with_its_processes_and_a_living_one_stays(tmp_path: Path) -> None:
    living = RunDir("", str(tmp_path / "shm"))
    dead = tmp_path / "tmp" / "headrace-dead"
    dead.mkdir()
    (dead / "lock").touch()
    arena = tmp_path / "shm" / "headrace-dead-node-0"
    arena.write_bytes(b"x")
    orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={RUN_MARK: str(dead)})
    assert remove_stale(tmp_path / "tmp", tmp_path / "shm") == ["headrace-dead"]
    assert not psutil.pid_exists(orphan.pid)
    assert not dead.exists()
    assert not arena.exists()
    assert living.path.exists()
    living.close()


def test_the_sentinel_removes_what_a_killed_supervisor_leaves(tmp_path: Path) -> None:
    program = (
        "import os, sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from headrace.deploy.rundir import RunDir\n"
        "run = RunDir('', sys.argv[2]); open(f'{sys.argv[2]}/{run.path.name}-a', 'w').close()\n"
        "print(run._sentinel.pid, flush=True); os.kill(os.getpid(), 9)\n"
    )
    arguments = [sys.executable, "-c", program, str(tmp_path / "tmp"), str(tmp_path / "shm")]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    sentinel = int(done.stdout)
    if psutil.pid_exists(sentinel):
        psutil.wait_procs([psutil.Process(sentinel)], 10.0)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert list((tmp_path / "shm").iterdir()) == []
