"""`headrace serve` as a process, with fake boxes: ready line, orderly stop, second signal, kill -9, stale leftovers."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

Serve = Callable[..., tuple["subprocess.Popen[str]", dict[str, Any], list[psutil.Process]]]


@pytest.fixture
def serve(shm_dir: Path, tmp_path: Path) -> Iterator[Serve]:
    started: list[subprocess.Popen[str]] = []

    def start(launcher: str, *overrides: str) -> tuple["subprocess.Popen[str]", dict[str, Any], list[psutil.Process]]:
        command = [sys.executable, "-P", "-m", "headrace.cli", "serve", "--fake", "--json", "--set", "router.port=0"]
        for item in (f"deploy.launcher={launcher}", f"store.shm_dir={shm_dir}", "model.device=cpu", *overrides):
            command += ["--set", item]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        started.append(process)
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        return process, ready, psutil.Process(process.pid).children(recursive=True)

    yield start
    for process in started:
        process.kill()
        process.wait()


def all_gone(processes: list[psutil.Process], run_dir: str, shm_dir: Path) -> bool:
    alive = [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    return not alive and not Path(run_dir).exists() and not list(shm_dir.iterdir())


def wait_until_gone(processes: list[psutil.Process], run_dir: str, shm_dir: Path, timeout_s: float) -> float:
    began = time.monotonic()
    while time.monotonic() - began < timeout_s:
        try:
            if all_gone(processes, run_dir, shm_dir):
                break
        except psutil.NoSuchProcess:
            continue
        time.sleep(0.1)
    left = [(p.pid, p.name()) for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert left == []
    assert not Path(run_dir).exists()
    assert list(shm_dir.iterdir()) == []
    return time.monotonic() - began


@pytest.mark.parametrize("launcher", ["process", "ray"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_stops_everything_within_ten_seconds(
    serve: Serve, shm_dir: Path, launcher: str, number: signal.Signals
) -> None:
    process, ready, family = serve(launcher)
    assert ready["url"].startswith("http://127.0.0.1:")
    assert ready["pid"] == process.pid
    assert len(list(shm_dir.iterdir())) == 6
    process.send_signal(number)
    assert process.wait(10) == 0
    wait_until_gone(family, ready["run_dir"], shm_dir, 2.0)


@pytest.mark.parametrize("launcher", ["process", "ray"])
def test_kill_9_leaves_nothing_after_seconds(serve: Serve, shm_dir: Path, launcher: str) -> None:
    process, ready, family = serve(launcher)
    process.kill()
    process.wait()
    assert wait_until_gone(family, ready["run_dir"], shm_dir, 15.0) < 10.0


@pytest.mark.parametrize("launcher", ["process", "ray"])
def test_a_second_signal_ends_at_once(serve: Serve, shm_dir: Path, launcher: str) -> None:
    process, ready, family = serve(launcher)
    Path(ready["run_dir"], "router.deaf").touch()
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(5) == 130
    assert time.monotonic() - began < 4.0
    wait_until_gone(family, ready["run_dir"], shm_dir, 10.0)


def test_a_stopped_supervisor_that_dies_with_its_sentinel_is_cleaned_by_the_next_start(
    serve: Serve, shm_dir: Path
) -> None:
    process, ready, family = serve("process")
    for member in family:
        member.send_signal(signal.SIGKILL)
    process.kill()
    process.wait()
    assert Path(ready["run_dir"]).exists()
    assert list(shm_dir.iterdir())
    again, second, family = serve("process")
    assert not Path(ready["run_dir"]).exists()
    assert {path.name.rpartition("-")[0].split("-")[1] for path in shm_dir.iterdir()} == {
        os.path.basename(second["run_dir"]).split("-")[1]
    }
    again.terminate()
    assert again.wait(10) == 0


def test_a_taken_port_is_one_clear_line(serve: Serve) -> None:
    process, ready, _ = serve("process")
    port = ready["url"].rpartition(":")[2]
    command = [sys.executable, "-P", "-m", "headrace.cli", "serve", "--fake", "--set", f"router.port={port}"]
    done = subprocess.run([*command, "--set", "deploy.launcher=process"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "Address already in use" in done.stderr
    assert "Traceback" not in done.stderr.split("--- end of")[0]
    process.terminate()
    assert process.wait(10) == 0
