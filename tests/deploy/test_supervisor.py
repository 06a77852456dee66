"""Supervision of a service of fake boxes: order, restarts, stop. Real processes."""

import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from headrace.deploy.supervisor import Supervisor
from headrace.errors import Cancelled, CheckpointError

Make = Callable[..., Supervisor]


def name_at(address: str) -> str:
    """What the fake box behind an address calls itself."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        return connection.recv(100).decode()


def watch_until(supervisor: Supervisor, condition: Callable[[], bool], timeout_s: float = 20.0) -> int:
    """Run the watch loop until `condition`; its result."""
    deadline = time.monotonic() + timeout_s

    def end() -> None:
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.05)
        supervisor.request_stop()

    thread = threading.Thread(target=end)
    thread.start()
    code = supervisor.watch()
    thread.join()
    assert condition()
    return code


def pid_of(supervisor: Supervisor, unit: str, index: int = 0) -> int:
    return supervisor.units[unit].pids()[index]


def test_everything_starts_and_knows_what_started_before(make_supervisor: Make) -> None:
    supervisor = make_supervisor()
    endpoints = supervisor.start()
    assert set(endpoints) == {"node-0", "prefill-0", "decode-0.0", "decode-0.1", "router"}
    assert name_at(endpoints["decode-0.1"]) == "decode-0.1"
    assert name_at(endpoints["prefill-0"]) == "prefill-0.0"
    assert json.loads(Path(supervisor.run_dir, "endpoints.json").read_text()) == endpoints
    router = supervisor.units["router"]._boxes["router"].status(5.0)
    assert router["endpoints"] == {k: v for k, v in endpoints.items() if k != "router"}
    decode = supervisor.units["decode-0"]._boxes["decode-0.0"].status(5.0)
    assert decode["endpoints"] == {"node-0": endpoints["node-0"]}


def test_a_dead_rank_restarts_its_whole_group_and_only_it(make_supervisor: Make) -> None:
    supervisor = make_supervisor()
    before = supervisor.start()
    pids = {name: list(unit.pids()) for name, unit in supervisor.units.items()}
    psutil.Process(pid_of(supervisor, "decode-0", 1)).kill()
    published = Path(supervisor.run_dir, "endpoints.json")

    def is_back() -> bool:
        now = json.loads(published.read_text())
        return "decode-0.0" in now and now["decode-0.0"] != before["decode-0.0"]

    assert watch_until(supervisor, is_back) == 0
    assert not set(supervisor.units["decode-0"].pids()) & set(pids["decode-0"])
    for name in ("node-0", "prefill-0", "router"):
        assert supervisor.units[name].pids() == pids[name]
    assert name_at(supervisor.endpoints["decode-0.1"]) == "decode-0.1"


def test_a_dead_router_comes_back_on_its_port(make_supervisor: Make) -> None:
    supervisor = make_supervisor()
    before = supervisor.start()
    old = pid_of(supervisor, "router")
    psutil.Process(old).kill()

    def is_back() -> bool:
        return supervisor.units["router"].pids() not in ([], [old]) and "router" in supervisor.endpoints

    watch_until(supervisor, is_back)
    assert supervisor.endpoints["router"] == before["router"]
    assert name_at(before["router"]) == "router"


def test_a_dead_daemon_comes_back(make_supervisor: Make) -> None:
    supervisor = make_supervisor()
    supervisor.start()
    old = pid_of(supervisor, "node-0")
    psutil.Process(old).kill()
    watch_until(supervisor, lambda: supervisor.units["node-0"].pids() not in ([], [old]))


def test_a_rank_that_says_it_is_not_ready_is_restarted(make_supervisor: Make) -> None:
    supervisor = make_supervisor()
    supervisor.start()
    old = supervisor.units["prefill-0"].pids()
    flag = Path(supervisor.run_dir, "prefill-0.1.sick")
    flag.touch()

    def is_replaced() -> bool:
        now = supervisor.units["prefill-0"].pids()
        if not set(now) & set(old):
            flag.unlink(missing_ok=True)
            return len(now) == 2
        return False

    watch_until(supervisor, is_replaced)


def test_without_restart_a_death_ends_the_service(make_supervisor: Make) -> None:
    supervisor = make_supervisor("process", "deploy.restart=false")
    supervisor.start()
    psutil.Process(pid_of(supervisor, "prefill-0")).kill()
    assert supervisor.watch() == 1


def test_a_failing_start_shows_the_log_of_the_box(make_supervisor: Make, tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    run_dir.mkdir()
    (run_dir / "decode-0.1.fail").write_text("tensor q_b_proj is missing")
    supervisor = make_supervisor("process", f"deploy.run_dir={run_dir}")
    with pytest.raises(CheckpointError, match=r"q_b_proj(.|\n)*end of decode-0\.1\.log"):
        supervisor.start()
    supervisor.close()
    assert {path.suffix for path in run_dir.iterdir()} == {".log"}
    for path in run_dir.iterdir():
        path.unlink()
    run_dir.rmdir()


def test_a_stop_while_starting_is_obeyed(make_supervisor: Make, tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    run_dir.mkdir()
    (run_dir / "node-0.hang").touch()
    supervisor = make_supervisor("process", f"deploy.run_dir={run_dir}")
    threading.Timer(1.0, supervisor.request_stop).start()
    with pytest.raises(Cancelled):
        supervisor.start()
    began = time.monotonic()
    supervisor.close()
    assert time.monotonic() - began < 8.0
    for path in run_dir.iterdir():
        path.unlink()
    run_dir.rmdir()
