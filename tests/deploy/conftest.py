"""A run directory and a service of fake boxes, and a check that nothing of them is left."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from headrace.config import Config, load_config
from headrace.deploy.facts import ModelFacts
from headrace.deploy.plan import Entries
from headrace.deploy.supervisor import Supervisor

FAKE = "headrace.deploy.fake:FakeBox"


def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


@pytest.fixture
def shm_dir(tmp_path: Path) -> Path:
    path = tmp_path / "shm"
    path.mkdir()
    return path


@pytest.fixture
def make_config(shm_dir: Path) -> Callable[..., Config]:
    def make(launcher: str = "process", *overrides: str) -> Config:
        base = [f"deploy.launcher={launcher}", "router.port=0", f"store.shm_dir={shm_dir}", "deploy.start_timeout_s=60"]
        return load_config(None, [*base, "model.device=cpu", *overrides])

    return make


@pytest.fixture
def make_supervisor(make_config: Callable[..., Config], shm_dir: Path) -> Iterator[Callable[..., Supervisor]]:
    made: list[tuple[Supervisor, set[int]]] = []

    def make(*args: str) -> Supervisor:
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        facts = ModelFacts(None, b"f" * 32)
        supervisor = Supervisor(make_config(*args), entries=Entries.all(FAKE), facts=lambda _: facts)
        made.append((supervisor, before))
        return supervisor

    yield make
    for supervisor, before in made:
        run_dir = supervisor.run_dir
        supervisor.close(0.2)
        left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
        assert left == []
        assert list(shm_dir.iterdir()) == []
        assert not run_dir or not Path(run_dir).exists()
