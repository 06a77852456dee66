"""One conformance suite for both launchers, with real processes and a real (local) Ray."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from headrace.config import Config
from headrace.deploy.base import BoxContext, BoxHandle, BoxSpec, Launcher
from headrace.deploy.launchers import make_launcher
from headrace.deploy.launchers.ray import ray_temp_dir
from headrace.errors import CheckpointError, ConfigError, RankLost

FAKE = "headrace.deploy.fake:FakeBox"
Launch = Callable[..., BoxHandle]


@pytest.fixture(scope="module", params=["process", "ray"])
def launcher(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Launcher, Path]]:
    from headrace.config import load_config

    run_dir = tmp_path_factory.mktemp("r")
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    made = make_launcher(load_config(None, [f"deploy.launcher={request.param}"]), str(run_dir), 4.0, 0)
    yield made, run_dir
    made.close()
    assert [c for c in psutil.Process().children(recursive=True) if c.pid not in before] == []
    assert not (run_dir / "ray").exists()


@pytest.fixture
def launch(launcher: tuple[Launcher, Path], make_config: Callable[..., Config]) -> Iterator[Launch]:
    made, run_dir = launcher
    handles: list[BoxHandle] = []

    def start(name: str, entry: str = FAKE) -> BoxHandle:
        context = BoxContext(config=make_config(), name=name, run_dir=str(run_dir))
        handle = made.launch(BoxSpec(entry=entry, context=context, cpus=0.5))
        handles.append(handle)
        return handle

    yield start
    for handle in handles:
        handle.kill()


def test_start_status_stop(launch: Launch, launcher: tuple[Launcher, Path], shm_dir: Path) -> None:
    box = launch("node-0")
    endpoints = box.start(60.0)
    assert endpoints["node-0"].startswith("127.0.0.1:")
    status = box.status(10.0)
    assert status["ready"] is True
    assert status["incarnation"] == box.incarnation
    assert box.alive()
    assert psutil.pid_exists(box.pid)
    assert "fake box node-0 serves" in (launcher[1] / "node-0.log").read_text()
    assert len(list(shm_dir.iterdir())) == 1
    box.stop(1.0)
    assert not psutil.pid_exists(box.pid)
    assert not box.alive()
    assert list(shm_dir.iterdir()) == []


def test_the_working_directory_hides_no_package(launch: Launch, launcher: tuple[Launcher, Path]) -> None:
    box = launch("node-1")
    box.start(60.0)
    status = box.status(10.0)
    assert status["kernels"] == "elsewhere"
    assert status["cwd"] == str(launcher[1])
    assert status["home"] == str(Path.home())


def test_a_failing_start_reports_the_error_of_the_box(launch: Launch, launcher: tuple[Launcher, Path]) -> None:
    (launcher[1] / "bad.fail").write_text("layer 3 is missing")
    with pytest.raises(CheckpointError, match="layer 3 is missing"):
        launch("bad").start(60.0)


def test_an_unknown_entry_is_named(launch: Launch) -> None:
    with pytest.raises(ConfigError, match=r"headrace\.nothing:Box"):
        launch("none", "headrace.nothing:Box").start(60.0)


def test_a_start_that_hangs_times_out_and_can_be_killed(launch: Launch, launcher: tuple[Launcher, Path]) -> None:
    (launcher[1] / "slow.hang").touch()
    box = launch("slow")
    with pytest.raises(RankLost, match="slow"):
        box.start(3.0)
    box.kill()
    assert not box.alive()


def test_a_box_deaf_to_stop_is_gone_soon(launch: Launch, launcher: tuple[Launcher, Path]) -> None:
    (launcher[1] / "deaf.deaf").touch()
    box = launch("deaf")
    box.start(60.0)
    began = time.monotonic()
    box.stop(0.2)
    assert time.monotonic() - began < 5.0
    assert not psutil.pid_exists(box.pid)


def test_a_killed_box_is_seen(launch: Launch) -> None:
    box = launch("victim")
    box.start(60.0)
    psutil.Process(box.pid).kill()
    deadline = time.monotonic() + 10
    while box.alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not box.alive()
    with pytest.raises(RankLost, match="victim"):
        box.status(5.0)


def test_ray_files_stay_short_enough_for_sockets(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    chosen = Path(ray_temp_dir(str(long)))
    assert chosen.parent == Path("/tmp")
    chosen.rmdir()
